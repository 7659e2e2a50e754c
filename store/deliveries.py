"""Who was told of what happened: each event goes to each target from one server alone, however many there are.

A server claims an event for a target by a row; one that is taken is another's. The claim runs out like a lease, so
that a server which dies over a delivery leaves it to the next. So an event may come twice, and none is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import Connection, and_, or_, select, update

from moevolve.store.records import Event
from moevolve.store.session import insert_new
from moevolve.store.tables import deliveries, events


def claim(
    connection: Connection, target: str, statuses: Sequence[str], since: datetime, now: datetime, seconds: float
) -> list[tuple[Event, int]]:
    """Take the events of new statuses that a target is still to be told of.

    Args:
        connection: to write to.
        target: who.
        statuses: which it is told of.
        since: events before are nobody's news any more.
        now: the present.
        seconds: until somebody else may tell it, if nothing comes of this.

    Returns:
        Each with the number of times that it was tried before.
    """
    e, d = events.c, deliveries.c
    same = and_(d.search_id == e.search_id, d.seq == e.seq, d.target == target)
    told = [or_(e.text == status, e.text.startswith(f"{status}: ")) for status in statuses]
    query = (
        select(e.search_id, e.seq, e.kind, e.text, e.idx, e.at, d.attempts)
        .outerjoin(deliveries, same)
        .where(e.at >= since, e.kind == "status", or_(*told), or_(d.target.is_(None), d.next_at <= now))
        .order_by(e.at, e.search_id, e.seq)
        # Two servers that look at once: what one has, the other passes over.
        .with_for_update(of=events, skip_locked=True)
    )
    found = [(Event(*row[:6]), row.attempts or 0) for row in connection.execute(query)]
    free = {"next_at": now + timedelta(seconds=seconds), "target": target}
    rows = [{**free, "search_id": one.search_id, "seq": one.seq, "attempts": 0} for one, _ in found]
    insert_new(connection, deliveries, rows)
    for one, before in found:
        mine = (d.search_id == one.search_id, d.seq == one.seq, d.target == target)
        connection.execute(update(deliveries).where(*mine).values(next_at=free["next_at"], attempts=before + 1))
    return found


def settle(connection: Connection, event: Event, target: str, outcome: str, next_at: datetime | None) -> None:
    """Note how an attempt went.

    Args:
        connection: to write to.
        event: which.
        target: who was told.
        outcome: one line.
        next_at: when to try again; None never.
    """
    d = deliveries.c
    mine = (d.search_id == event.search_id, d.seq == event.seq, d.target == target)
    connection.execute(update(deliveries).where(*mine).values(outcome=outcome, next_at=next_at))
