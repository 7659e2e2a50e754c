"""READMEs: each opens with a sentence, and the files, links, commands and options that they name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import typer.main

from moevolve.search.cli.app import app

ROOT = Path(__file__).parents[1]
PARTS = ("search", "workers", "evaluators", "store", "kernels", "configs")
ALL = [ROOT / "README.md", *sorted(path for part in (*PARTS, "tests") for path in (ROOT / part).rglob("README.md"))]
LARGEST = 10 * 1024
CHECKED = (".py", ".jinja", ".yaml", ".toml", "/")
"""How backquoted words end that are files or folders of ours."""
ELSEWHERE = {"run.yaml", "reviews.yaml", "__init__.py"}
"""Files that a reader would write, and one that is not there on purpose."""

each_readme = pytest.mark.parametrize("readme", ALL, ids=lambda path: str(path.relative_to(ROOT).parent))


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


def examples(readme: Path) -> Iterator[tuple[str, str]]:
    """Command lines, with the names of their commands."""
    for line in code(readme.read_text(encoding="utf-8")):
        found = re.match(r"moevolve ((?:db )?[a-z][a-z-]*)", line)
        if found:
            yield found[1], line


def commands() -> dict[str, Any]:
    """By what is typed; those of a group behind its name."""
    top: Any = typer.main.get_command(app)
    found: dict[str, Any] = {}
    for name, command in top.commands.items():
        below = getattr(command, "commands", None)
        found |= {name: command} if below is None else {f"{name} {verb}": each for verb, each in below.items()}
    return found


def test_the_readme_at_the_top_stays_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= LARGEST


@each_readme
def test_it_opens_with_a_sentence(readme: Path) -> None:
    title, blank, *lines = readme.read_text(encoding="utf-8").splitlines()
    assert title.startswith("# ") and not blank
    opening = "\n".join(lines).partition("\n\n")[0]
    assert re.match(r"[A-Za-z`].*?[^.][.:](\s|$)", opening, re.DOTALL), opening


@each_readme
def test_links_lead_somewhere(readme: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", readme.read_text(encoding="utf-8"))
    local = {target.partition("#")[0] for target in targets if not re.match(r"[a-z]+://|#", target)}
    assert {target for target in local if not (readme.parent / target).exists()} == set()


@each_readme
def test_files_that_it_names_are_there(readme: Path) -> None:
    paragraphs = readme.read_text(encoding="utf-8").split("\n\n")
    assert [name for paragraph in paragraphs for name in missing(paragraph, readme.parent)] == []


@each_readme
def test_commands_and_their_options_are_there(readme: Path) -> None:
    known, wrong = commands(), []
    for name, line in examples(readme):
        assert name in known, line
        given = {option for one in known[name].params for option in (*one.opts, *one.secondary_opts)}
        asked = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", line))
        wrong += [f"{option} in: {line}" for option in sorted(asked - given)]
    assert wrong == []


def test_every_command_is_told_of() -> None:
    assert {name for readme in ALL for name, _ in examples(readme)} == set(commands())
