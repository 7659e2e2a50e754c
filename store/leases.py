"""Who may write to a search, and what its driver is asked to do: a lease with a fencing epoch, one row per search.

A driver takes the lease, which gives it the next epoch, and renews it while it lives. Every write of its checks the
epoch in its own transaction, under a lock on the row: from when another driver has the lease, not one write of the
first goes through, however late it wakes up. Time is the database's; a driver's own clock decides nothing. Of an owner
that is known to be gone (`owners.py`) nobody waits until the lease runs out.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Row, Select, select, text, update

from moevolve.store.errors import LeaseHeldError, LeaseLostError, NotRunningError, StoreError
from moevolve.store.events import append
from moevolve.store.lineage import find_search
from moevolve.store.owners import is_gone
from moevolve.store.records import DESIRED_STATES, Control, DesiredState, Lease, Progress, ResourceRequest
from moevolve.store.session import lock_against_prune
from moevolve.store.tables import leases


def now_of(connection: Connection) -> datetime:
    """The database's time; of SQLite, which is a library, that of the one machine that it may be used on."""
    if connection.dialect.name == "sqlite":
        return datetime.now(UTC)
    now: datetime = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
    return now.astimezone(UTC)


def unheld(search_id: str) -> dict[str, Any]:
    """The row of a new search."""
    return {"search_id": search_id, "epoch": 0, "desired_state": "running", "priority": 0, "events": 0}


def acquire(connection: Connection, search_id: str, owner: str, seconds: float, priority: int | None) -> Lease:
    """Take a search's lease. What was asked of the driver before is forgotten; so is its priority, if one is given.

    Not that the search be cancelled: a driver that died before it heard that leaves it to the next one.

    Raises:
        LeaseHeldError: another driver has it, and isn't known to be gone.
        StoreError: unknown search.
    """
    lock_against_prune(connection)
    row, now = _locked(connection, search_id), now_of(connection)
    found = find_search(connection, search_id)
    if _control(row, now).alive:
        left = (row.expires_at - now).total_seconds()
        raise LeaseHeldError(
            f"search {found.name} is being run by {row.owner}; stop that one, or wait: if "
            f"it is dead, the search is free in {left:.0f} s"
        )
    lease = Lease(search_id, owner, row.epoch + 1)
    _set(
        connection,
        search_id,
        owner=owner,
        epoch=lease.epoch,
        expires_at=now + timedelta(seconds=seconds),
        desired_state="cancelled" if row.desired_state == "cancelled" and found.status != "finished" else "running",
        workers=None,
        stage=None,
        claim=None,
        **({} if priority is None else {"priority": priority}),
    )
    return lease


def renew(
    connection: Connection,
    lease: Lease,
    seconds: float,
    stage: str | None,
    progress: Progress | None,
    claim: ResourceRequest | None,
) -> Control:
    """Keep a lease for so many seconds from now on, say where its owner stands, and read what is asked of it.

    Args:
        connection: to write to.
        lease: which.
        seconds: that it lasts.
        stage: what the owner does, one line; None says nothing new.
        progress: where its search stands; None likewise.
        claim: what it could use; None likewise.

    Raises:
        LeaseLostError: another driver has it.
    """
    row = _own(connection, lease)
    said: dict[str, Any] = {"expires_at": now_of(connection) + timedelta(seconds=seconds)}
    if stage is not None:
        said["stage"] = stage
    if progress is not None:
        said["progress"] = json.dumps(asdict(progress))
    if claim is not None:
        said["claim"] = json.dumps(asdict(claim))
    _set(connection, lease.search_id, **said)
    return replace(_control(row, now_of(connection)), alive=True)


def release(connection: Connection, lease: Lease) -> None:
    """Give a lease back; one that is lost is not this owner's to give."""
    if _locked(connection, lease.search_id).epoch == lease.epoch:
        _set(connection, lease.search_id, owner=None, expires_at=None, claim=None)


def fence(connection: Connection, writer: str | Lease) -> str:
    """Let a write to a search go on only if it is its driver's, or there is no driver.

    Args:
        connection: in the transaction of the write.
        writer: the driver's lease; or the search's id, from who has none.

    Returns:
        The search's id.

    Raises:
        LeaseLostError: another driver has the lease.
        LeaseHeldError: a driver has it, and the writer has none.
        StoreError: unknown search.
    """
    if isinstance(writer, Lease):
        _own(connection, writer)
        return writer.search_id
    control = _control(_locked(connection, writer), now_of(connection))
    if control.alive:
        name = find_search(connection, writer).name
        raise LeaseHeldError(f"search {name} is being run by {control.owner}: stop it first")
    return writer


