"""Leases: which driver may write to a search, and what users ask of it. Each search has one row, with a fencing epoch.

A driver acquires the lease, which gives it the next epoch, and renews it while it runs. Each of its writes checks the
epoch in the same transaction, under a lock on the row. As soon as another driver has the lease, all writes of the first
one are refused, however late it wakes up. Only the database's clock counts, never a driver's. If the owner's process is
known to have ended (`is_gone`), the lease can be acquired before it expires.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Connection, Row, and_, or_, select, text, update

from moevolve.store.errors import LeaseHeldError, LeaseLostError, NotRunningError, StoreError, parsing
from moevolve.store.events import append, asker
from moevolve.store.lineage import find_search
from moevolve.store.records import Control, DesiredState, Lease, Progress
from moevolve.store.session import lock_against_prune
from moevolve.store.tables import leases

_PROGRESS = TypeAdapter(Progress)
# The text of `this_process`. Owners with another text, such as tests' and other programs', count as alive.
_OWNER = re.compile(r"process (?P<process>\d+) on .* \((?P<machine>\S+), (?P<numbering>\S+)\)")


def now_of(connection: Connection) -> datetime:
    """Return the database server's time, or this machine's for SQLite."""
    if connection.dialect.name == "sqlite":
        return datetime.now(UTC)
    now: datetime = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
    return now.astimezone(UTC)


def free_lease(search_id: str) -> dict[str, object]:
    """Return the lease row of a new search, which no driver holds."""
    return {"search_id": search_id, "epoch": 0, "desired_state": "running", "events": 0}


def acquire(connection: Connection, search_id: str, owner: str, seconds: float) -> Lease:
    """Acquire a search's lease, the right to write to it, and clears the requests to its previous driver.

    It expires after `seconds` unless it is renewed. `owner` names the process (`this_process`).

    Raises:
        LeaseHeldError: Another driver has the lease, and its process isn't known to have ended.
        StoreError: There is no such search.
    """
    lock_against_prune(connection)
    row, now = _locked(connection, search_id), now_of(connection)
    found = find_search(connection, search_id)
    if _control(connection, row, now).alive:
        left = (row.expires_at - now).total_seconds()
        raise LeaseHeldError(
            f"search {found.name} is being run by {row.owner}; stop that one, or wait: if "
            f"it is dead, the search is free in {left:.0f} s"
        )
    lease = Lease(search_id, owner, row.epoch + 1)
    _update(
        connection,
        search_id,
        owner=owner,
        epoch=lease.epoch,
        expires_at=now + timedelta(seconds=seconds),
        # The previous driver may have died before it could carry out a cancel.
        desired_state="cancelled" if row.desired_state == "cancelled" and found.status != "finished" else "running",
        workers=None,
        stage=None,
    )
    return lease


def renew(
    connection: Connection,
    lease: Lease,
    seconds: float,
    stage: str | None = None,
    progress: Progress | None = None,
) -> Control:
    """Extend a lease, also an expired one that no other driver has acquired, and stores its owner's state.

    It then lasts `seconds` from now. A stage (a line about what the driver is doing) or progress of None keeps the
    previous one.

    Returns:
        The state of the search, with what users ask of the driver.

    Raises:
        LeaseLostError: Another driver has the lease.
    """
    row = _locked_by(connection, lease)
    changes: dict[str, object] = {"expires_at": now_of(connection) + timedelta(seconds=seconds)}
    if stage is not None:
        changes["stage"] = stage
    if progress is not None:
        changes["progress"] = _PROGRESS.dump_json(progress).decode()
    _update(connection, lease.search_id, **changes)
    return replace(_control(connection, row, now_of(connection)), alive=True)  # the row was read before it was renewed


def release(connection: Connection, lease: Lease) -> None:
    """Release a lease; do nothing if another driver has acquired it."""
    if _locked(connection, lease.search_id).epoch == lease.epoch:
        _update(connection, lease.search_id, owner=None, expires_at=None)


def fence(connection: Connection, writer: str | Lease) -> str:
    """Refuse a write to a search that comes neither from its driver nor at a time when it has no driver.

    The writer is the driver's lease, or the search's id if it is no driver. Returns the id of the search.

    Raises:
        LeaseLostError: Another driver has the lease.
        LeaseHeldError: A driver has the lease, and the writer has none.
        StoreError: There is no such search.
    """
    if isinstance(writer, Lease):
        _locked_by(connection, writer)
        return writer.search_id
    control = _control(connection, _locked(connection, writer), now_of(connection))
    if control.alive:
        name = find_search(connection, writer).name
        raise LeaseHeldError(f"search {name} is being run by {control.owner}: stop it first")
    return writer


def ask(
    connection: Connection,
    search_id: str,
    desired_state: DesiredState | None = None,
    workers: int | None = None,
) -> Control:
    """Ask the driver of a search for a change, which the driver makes within seconds; None keeps a value.

    Raises:
        NotRunningError: The search has no driver.
        StoreError: There is no such search.
    """
    control = _control(connection, _locked(connection, search_id), now_of(connection))
    if not control.alive:
        found = find_search(connection, search_id)
        raise NotRunningError(f"search {found.name} isn't being run (it is {found.status})")
    given = {"desired_state": desired_state, "workers": workers}
    changes = {name: value for name, value in given.items() if value is not None}
    if changes:
        _update(connection, search_id, **changes)
        asked = ", ".join(
            f"to be {value}" if name == "desired_state" else f"{name}: {value}" for name, value in changes.items()
        )
        append(connection, search_id, "asked", f"{asked}, by {asker()}")
    return replace(control, events=control.events + bool(changes), **changes)  # type: ignore[arg-type]


def read(connection: Connection, search_id: str) -> Control:
    """Return the driver of a search, its state, and what users ask of it."""
    row = connection.execute(select(leases).where(leases.c.search_id == search_id)).one()
    return _control(connection, row, now_of(connection))


def read_all(connection: Connection) -> dict[str, Control]:
    """Return the same for every search, by id."""
    now = now_of(connection)
    return {row.search_id: _control(connection, row, now) for row in connection.execute(select(leases))}


def running(connection: Connection) -> dict[str, Control]:
    """Return the same for the searches that have a driver. Its cost doesn't grow with the number of other searches."""
    now = now_of(connection)
    owned = connection.execute(select(leases).where(leases.c.owner.is_not(None)))
    found = {row.search_id: _control(connection, row, now) for row in owned}
    return {search_id: control for search_id, control in found.items() if control.alive}


