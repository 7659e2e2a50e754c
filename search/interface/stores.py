"""Maintenance of whole stores."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY
from typing import Annotated

from pydantic import InstanceOf

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_stored_config
from moevolve.search.interface.opening import opened_store
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.running.calibration import stored_fingerprint
from moevolve.search.running.weights import stored_facts
from moevolve.store import schema
from moevolve.store.reader import StoreReader
from moevolve.store.records import SearchRecord, Upgrade
from moevolve.store.repository import Store
from moevolve.store.session import without_password
from moevolve.store.upkeep.copy import CopyReport, copy
from moevolve.store.upkeep.prune import PruneReport, prune


@record
class UpgradeRequest(Request):
    """Migrate a store to this version's schema; refused while one of its searches is running.

    It is one transaction. Repeating it does nothing.

    Raises:
        StoreError: the store doesn't exist, or one of its searches is running: the message says which, and where.
    """

    opens = True

    def answer(self, store: str | StoreReader) -> Upgrade:
        # An open store has the newest schema already.
        return schema.upgrade(store if isinstance(store, str) else store.url)


@record
class PruneRequest(Request):
    """Delete searches, and evaluations and calibrations that no other search needs.

    If no search is named, only unneeded evaluations and calibrations are deleted.

    Raises:
        StoreError: the store or search doesn't exist, or the search is running. Nothing is deleted then.
    """

    writes = True
    searches: Annotated[
        Sequence[str],
        about("Names or ids of the searches to delete, for good; none deletes only what no search needs."),
        Flag(metavar="SEARCH", kind=list[str]),
    ] = ()
    _: KW_ONLY
    dry_run: Annotated[bool, about("Only say what would be deleted."), Flag("--dry-run")] = False

    def answer(self, store: Store) -> PruneReport:
        return prune(store, self.searches, lambda search: _calibrations(store, search), self.dry_run)


@record
class CopyRequest(Request):
    """Copy searches with everything that belongs to them to another store, SQLite or PostgreSQL.

    The copies rank and resume like the originals. Repeating it brings them up to date.

    Raises:
        StoreError: the store or search doesn't exist, or the other store has another search of that name. Nothing is
            copied then.
        UserError: both are the same store.
    """

    searches: Annotated[
        Sequence[str],
        about("Names or ids of the searches; none copies all."),
        Flag(metavar="SEARCH", kind=list[str]),
    ] = ()
    _: KW_ONLY
    to: Annotated[
        str | InstanceOf[Store],
        about("SQLAlchemy URL of the store to copy to, made if need be."),
        Flag("--to", "URL", str),
    ]

    def answer(self, store: StoreReader) -> CopyReport:
        with opened_store(self.to, create=True) as target:
            if store.url == target.url:
                raise UserError(f"{without_password(store.url)}: a store can't be copied to itself")
            names = self.searches or [summary.search.name for summary in store.searches()]
            return copy(store, target, names, lambda search: _calibrations(store, search))


def _calibrations(store: StoreReader, search: SearchRecord) -> Collection[str]:
    """Return the fingerprints of a search's calibrations; of all stored ones where they can't be determined."""
    if not any(task.split == "calibration" for task in store.search_tasks(search.id, auxiliary=True)):
        return ()
    try:
        config = parse_stored_config(search.config, search.name)
        wanted = config.space(stored_facts(store, search)).measurement
    except UserError:
        return store.calibrations()
    if wanted is None:
        return ()
    return (stored_fingerprint(wanted, config, store, search.id, search.model_fingerprint),)