def ask(
    connection: Connection,
    search_id: str,
    desired_state: DesiredState | None,
    workers: int | None,
    priority: int | None,
) -> Control:
    """Ask a search's driver for something; what is None stays as it is.

    Raises:
        NotRunningError: no driver runs it.
        StoreError: it isn't known what is asked.
    """
    if desired_state is not None and desired_state not in DESIRED_STATES:
        raise StoreError(f"a driver can be asked for {', '.join(DESIRED_STATES)}, not {desired_state!r}")
    control = _control(_locked(connection, search_id), now_of(connection))
    if not control.alive:
        found = find_search(connection, search_id)
        raise NotRunningError(f"search {found.name} isn't being run (it is {found.status})")
    given = {"desired_state": desired_state, "workers": workers, "priority": priority}
    changes = {name: value for name, value in given.items() if value is not None}
    if changes:
        _set(connection, search_id, **changes)
        append(connection, search_id, "asked", ", ".join(f"{name}: {value}" for name, value in changes.items()))
    return replace(control, events=control.events + bool(changes), **changes)  # type: ignore[arg-type]


def read(connection: Connection, search_id: str) -> Control:
    """Who runs a search, and what is asked of it."""
    row = connection.execute(select(leases).where(leases.c.search_id == search_id)).one()
    return _control(row, now_of(connection))


def read_all(connection: Connection) -> dict[str, Control]:
    """The same of every search, by id."""
    return _read(connection, select(leases))


def running(connection: Connection) -> dict[str, Control]:
    """The same of those that are being run; others cost next to nothing, however many they are."""
    found = _read(connection, select(leases).where(leases.c.owner.is_not(None)))
    return {search_id: control for search_id, control in found.items() if control.alive}


def shut_out(connection: Connection) -> set[str]:
    """Take leases that ran out from their owners, who write nothing more should they wake up.

    Returns:
        Ids of the searches that are being run.
    """
    late = update(leases).where(leases.c.expires_at <= now_of(connection))
    connection.execute(late.values(owner=None, expires_at=None, claim=None, epoch=leases.c.epoch + 1))
    held = connection.execute(select(leases.c.search_id, leases.c.owner).where(leases.c.owner.is_not(None)))
    return {row.search_id for row in held if not is_gone(row.owner)}


def _read(connection: Connection, rows: Select[Any]) -> dict[str, Control]:
    now = now_of(connection)
    return {row.search_id: _control(row, now) for row in connection.execute(rows)}


def _control(row: Row[Any], now: datetime) -> Control:
    alive = row.owner is not None and now < row.expires_at and not is_gone(row.owner)
    progress = None
    if row.progress is not None:
        said = json.loads(row.progress)
        progress = Progress(**{**said, "best": said["best"] and tuple(said["best"])})
    return Control(
        row.owner,
        row.epoch,
        alive,
        row.desired_state,
        row.workers,
        row.priority,
        row.stage,
        progress,
        row.events,
        None if row.claim is None else ResourceRequest(**json.loads(row.claim)),
    )


def _own(connection: Connection, lease: Lease) -> Row[Any]:
    row = _locked(connection, lease.search_id)
    if row.epoch != lease.epoch:
        raise LeaseLostError(
            f"this process has lost search {find_search(connection, lease.search_id).name} to "
            f"{row.owner or 'another one'}, because it did not renew its lease in time; it wrote nothing since"
        )
    return row


def _locked(connection: Connection, search_id: str) -> Row[Any]:
    """A search's row, which nobody else can change before this transaction ends."""
    row = connection.execute(select(leases).where(leases.c.search_id == search_id).with_for_update()).first()
    if row is None:
        find_search(connection, search_id)
        raise StoreError(f"{search_id!r} is the name of a search; its id is needed here")
    return row


def _set(connection: Connection, search_id: str, **values: Any) -> None:
    connection.execute(update(leases).where(leases.c.search_id == search_id).values(**values))