def revoke_expired(connection: Connection) -> set[str]:
    """Take expired leases from their owners, which can't write any more should they wake up.

    Returns:
        Ids of the searches that have a driver.
    """
    unending = and_(leases.c.owner.is_not(None), leases.c.expires_at.is_(None))  # damage
    expired = update(leases).where(or_(leases.c.expires_at <= now_of(connection), unending))
    connection.execute(expired.values(owner=None, expires_at=None, epoch=leases.c.epoch + 1))
    held = connection.execute(select(leases.c.search_id, leases.c.owner).where(leases.c.owner.is_not(None)))
    return {row.search_id for row in held if not is_gone(row.owner)}


def parse_progress(text: str) -> Progress:
    """Return the progress in the column of leases."""
    return _PROGRESS.validate_json(text)


def _control(connection: Connection, row: Row[*tuple[object, ...]], now: datetime) -> Control:
    lasts = row.expires_at is not None and now < row.expires_at
    alive = row.owner is not None and lasts and not is_gone(row.owner)
    damaged = row.owner is not None and row.expires_at is None
    try:
        progress = None if row.progress is None else parse_progress(row.progress)
    except ValidationError:
        with parsing(f"the progress of search {find_search(connection, row.search_id).name}"):
            raise
    return Control(
        row.owner,
        row.epoch,
        alive,
        row.desired_state,
        row.workers,
        row.stage,
        progress,
        row.events,
        "its lease has an owner but no time of expiry, and counts as expired" if damaged else None,
    )


def _locked_by(connection: Connection, lease: Lease) -> Row[*tuple[object, ...]]:
    """Return the lease's row, locked; an error if the lease has been lost."""
    row = _locked(connection, lease.search_id)
    if row.epoch != lease.epoch:
        raise LeaseLostError(
            f"this process has lost search {find_search(connection, lease.search_id).name} to "
            f"{row.owner or 'another one'}, because it did not renew its lease in time; it wrote nothing since"
        )
    return row


def _locked(connection: Connection, search_id: str) -> Row[*tuple[object, ...]]:
    """Return a search's row, locked against other writers until this transaction ends."""
    row = connection.execute(select(leases).where(leases.c.search_id == search_id).with_for_update()).first()
    if row is None:
        find_search(connection, search_id)
        raise StoreError(f"{search_id!r} is the name of a search; its id is needed here")
    return row


def _update(connection: Connection, search_id: str, **values: object) -> None:
    connection.execute(update(leases).where(leases.c.search_id == search_id).values(**values))


def this_process() -> str:
    """The name of this process as an owner: its host for users, its boot id and process namespace for `is_gone`."""
    return f"process {os.getpid()} on {socket.gethostname()} ({_machine()}, {_numbering()})"


def is_on_another_machine(owner: str) -> bool:
    """Return whether an owner is a process on another machine."""
    found = _OWNER.fullmatch(owner)
    return found is not None and found["machine"] != _machine()


def is_gone(owner: str) -> bool:
    """Return whether an owner was a process on this machine that has ended, so that its lease need not expire.

    False if the owner's process can't be seen from here.
    """
    # Host names can't tell: a container may share its host's name, and copies of one machine image have equal names.
    found = _OWNER.fullmatch(owner)
    here = found is not None and (found["machine"], found["numbering"]) == (_machine(), _numbering())
    return found is not None and here and not _runs(int(found["process"]))


@cache
def _machine() -> str:
    """Return the first part of this machine's boot id; the host's name on systems other than Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").split("-")[0]
    except OSError:
        return socket.gethostname()


@cache
def _numbering() -> str:
    """Return the namespace of this process's number."""
    try:
        return Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        return "all"


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state != "Z"  # a zombie has ended
