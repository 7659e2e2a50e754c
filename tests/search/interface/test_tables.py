"""Listings as tables."""

from __future__ import annotations

from dataclasses import replace

from store_samples import search

from moevolve.search.interface.tables import Rows, flat
from moevolve.search.text import html_table
from moevolve.store.records import SearchSummary

EVIL = "=<b>\x1b]0;x\x07"


def test_a_listing_is_a_list_that_becomes_a_data_frame() -> None:
    row = SearchSummary(search("one", status_reason=EVIL), 3, 2, 1, 0.75, None, None, ("rte", "cb"), None)
    rows = Rows([row, replace(row, search=search(EVIL), best_fitness=None)])
    assert rows == [row, rows[1]]
    frame = rows.to_pandas()
    assert frame["best"][0] == 75.0 and frame["status_reason"][0] == EVIL


def test_what_strangers_wrote_into_a_table_does_nothing_to_a_browser() -> None:
    assert "<td>=&lt;b&gt; ]0;x </td>" in html_table([{"name": EVIL}])


def test_a_search_whose_driver_is_gone_is_called_so() -> None:
    row = SearchSummary(search("one", status="running"), 3, 2, 1, 0.75, None, None, ("rte",), None)
    assert flat(row)["status"] == "orphaned" and flat(row)["status_reason"] == "its driver is gone: resume it"
    assert flat(replace(row, owner="me"))["status"] == "running"
