"""The events of searches: an append-only table whose rows are numbered per search.

The counter of a search's events is in its lease's row, which is locked to append an event. Numbers are therefore given
in the order of commits, and a reader that has seen event n misses none by asking for those after n.
"""

from __future__ import annotations

import getpass
import heapq
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime

from sqlalchemy import Connection, select, update

from moevolve.evaluators.scales import SCALES
from moevolve.store.records import Event, EventKind, IndividualRecord
from moevolve.store.scales import scales_of
from moevolve.store.session import insert_all
from moevolve.store.tables import events, individuals, leases, searches

# Name of the requester of this thread's or task's work, for events; None for the user of this process.
ASKER = ContextVar[str | None]("moevolve_asker", default=None)
# Environment variable with the same for all of a process.
ASKER_VARIABLE = "MOEVOLVE_ASKER"

# Fitness and tie-break; larger is better.
Rank = tuple[float, float]


def asker() -> str:
    """Return the requester of this process's work: by name, or its user and machine."""
    named = ASKER.get() or os.environ.get(ASKER_VARIABLE)
    if named:
        return named
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = f"user {os.getuid()}"
    return f"{user} on {socket.gethostname()}"


def append(connection: Connection, search_id: str, kind: EventKind, text: str, index: int | None = None) -> None:
    """Add one event; the lease's row stays locked until the transaction ends."""
    counted = update(leases).where(leases.c.search_id == search_id).values(events=leases.c.events + 1)
    seq = connection.execute(counted.returning(leases.c.events)).scalar_one()
    row = {"search_id": search_id, "seq": seq, "kind": kind, "text": text, "idx": index, "at": datetime.now(UTC)}
    insert_all(connection, events, [row])


def best_rank(connection: Connection, search_id: str) -> Rank | None:
    """Return the rank of the best individual of a search; None if no individual has a fitness."""
    i = individuals.c
    query = select(i.fitness, i.tie_break).where(i.search_id == search_id, i.status == "ok")
    row = connection.execute(query.order_by(i.fitness.desc(), i.tie_break.desc(), i.idx).limit(1)).first()
    return None if row is None else (row.fitness, row.tie_break)


def append_progress(
    connection: Connection, search_id: str, decided: Sequence[IndividualRecord], before: Rank | None
) -> None:
    """Append an event if one of the newly decided individuals is better than `before`, and one if some failed."""
    failed = [one for one in decided if one.status == "failed"]
    if failed:
        first = min(failed, key=lambda one: one.index)
        others = f" (and {len(failed) - 1} others)" if failed[1:] else ""
        append(connection, search_id, "failed", f"individual {first.index}{others}: {first.failure}", first.index)
    ranked = [(one.fitness, one.tie_break, -one.index) for one in decided if one.status == "ok"]
    known = [(fitness, tie, index) for fitness, tie, index in ranked if fitness is not None and tie is not None]
    if not known:
        return
    fitness, tie, index = max(known)
    if before is None or (fitness, tie) > before:
        scale = SCALES[scales_of(connection, search_id).fitness]
        append(connection, search_id, "best", f"individual {-index}: {scale.phrase(fitness)}", -index)


def read_hours(connection: Connection, search_id: str) -> float:
    """Hours that a search has run so far, without pauses and without the time between drivers."""
    e = events.c
    query = select(e.kind, e.text, e.at).where(e.search_id == search_id).order_by(e.seq)
    query = query.where(e.kind.in_(("status", "best", "retried")))
    seconds, running, last = 0.0, False, None
    for kind, text, at in connection.execute(query):
        starts = kind == "status" and text.startswith("running")
        # If it runs already, a driver has ended without a word, and nobody knows when.
        if running and last is not None and not starts:
            seconds += (at - last).total_seconds()
        last = at
        running = starts if kind == "status" else running
    written = connection.execute(select(searches.c.updated_at).where(searches.c.id == search_id)).scalar()
    if running and last is not None and written is not None:
        seconds += max(0.0, (written - last).total_seconds())
    return seconds / 3600


def read_events(connection: Connection, after: Mapping[str, int], limit: int = 1000) -> list[Event]:
    """Return the events of some searches, at most `limit` of each, in order of time.

    `after` has the number of the last known event by search id; the last numbers of the result give the next ones.
    """
    e = events.c
    found: list[list[Event]] = []
    for search_id, seq in after.items():
        query = select(e.search_id, e.seq, e.kind, e.text, e.idx, e.at).where(e.search_id == search_id, e.seq > seq)
        found.append([Event(*row) for row in connection.execute(query.order_by(e.seq).limit(limit))])
    # A merge keeps the numbers of one search in order, also if the clock was set back between its events.
    return list(heapq.merge(*found, key=lambda one: (one.at, one.search_id)))


def read_latest_events(
    connection: Connection, search_id: str | None = None, limit: int = 100, kinds: Collection[EventKind] = ()
) -> list[Event]:
    """Return the latest events of a search, or of all searches, newest first; of all kinds if none are given."""
    e = events.c
    query = select(e.search_id, e.seq, e.kind, e.text, e.idx, e.at)
    if kinds:
        query = query.where(e.kind.in_(kinds))
    if search_id is not None:
        query = query.where(e.search_id == search_id).order_by(e.seq.desc())
    else:
        query = query.order_by(e.at.desc(), e.search_id, e.seq.desc())
    return [Event(*row) for row in connection.execute(query.limit(limit))]
