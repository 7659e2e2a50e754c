"""The calibration that a genome space needs: read from the store, or made once by a worker and stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.base import G, GenomeSpace
from moevolve.search.loop.setup import SearchSetup
from moevolve.store.errors import parsing
from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import (
    Calibration,
    GrowingMeasurement,
    Measurement,
    calibration_fingerprint,
    measurement_parts,
)
from moevolve.workers.contract.fitting import RowsMeasurement
from moevolve.workers.contract.settings import engine_fingerprint

# Makes a calibration and returns it as a safetensors file; see `Pool.calibrate`.
Calibrate = Callable[[Measurement, tuple[PreparedSplit, ...]], bytes]


def calibrated_setup(
    setup: SearchSetup, store: Store, calibrate: Calibrate, on_note: Callable[[str], None] = lambda _: None
) -> SearchSetup:
    """The setup of a recorded search with its space calibrated; `calibrate` makes what the store doesn't have."""
    measurement = setup.space.measurement
    if measurement is None:
        return setup
    config, splits = setup.config, setup.prepared["calibration"]
    tasks = tuple(split.fingerprint for split in splits)
    fingerprint = _fingerprint(config, measurement, setup.facts.fingerprint, tasks)
    content = store.calibration(fingerprint)
    if content is None:
        content = calibrate(measurement, splits)
        store.add_calibration(fingerprint, content)
    calibration = Calibration.from_bytes(content)
    for part in measurement_parts(measurement):
        if isinstance(part, GrowingMeasurement) and part.most > part.tokens:
            on_note(part.note(calibration.arrays))
        if isinstance(part, RowsMeasurement) and (note := part.note(calibration.arrays)) is not None:
            on_note(note)
    return replace(setup, space=setup.space.calibrated(calibration))


def calibrated_space(
    space: GenomeSpace[G], config: RunConfig, store: StoreReader, search_id: str, model_fingerprint: str
) -> GenomeSpace[G]:
    """Return the space of a recorded search with its calibration; UserError if that wasn't stored yet."""
    if space.measurement is None:
        return space
    calibration = stored_calibration(space.measurement, config, store, search_id, model_fingerprint)
    if calibration is None:
        raise UserError(f"search {config.name} has no calibration in this store yet; resume it first")
    return space.calibrated(calibration)


def stored_calibration(
    measurement: Measurement, config: RunConfig, store: StoreReader, search_id: str, model_fingerprint: str
) -> Calibration | None:
    """Return the calibration of a recorded search, with its cost; None if it isn't stored yet."""
    content = store.calibration(stored_fingerprint(measurement, config, store, search_id, model_fingerprint))
    with parsing(f"the calibration of search {config.name}"):
        return None if content is None else Calibration.from_bytes(content)


def stored_fingerprint(
    measurement: Measurement, config: RunConfig, store: StoreReader, search_id: str, model_fingerprint: str
) -> str:
    """Return the key of a recorded search's calibration in the store."""
    tasks = tuple(
        task.task_fingerprint for task in store.search_tasks(search_id, auxiliary=True) if task.split == "calibration"
    )
    return _fingerprint(config, measurement, model_fingerprint, tasks)


def _fingerprint(config: RunConfig, measurement: Measurement, model: str, tasks: tuple[str, ...]) -> str:
    return calibration_fingerprint(measurement, model, engine_fingerprint(config.model, config.engine), tasks)
