"""The page about the server itself: its store, running searches, workers, requests and started processes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from moevolve.search.server.dependencies import ServerDep
from moevolve.search.server.pages.rendering import render
from moevolve.search.server.pages.views import view_of_summary
from moevolve.store.reader import StoreReader
from moevolve.store.records import EventKind, SearchRecord
from moevolve.store.schema import newest_revision

_LATEST = 200
"""Number of latest individuals whose evaluations are counted per worker."""
_SEARCHES = 8
"""Number of searches whose workers are listed."""
_ASKED: tuple[EventKind, ...] = ("asked", "exported", "retried")
"""Kinds of events that name who requested something."""
_REQUESTS = 50
"""Number of requests that are listed, the latest."""

routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@routes.get("/health")
def show_health(request: Request, server: ServerDep) -> HTMLResponse:
    """State of the server and of what runs."""
    before = time.perf_counter()
    controls = server.listings.controls()
    seconds = time.perf_counter() - before
    views = [
        view_of_summary(one, controls[one.search.id])
        for one in server.listings.summaries()
        if one.search.id in controls
    ]
    alive = [view for view in views if view.control.alive]
    return render(
        request,
        "health.jinja",
        kind=server.store.url.partition(":")[0].partition("+")[0],
        file=Path(server.store.location).name if server.store.is_file else None,
        revision=newest_revision(),
        milliseconds=1000 * seconds,
        count=len(views),
        alive=alive,
        damaged=[view for view in views if view.control.fault is not None],
        asked=server.store.latest_events(limit=_REQUESTS, kinds=_ASKED),
        searches={view.search.id: view.search for view in views},
        orphaned=[view for view in views if view.is_orphaned],
        workers=[(view.search, workers_of(server.store, view.search)) for view in alive[:_SEARCHES]],
        jobs=server.processes.jobs(),
    )


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker's share in evaluating a search's latest individuals.

    Attributes:
        seconds: Total time of these evaluations.
        last: Time in UTC at which the latest of them was stored.
    """

    name: str
    evaluations: int
    seconds: float = field(repr=False)
    last: datetime | None = field(repr=False)


def workers_of(store: StoreReader, search: SearchRecord) -> list[WorkerView]:
    """The workers that evaluated a search's latest individuals, the busiest first."""
    hashes = {row.phenotype_hash for row in store.page(search.id, "newest", limit=_LATEST)}
    splits = [task.task_fingerprint for task in store.search_tasks(search.id) if task.split == "search"]
    found = store.evaluations(sorted(hashes), search.model_fingerprint, search.engine_fingerprint, splits)
    by_worker: dict[str, list[tuple[float, datetime | None]]] = {}
    for one in found:
        by_worker.setdefault(one.worker or "not recorded", []).append((one.seconds, one.created_at))
    views = [
        WorkerView(
            name,
            len(times),
            sum(seconds for seconds, _ in times),
            max((at for _, at in times if at is not None), default=None),
        )
        for name, times in by_worker.items()
    ]
    return sorted(views, key=lambda view: (-view.evaluations, view.name))
