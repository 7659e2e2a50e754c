"""Tables of results in READMEs are those of their CSV files."""

from __future__ import annotations

from pathlib import Path

import pytest
from readme_tables import RESULTS, read_results, read_tables, readmes, write_results, write_tables

MARKED = [table for readme in readmes() for table in read_tables(readme) if table.results is not None]


def test_every_marked_table_is_its_results() -> None:
    for table in MARKED:
        assert table.rows == read_results(str(table.results))[1], f"{table.readme}:{table.line}: {table.results}"
    named = sorted(str(table.results) for table in MARKED)
    assert named == sorted(path.name for path in RESULTS.glob("*.csv")), "a file for each table, and no other"


def test_a_table_is_written_anew_and_one_without_results_is_found(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    kept = "# One\n\n| a | b |\n|---|---:|\n| x | 1 |\n| y | 2 |\n| z | -3.5 % |\n\n"
    readme.write_text(f"{kept}<!-- results/two.csv -->\n| of | here |\n|---|---:|\n| old | |\n\nThe end.\n")
    one, two = read_tables(readme)
    assert (one.line, one.results, one.has_numbers) == (3, None, True)
    assert (two.line, two.results, two.has_numbers, two.rows) == (10, "two.csv", False, (("of", "here"), ("old", "")))
    write_results("two.csv", "moevolve study two.yaml", [["of", "now"], ["a, b", "70.8 (67.9)"], ["c", ""]], tmp_path)
    write_tables(readme, tmp_path)
    assert readme.read_text() == (
        f"{kept}<!-- results/two.csv -->\n| of | now |\n|---|---:|\n| a, b | 70.8 (67.9) |\n| c | |\n\nThe end.\n"
    )
    assert list(read_tables(readme))[1].rows == read_results("two.csv", tmp_path)[1]
    write_results("two.csv", "moevolve study two.yaml", [["of"]], tmp_path)
    with pytest.raises(ValueError, match="another number of columns"):
        write_tables(readme, tmp_path)
    (tmp_path / "two.csv").write_text("of,now\n")
    with pytest.raises(ValueError, match="must be a comment with the command"):
        read_results("two.csv", tmp_path)
