"""Searches beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Annotated

from pydantic import Field

from moevolve.search.config.run import LONGEST_NAME
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.results.comparison import Comparison, compare_searches
from moevolve.store.reader import StoreReader
from moevolve.store.records import CourseAxis


@record
class CompareRequest(Request):
    """Show searches beside each other: their courses, the settings that differ, their winners' scores and paired tests.

    Searches that differ only in the seed are a group, whose mean and range are shown. Nothing is evaluated.

    Raises:
        StoreError: there is no such store or search.
    """

    route = "/compare"
    searches: Annotated[
        Sequence[Annotated[str, Field(max_length=LONGEST_NAME)]],
        about("Names or ids of the searches; tests are against the first.", min_length=1, max_length=64),
        Flag(metavar="SEARCH...", kind=list[str]),
    ]
    _: KW_ONLY
    by: Annotated[
        CourseAxis, about("What courses are shown over: evaluated individuals, or hours in which the search ran.")
    ] = "evaluations"

    def answer(self, store: StoreReader) -> Comparison:
        return compare_searches(store, self.searches, self.by)
