"""Stores as a whole: `moevolve.db` has a function for each command `moevolve db ...`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moevolve.search.operations.opening import opened_reader, opened_store

if TYPE_CHECKING:
    from moevolve.store.reader import StoreReader
    from moevolve.store.records import Upgrade
    from moevolve.store.repository import Store
    from moevolve.store.upkeep.check import CheckReport
    from moevolve.store.upkeep.copy import CopyReport
    from moevolve.store.upkeep.prune import PruneReport


def upgrade(store: str) -> Upgrade:
    """Bring a store to the schema that this version of moevolve writes, in one transaction. Repeating it does nothing.

    Args:
        store: its URL.

    Raises:
        StoreError: no such store, or a search of it is being run: the message says which, and by whom.
    """
    from moevolve.store import schema

    return schema.upgrade(store)


def check(store: str | StoreReader) -> CheckReport:
    """Look a store through for damage. Writes nothing.

    Raises:
        StoreError: no such store.
    """
    from moevolve.store.upkeep.check import check as look_through

    with opened_reader(store) as opened:
        return look_through(opened)


def prune(*searches: str, store: str | Store, dry_run: bool = False) -> PruneReport:
    """Delete searches, with evaluations and calibrations that no other search has any use for.

    Args:
        searches: names or ids; none deletes only what is left over from other searches.
        store: where they are.
        dry_run: only say what would be deleted.

    Raises:
        StoreError: no such store or search, or it is being run. Nothing is deleted then.
    """
    from moevolve.search.operations import upkeep

    with opened_store(store) as opened:
        return upkeep.prune(opened, searches, dry_run)


def copy(*searches: str, store: str | StoreReader, to: str | Store) -> CopyReport:
    """Copy searches with all that belongs to them to another store, of whatever database.

    There they rank and resume as they would here. Repeating it brings the copies up to date.

    Args:
        searches: names or ids; none copies all.
        store: where they are.
        to: where they go, made if need be.

    Raises:
        StoreError: no such store or search; or what the other store has of that name isn't the same. Nothing is copied
            then.
        UserError: both are the same store.
    """
    from moevolve.search.operations import upkeep

    with opened_reader(store) as opened, opened_store(to, create=True) as target:
        return upkeep.copy(opened, target, searches)
