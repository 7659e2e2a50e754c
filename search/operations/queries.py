"""Requests that only look something up in the store."""

from __future__ import annotations

from moevolve.search.requests.searches import (
    BestRequest,
    ControlRequest,
    LineageRequest,
    SearchesRequest,
    SearchRequest,
    ShowRequest,
)
from moevolve.store.reader import StoreReader
from moevolve.store.records import BestRow, Control, IndividualDetail, LineageGraph, SearchRecord, SearchSummary


def searches(store: StoreReader, _: SearchesRequest) -> list[SearchSummary]:
    """See `SearchesRequest`."""
    return store.searches()


def search(store: StoreReader, request: SearchRequest) -> SearchRecord:
    """See `SearchRequest`."""
    return store.search(request.search)


def control(store: StoreReader, request: ControlRequest) -> Control:
    """See `ControlRequest`."""
    return store.control(store.search(request.search).id)


def best(store: StoreReader, request: BestRequest) -> list[BestRow]:
    """See `BestRequest`."""
    return store.best(request.task, request.experts, request.active, request.search, request.limit, request.by)


def show(store: StoreReader, request: ShowRequest) -> IndividualDetail:
    """See `ShowRequest`."""
    return store.individual(request.individual)


def lineage(store: StoreReader, request: LineageRequest) -> LineageGraph:
    """See `LineageRequest`."""
    follow = store.descendants if request.descendants else store.ancestors
    return follow(request.individual, request.depth)
