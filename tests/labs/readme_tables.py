"""Tables of results in READMEs, each generated from a CSV file of `tests/results`; lists those that are not.

    .venv/bin/python tests/labs/readme_tables.py            # what no stored result backs
    .venv/bin/python tests/labs/readme_tables.py --write    # write the marked tables anew

A line `<!-- results/NAME.csv -->` marks the table below it. The first line of a CSV file is a comment with the command
that printed the numbers. `transcribed` in it says that they were copied from the table, and no run is stored.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "results"
_MARK = re.compile(r"<!-- results/([\w.-]+\.csv) -->")
_RULE = re.compile(r"\|[\s:|-]+\|")
_NUMBER = re.compile(r"[<~*]*[-+]?\d[\d.,]*( |$|[%x*(])")
_FEW = 3
"""Fewest cells beside the first column that begin with a number in a table of results."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a README.

    Attributes:
        line: Number of its heading's line, from 1.
        rule: The line below the heading, with the columns' alignment.
        results: Name of the CSV file that it is generated from; None if it isn't marked.
        rows: Texts of the cells, the heading first.
    """

    readme: Path
    line: int
    rule: str
    results: str | None
    rows: tuple[tuple[str, ...], ...]

    @property
    def has_numbers(self) -> bool:
        numbers = sum(_NUMBER.match(cell) is not None for row in self.rows[1:] for cell in row[1:])
        return numbers >= _FEW

    @property
    def text(self) -> list[str]:
        """Its lines in Markdown."""
        heading, *body = ("|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in self.rows)
        return [heading, self.rule, *body]


def read_tables(readme: Path) -> Iterator[Table]:
    """The tables of a README, in their order."""
    lines = readme.read_text(encoding="utf-8").split("\n")
    for place in range(len(lines) - 1):
        if not lines[place].startswith("|") or _RULE.fullmatch(lines[place + 1]) is None:
            continue
        end = next(at for at in range(place, len(lines) + 1) if at == len(lines) or not lines[at].startswith("|"))
        mark = _MARK.fullmatch(lines[place - 1]) if place else None
        rows = (_cells(line) for line in (lines[place], *lines[place + 2 : end]))
        yield Table(readme, place + 1, lines[place + 1], mark and mark[1], tuple(rows))


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().removeprefix("|").removesuffix("|")))


def readmes() -> list[Path]:
    """The READMEs of the project."""
    folders = ("configs", "evaluators", "kernels", "search", "store", "tests", "workers")
    return [ROOT / "README.md", *(path for folder in folders for path in sorted((ROOT / folder).rglob("README.md")))]


def read_results(name: str, folder: Path = RESULTS) -> tuple[str, tuple[tuple[str, ...], ...]]:
    """The comment and the rows of a CSV file of results.

    Raises:
        ValueError: It doesn't begin with a comment.
    """
    comment, _, content = (folder / name).read_text(encoding="utf-8").partition("\n")
    if not comment.startswith("# "):
        raise ValueError(f"{folder / name}: the first line must be a comment with the command that printed the numbers")
    return comment.removeprefix("# "), tuple(map(tuple, csv.reader(io.StringIO(content))))


def write_results(name: str, comment: str, rows: Sequence[Sequence[str]], folder: Path = RESULTS) -> None:
    """Write a CSV file of results, the heading's row first."""
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows(rows)
    (folder / name).write_text(f"# {comment}\n{written.getvalue()}", encoding="utf-8")


def write_tables(readme: Path, folder: Path = RESULTS) -> None:
    """Write the marked tables of a README anew; a number of columns that has changed is an error."""
    lines = readme.read_text(encoding="utf-8").split("\n")
    for table in reversed([each for each in read_tables(readme) if each.results is not None]):
        rows = read_results(str(table.results), folder)[1]
        if any(len(row) != len(table.rows[0]) for row in rows):
            raise ValueError(f"{readme}:{table.line}: {table.results} has another number of columns than the table")
        made = Table(readme, table.line, table.rule, table.results, rows)
        lines[table.line - 1 : table.line + len(table.rows)] = made.text
    readme.write_text("\n".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        for readme in readmes():
            write_tables(readme)
    for table in (table for readme in readmes() for table in read_tables(readme)):
        place = f"{table.readme.relative_to(ROOT)}:{table.line}"
        if table.results is None and table.has_numbers:
            print(f"{place}: no stored result: {' | '.join(table.rows[0])}")
        elif table.results is not None and "transcribed" in (comment := read_results(table.results)[0]):
            print(f"{place}: {comment}")


if __name__ == "__main__":
    main()
