"""Listings as tables: what strangers wrote into them does nothing to a browser, a spreadsheet or a terminal."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace

import pytest
from store_samples import search

from moevolve.search.interface.tables import Rows, csv_text, flat
from moevolve.store.records import SearchSummary

EVIL = "=<b>\x1b]0;x\x07"


def test_a_listing_is_a_list_that_notebooks_show() -> None:
    row = SearchSummary(search("one", note=EVIL, tags=("a", "b")), 3, 2, 1, 0.75, None, None, ("rte", "cb"), None)
    rows = Rows([row, replace(row, search=search(EVIL), best_fitness=None)])
    assert rows == [row, rows[1]]
    shown = rows._repr_html_()
    assert "<td>=&lt;b&gt; ]0;x </td>" in shown and "<td>75.0 %</td>" in shown and "<th>dev</th>" not in shown
    first, second = csv.DictReader(io.StringIO(csv_text(map(flat, rows))))
    tamed = "'=<b>\ufffd]0;x\ufffd"
    assert (first["note"], first["tasks"], first["test"], second["search"]) == (tamed, "rte cb", "", tamed)
    frame = rows.to_pandas()
    assert (
        (frame["best"][0], frame["scale"][0]) == (75.0, "percent")
        and list(frame["individuals"]) == [3, 3]
        and frame["note"][0] == EVIL
    )
    assert repr(rows) == "<2 rows of SearchSummary: to_pandas() makes a data frame>"
    assert repr(Rows())[:8] == "<0 rows:"


@pytest.mark.parametrize(
    "begins", ["=", "＝", "＠", "-", "\n=", "\t", "  =", "\N{NO-BREAK SPACE}+", "text;=", "text; @", "a\n="]
)
def test_no_cell_is_a_formula_in_any_spreadsheet(begins: str) -> None:
    text = csv_text([{"note": f"{begins}cmd()"}, {"note": "one - two; a = b, -1"}])
    formula = re.compile(r"[=+\-@＝＋－＠]")
    for row in text.splitlines():
        assert not any(formula.match(cell.strip(' "\N{NO-BREAK SPACE}')) for cell in row.split(";")), row
    assert text.endswith('"one - two; a = b, -1"\n'), "and other text is as it was"
