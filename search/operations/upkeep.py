"""Maintaining stores, with the calibrations that searches need, which the store can't know by itself."""

from __future__ import annotations

from collections.abc import Collection

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_stored_config
from moevolve.search.operations.opening import opened_store, refuse_server
from moevolve.search.requests.stores import CheckRequest, CopyRequest, PruneRequest, UpgradeRequest
from moevolve.search.running.calibration import stored_fingerprint
from moevolve.search.running.weights import stored_facts
from moevolve.store import schema
from moevolve.store.reader import StoreReader
from moevolve.store.records import SearchRecord, Upgrade
from moevolve.store.repository import Store
from moevolve.store.session import without_password
from moevolve.store.upkeep import check as checking
from moevolve.store.upkeep import copy as copying
from moevolve.store.upkeep import prune as pruning
from moevolve.store.upkeep.check import CheckReport
from moevolve.store.upkeep.copy import CopyReport
from moevolve.store.upkeep.prune import PruneReport


def upgrade(store: str | StoreReader, _: UpgradeRequest) -> Upgrade:
    """See `UpgradeRequest`. An open store has the newest schema already."""
    url = store if isinstance(store, str) else store.url
    refuse_server(url)
    return schema.upgrade(url)


def check(store: StoreReader, _: CheckRequest) -> CheckReport:
    """See `CheckRequest`."""
    return checking.check(store)


def prune(store: Store, request: PruneRequest) -> PruneReport:
    """See `PruneRequest`."""
    return pruning.prune(store, request.searches, lambda search: _calibrations(store, search), request.dry_run)


def copy(store: StoreReader, request: CopyRequest) -> CopyReport:
    """See `CopyRequest`."""
    with opened_store(request.to, create=True) as target:
        if store.url == target.url:
            raise UserError(f"{without_password(store.url)}: a store can't be copied to itself")
        names = request.searches or [summary.search.name for summary in store.searches()]
        return copying.copy(store, target, names, lambda search: _calibrations(store, search))


def _calibrations(store: StoreReader, search: SearchRecord) -> Collection[str]:
    """Fingerprints of a search's calibrations; of all stored ones where they can't be determined."""
    if not any(task.split == "calibration" for task in store.search_tasks(search.id, auxiliary=True)):
        return ()
    try:
        config = parse_stored_config(search.config)
        recipe = config.space(stored_facts(store, search)).recipe
    except UserError:
        return store.calibrations()
    return () if recipe is None else (stored_fingerprint(recipe, config, store, search.id, search.model_fingerprint),)
