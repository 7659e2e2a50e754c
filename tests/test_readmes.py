"""READMEs: each opens with a sentence, and the files, links, commands and options that they name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import typer.main

from moevolve.search.cli.app import app

ROOT = Path(__file__).parents[1]
PARTS = ("search", "workers", "evaluators", "store", "kernels", "configs")
ALL = [ROOT / "README.md", *sorted(path for part in (*PARTS, "tests") for path in (ROOT / part).rglob("README.md"))]
MOST, LARGEST, LARGEST_FIRST = 30, 12_000, 10 * 1024
"""How many READMEs there may be, and the bytes of one and of the first one."""
CHECKED = (".py", ".jinja", ".yaml", ".toml", "/")
"""How backquoted words end that are files or folders of ours."""
ELSEWHERE = {"run.yaml", "reviews.yaml", "__init__.py", "convert_hf_to_gguf.py"}
"""Files that a reader would write, one that is not there on purpose, and a program of llama.cpp."""


def code(text: str) -> Iterator[str]:
    """What stands in backquotes, and every line of indented or fenced examples."""
    fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield line.strip()
        else:
            yield from re.findall(r"`([^`]+)`", line)


def patterns(name: str) -> list[str]:
    """A name as patterns of paths: `<kind>` stands for anything, `{a,b}` for one or the other."""
    name = re.sub(r"<[^>]*>", "*", name)
    pieces = [piece.split(",") for piece in re.split(r"[{}]", name)]
    return ["".join(picked) for picked in product(*pieces)]


def missing(paragraph: str, folder: Path) -> list[str]:
    """Files and folders that a paragraph of a README names and that aren't there.

    A path begins at the README's folder, at the top, or beside the path that was named before; a bare name may also be
    of any file below the README's folder.
    """
    beside, wrong = folder, []
    for word in code(paragraph):
        if not re.fullmatch(r"[\w./<>{},*-]+", word) or not word.endswith(CHECKED) or word in ELSEWHERE:
            continue
        for pattern in patterns(word):
            found = [path for base in (folder, ROOT, beside) for path in base.glob(pattern)]
            found = found or ([] if "/" in word else list(folder.rglob(pattern)))
            if not found:
                wrong.append(word)
            elif "/" in word:
                beside = found[0] if found[0].is_dir() else found[0].parent
    return wrong


def leads_somewhere(target: str, readme: Path) -> bool:
    """Whether a link's file is there, with the heading that it names."""
    path, _, anchor = target.partition("#")
    file = readme.parent / path if path else readme
    if not anchor:
        return file.exists()
    headings = re.findall(r"^#+ (.*)", file.read_text(encoding="utf-8"), re.MULTILINE)
    return anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def examples(readme: Path) -> Iterator[tuple[str, str]]:
    """Command lines, with the names of their commands."""
    for line in code(readme.read_text(encoding="utf-8")):
        found = re.match(r"moevolve ((?:db )?[a-z][a-z-]*)", line)
        if found:
            yield found[1], line


def commands() -> dict[str, Any]:
    """By what is typed, with its options; those of a group behind its name."""
    top: Any = typer.main.get_command(app)
    found: dict[str, Any] = {}
    for name, command in top.commands.items():
        below = getattr(command, "commands", None)
        found |= {name: command} if below is None else {f"{name} {verb}": each for verb, each in below.items()}
    return {
        name: {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
        for name, command in found.items()
    }


def test_they_are_few_and_short_and_each_opens_with_a_sentence() -> None:
    assert len(ALL) <= MOST
    assert ALL[0].stat().st_size <= LARGEST_FIRST
    for readme in ALL:
        title, blank, *lines = readme.read_text(encoding="utf-8").splitlines()
        assert title.startswith("# ") and not blank, readme
        opening = "\n".join(lines).partition("\n\n")[0]
        assert re.match(r"[A-Za-z`].*?[^.][.:](\s|$)", opening, re.DOTALL), (readme, opening)
        assert readme.stat().st_size <= LARGEST, readme


def test_links_lead_somewhere_and_files_that_they_name_are_there() -> None:
    wrong = []
    for readme in ALL:
        text, folder = readme.read_text(encoding="utf-8"), readme.parent
        local = {each for each in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+://", each)}
        wrong += [(readme, target) for target in local if not leads_somewhere(target, readme)]
        wrong += [(readme, name) for paragraph in text.split("\n\n") for name in missing(paragraph, folder)]
    assert wrong == []


def test_commands_and_their_options_are_there_and_every_command_is_told_of() -> None:
    known, wrong = commands(), []
    lines = [(readme, name, line) for readme in ALL for name, line in examples(readme)]
    assert {name for _, name, _ in lines} == known.keys()
    for readme, name, line in lines:
        asked = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", line))
        wrong += [(readme, option, line) for option in sorted(asked - known[name])]
    assert wrong == []
