"""Stored candidates: an individual restored with its genome and its model's facts, or a search's full model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.registry import load_task, split_fitness
from moevolve.evaluators.types import PreparedSplit, Split
from moevolve.search.config.files import changed_loading, parse_stored_config
from moevolve.search.config.run import RunConfig, TaskSection
from moevolve.search.genomes.contract.base import Genome, GenomeSpace
from moevolve.search.loop.scores import FULL
from moevolve.search.loop.setup import needs_calibration
from moevolve.search.running.calibration import calibrated_space
from moevolve.search.running.weights import facts_for, resolved_model_path, stored_facts
from moevolve.store.reader import StoreReader
from moevolve.store.records import IndividualDetail, IndividualRecord, SearchRecord
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.facts import ModelFacts

_INDIVIDUAL = re.compile(r"[^/\\]+:\d+")


@dataclass(frozen=True)
class Candidate:
    """An individual to evaluate or export, or the full model of a search, which has no detail and no genome."""

    search: SearchRecord
    config: RunConfig = field(repr=False)
    facts: ModelFacts = field(repr=False)
    space: GenomeSpace[Genome] = field(repr=False)
    detail: IndividualDetail | None
    genome: Genome | None = field(repr=False)

    @property
    def individual(self) -> IndividualDetail:
        """The stored individual, which all candidates but full models have."""
        assert self.detail is not None, "the full model isn't stored"
        return self.detail

    @property
    def edit(self) -> Edit:
        return IdentityEdit() if self.genome is None else self.genome.express()


def find_candidate(
    store: StoreReader,
    reference: str,
    search: str | None = None,
    model: str | None = None,
    weights: bool = True,
    overrides: Sequence[str] = (),
    tasks: Sequence[str] = (),
) -> Candidate:
    """Look up `SEARCH:INDEX`, or `full` (of `search`, or of the store's only search).

    Args:
        model: Folder or hub id of the checkpoint; None takes the stored path.
        weights: True requires the search's weights. False reads only the store.
        overrides: Changes of the search's `model.*` and `engine.*` settings, as `KEY=VALUE`.
        tasks: Names of the tasks to run it on; read before the model is described.

    Raises:
        StoreError: the individual or search doesn't exist.
        UserError: `full` is ambiguous, the task doesn't exist, the model is missing or isn't the same any more, the
            genome was changed in the store, or an override is wrong.
    """
    detail = None if reference == FULL else store.individual(reference)
    record = _search_of_full(store, search) if detail is None else detail.search
    config = parse_stored_config(record.config, record.name)
    for task in tasks:
        _section_of(config, task).task()
    path = record.model_path if model is None else resolved_model_path(model)
    if path != config.model.path:
        moved = replace(config.model, path=path, revision=None, own_dtype=None)
        config = config.model_copy(update={"model": moved})
    if overrides:
        changed = changed_loading(config.model, config.engine, overrides)
        config = config.model_copy(update={"model": changed.model, "engine": changed.engine})
    facts = facts_for(record, config.model) if weights else stored_facts(store, record)
    space = calibrated_space(config.space(facts), config, store, record.id, facts.fingerprint)
    genome = None if detail is None else _genome_of(space, detail.individual, reference)
    return Candidate(record, config, facts, space, detail, genome)


def find_individual(
    store: StoreReader, reference: str, model: str | None = None, tasks: Sequence[str] = ()
) -> Candidate:
    """Look up `SEARCH:INDEX` with its search's weights; see `find_candidate`. UserError for `full`."""
    if reference == FULL:
        raise UserError(f"{FULL} is the unedited model; name an individual as SEARCH:INDEX")
    return find_candidate(store, reference, model=model, tasks=tasks)


def is_stored(name: str) -> bool:
    """Return whether a name stands for a stored individual or a full model, and not for a checkpoint."""
    return name == FULL or (_INDIVIDUAL.fullmatch(name) is not None and not Path(name).is_dir())


def _genome_of(space: GenomeSpace[Genome], row: IndividualRecord, reference: str) -> Genome:
    """Restore a stored genome, unless the store was damaged since the search recorded it."""
    if not isinstance(row.genome, bytes) or hashlib.sha256(row.genome).hexdigest() != row.content_hash:
        raise UserError(f"{reference}: its genome isn't the one that was recorded; see `moevolve db check`")
    return space.from_bytes(row.genome)


def prepared_split(candidate: Candidate, name: str, split: Split) -> PreparedSplit:
    """Prepare a split as the candidate's search does, or by the task file for a task that the search doesn't have."""
    section = _section_of(candidate.config, name)
    calibrating = section in candidate.config.tasks and needs_calibration(candidate.space)
    return section.prepared(split, calibrating=calibrating)


def _section_of(config: RunConfig, name: str) -> TaskSection:
    """The settings of a task in a search, also under another fitness, or of a task that the search doesn't have."""
    base, fitness = split_fitness(name)
    for item in config.tasks:
        if name in (item.name, load_task(item.name).name):
            return item
        own = split_fitness(item.name)[0]
        if base in (own, load_task(own).name):
            return item.model_copy(update={"name": own + fitness})
    return TaskSection(name=name)


def _search_of_full(store: StoreReader, search: str | None) -> SearchRecord:
    if search is not None:
        return store.search(search)
    found = store.searches()
    if len(found) != 1:
        raise UserError(f"full: the store has {len(found)} searches; say whose full model with --search NAME")
    return found[0].search
