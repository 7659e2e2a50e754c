"""Rows of real text that every installation has: what comes with Python, NumPy and torch, divided by document."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from inspect import cleandoc
from pathlib import Path

from moevolve.evaluators.errors import UserError

Documents = Iterator[tuple[str, str]]

SOURCE_SPLITS = ("train", "calibration", "search", "dev", "test")
_SPLIT_OF_BUCKET = ("train",) * 5 + ("calibration", "search", "dev", "test", "test")
# Strings that don't begin a line are matched, too, so that their end isn't taken for the beginning of a docstring.
_QUOTED = re.compile(r'(^[ \t]*)?[bBfFrRuU]*"""(.*?)"""', re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^(?=[ \t]*\S).{119,479}\S$", re.MULTILINE | re.DOTALL)
# Tables of characters, tests, and the text of another domain.
_NOT_READ = {"encodings", "pydoc_data", "idle_test", "test", "tests"}


def rows_of(domain: str, split: str) -> list[dict[str, str]]:
    """Return the rows of one split of a domain, `{"text"}` of whole lines and 120 to 480 characters.

    A hash of a document's name decides its split: half of the documents are `train`, which no packaged task reads, a
    tenth each `calibration`, `search` and `dev`, two tenths `test`. A paragraph that several documents have belongs to
    the first one. The rows are the same wherever the same versions of Python, NumPy and torch are installed.

    Raises:
        UserError: NumPy or torch isn't installed.
    """
    return [{"text": text} for text in _rows(domain)[split]]


@cache
def _rows(domain: str) -> dict[str, list[str]]:
    split_of: dict[str, str] = {}
    seen: set[str] = set()
    for name, text in DOMAINS[domain]():
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        split = _SPLIT_OF_BUCKET[int.from_bytes(digest, "big") % len(_SPLIT_OF_BUCKET)]
        paragraphs = dict.fromkeys(part.rstrip() for part in re.split(r"\n\s*\n", text))
        for row in _ROW.findall("\n\n".join(part for part in paragraphs if part not in seen)):
            split_of.setdefault(row, split)
        seen.update(paragraphs)
    return {split: [row for row, its in split_of.items() if its == split] for split in SOURCE_SPLITS}


def _manual() -> Documents:
    """Sections of Python's language reference, as `help()` shows them."""
    from pydoc_data.topics import topics  # imported here because it takes 10 ms, and every command reads this module

    for _, chapter in sorted(topics.items()):
        for section in re.split(r"\n(?=\S.*\n(?:[*=]{4,}|-{4,})\n)", chapter):
            yield section[:60], section


def _code() -> Documents:
    """Return the standard library's modules without docstrings."""
    for name, text in _standard_library():
        yield name, _QUOTED.sub(lambda quoted: quoted[0] if quoted[1] is None else "", text)


def _docstrings() -> Documents:
    """Return the docstrings of the standard library's and NumPy's modules."""
    for name, text in (*_standard_library(), *_files(_package("numpy"), "**/*.py")):
        yield name, "\n\n".join(cleandoc(quoted[2]) for quoted in _QUOTED.finditer(text) if quoted[1] is not None)


def _headers() -> Documents:
    """Return the C++ headers of torch's own libraries."""
    include = _package("torch") / "include"
    for folder in ("c10", "torch"):
        yield from _files(include / folder, "**/*.h")


DOMAINS: dict[str, Callable[[], Documents]] = {
    "manual": _manual,
    "docstrings": _docstrings,
    "code": _code,
    "headers": _headers,
}


def _standard_library() -> Documents:
    folder = Path(sysconfig.get_path("stdlib"))
    # Not one pattern for all: `site-packages`, which may be in this folder, has far more files.
    for module in sorted(sys.stdlib_module_names):
        yield from _files(folder, f"{module}.py")
        yield from _files(folder, f"{module}/**/*.py")


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise UserError(f"the text of {name} is a task's source, and {name} isn't installed; install it")
    return Path(spec.origin).parent


def _files(folder: Path, pattern: str) -> Documents:
    for path in sorted(folder.glob(pattern)):
        name = path.relative_to(folder)
        if not _NOT_READ & set(name.parts):
            yield name.as_posix(), path.read_text(encoding="utf-8", errors="replace")
