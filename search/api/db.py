"""Maintenance of stores: `moevolve.db` has a function for each command `moevolve db ...`."""

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
    """Migrate a store, given by URL, to this version's schema in one transaction. Repeating it does nothing.

    Raises:
        StoreError: there is no such store, or one of its searches is running: the message says which, and where.
    """
    from moevolve.store import schema

    return schema.upgrade(store)


def check(store: str | StoreReader) -> CheckReport:
    """Check a store for damage. Writes nothing.

    Raises:
        StoreError: there is no such store.
    """
    from moevolve.store.upkeep.check import check as check_store

    with opened_reader(store) as opened:
        return check_store(opened)


def prune(*searches: str, store: str | Store, dry_run: bool = False) -> PruneReport:
    """Delete searches, with evaluations and calibrations that no other search needs.

    Args:
        searches: Names or ids of the searches; none deletes only unneeded evaluations and calibrations.
        store: URL of the store, or an open store.
        dry_run: Only count what would be deleted.

    Raises:
        StoreError: there is no such store or search, or the search is running. Nothing is deleted then.
    """
    from moevolve.search.operations import upkeep

    with opened_store(store) as opened:
        return upkeep.prune(opened, searches, dry_run)


def copy(*searches: str, store: str | StoreReader, to: str | Store) -> CopyReport:
    """Copy searches with everything that belongs to them to another store, SQLite or PostgreSQL.

    The copies rank and resume like the originals. Repeating it brings them up to date.

    Args:
        searches: Names or ids of the searches; none copies all.
        store: URL of the store to copy from, or an open store.
        to: URL of the store to copy to, made if need be, or an open store.

    Raises:
        StoreError: there is no such store or search, or the other store has another search of that name. Nothing is
            copied then.
        UserError: both are the same store.
    """
    from moevolve.search.operations import upkeep

    with opened_reader(store) as opened, opened_store(to, create=True) as target:
        return upkeep.copy(opened, target, searches)
