"""Pruning and copying stores, with the calibrations that searches need, which the store can't know by itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_stored_config
from moevolve.search.genomes.contract.base import GenomeSpace
from moevolve.search.operations.subject import uncalibrated_space
from moevolve.search.running.calibration import stored_fingerprint
from moevolve.search.running.weights import describe_shapes
from moevolve.store.reader import StoreReader
from moevolve.store.records import SearchRecord
from moevolve.store.repository import Store
from moevolve.store.session import without_password
from moevolve.store.upkeep import copy as copying
from moevolve.store.upkeep import prune as pruning
from moevolve.store.upkeep.copy import CopyReport
from moevolve.store.upkeep.prune import PruneReport


def prune(store: Store, searches: Sequence[str], dry_run: bool) -> PruneReport:
    """Delete searches, and evaluations and calibrations that no other search needs.

    Raises:
        StoreError: there is no such search, or it is running. Nothing was deleted.
    """
    return pruning.prune(store, searches, lambda search: _calibrations(store, search), dry_run)


def copy(source: StoreReader, target: Store, searches: Sequence[str]) -> CopyReport:
    """Copy searches, or all if none is named.

    Raises:
        StoreError: there is no such search, or the target has another one of that name. Nothing was copied.
        UserError: both are the same store.
    """
    if source.url == target.url:
        raise UserError(f"{without_password(source.url)}: a store can't be copied to itself")
    names = searches or [summary.search.name for summary in source.searches()]
    return copying.copy(source, target, names, lambda search: _calibrations(source, search))


def _calibrations(store: StoreReader, search: SearchRecord) -> Collection[str]:
    """Fingerprints of a search's calibrations; of all stored ones where they can't be determined on this machine."""
    if not any(task.split == "calibration" for task in store.search_tasks(search.id, auxiliary=True)):
        return ()
    try:
        recipe = _space(search).recipe
    except UserError:
        return store.calibrations()
    config = parse_stored_config(search.config)
    return () if recipe is None else (stored_fingerprint(recipe, config, store, search.id, search.model_fingerprint),)


def _space(search: SearchRecord) -> GenomeSpace[Any]:
    config = parse_stored_config(search.config)
    return uncalibrated_space(config, replace(describe_shapes(config.model), fingerprint=search.model_fingerprint))
