"""Subjects of requests: an individual restored with its genome and its model's facts, or a search's full model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import changed_loading, parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.base import Genome, GenomeSpace
from moevolve.search.genomes.contract.phases import START
from moevolve.search.genomes.repaired import base_genome
from moevolve.search.loop.scores import FULL
from moevolve.search.running.calibration import calibrated_space
from moevolve.search.running.weights import facts_for, resolved_model_path, stored_facts
from moevolve.store.reader import StoreReader
from moevolve.store.records import IndividualDetail, IndividualRecord, SearchRecord
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.facts import ModelFacts


@dataclass(frozen=True)
class Subject:
    """An individual to evaluate or export, or the full model of a search, which has no detail and no genome."""

    search: SearchRecord
    config: RunConfig = field(repr=False)
    facts: ModelFacts = field(repr=False)
    space: GenomeSpace[Any] = field(repr=False)
    detail: IndividualDetail | None
    genome: Genome | None = field(repr=False)

    @property
    def edit(self) -> Edit:
        return IdentityEdit() if self.genome is None else self.genome.express()


def find_subject(
    store: StoreReader,
    reference: str,
    search: str | None = None,
    model: str | None = None,
    weights: bool = True,
    overrides: Sequence[str] = (),
) -> Subject:
    """Look up `SEARCH:INDEX`, or `full` (of `search`, or of the store's only search).

    Args:
        model: Folder or hub id of the checkpoint; None takes the stored path.
        weights: True requires the search's weights. If the search was imported without weights, the subject's record
            (not the stored one) is bound to the ones found. False reads only the store.
        overrides: Changes of the search's `model.*` and `engine.*` settings, as `KEY=VALUE`.

    Raises:
        StoreError: there is no such individual or search.
        UserError: `full` is ambiguous, the model is missing or isn't the same any more, or an override is wrong.
    """
    detail = None if reference == FULL else store.individual(reference)
    record = _search_of_full(store, search) if detail is None else detail.search
    config = parse_stored_config(record.config)
    path = record.model_path if model is None else resolved_model_path(model)
    if path != config.model.path:
        moved = replace(config.model, path=path, revision=None, own_dtype=None)
        config = config.model_copy(update={"model": moved})
    if overrides:
        changed = changed_loading(config.model, config.engine, overrides)
        config = config.model_copy(update={"model": changed.model, "engine": changed.engine})
    if weights:
        facts = facts_for(record, config.model)
        if not record.is_bound:
            record = replace(record, model_fingerprint=facts.fingerprint, model_path=config.model.path)
            detail = None if detail is None else replace(detail, search=record)
    else:
        facts = stored_facts(store, record)
    space = calibrated_space(config.space(facts), config, store, record.id, facts.fingerprint)
    genome = None if detail is None else space.from_bytes(detail.individual.genome)
    return Subject(record, config, facts, space, detail, genome)


def bound_subject(
    store: Store,
    reference: str,
    search: str | None = None,
    model: str | None = None,
    overrides: Sequence[str] = (),
) -> Subject:
    """Do as `find_subject`, and bind a search that was imported without weights to the ones found, in the store.

    Raises:
        StoreError, UserError: as `find_subject`; or the search was bound to other weights meanwhile.
    """
    subject = find_subject(store, reference, search, model, overrides=overrides)
    found = subject.search
    if not store.search(found.id).is_bound:
        store.bind_model(found.id, found.model_fingerprint, found.model_path)
    return subject


def start_of(subject: Subject, history: Sequence[IndividualRecord]) -> Genome | None:
    """Restore the genome that a subject's search started from, unrepaired; None if its method has no start."""
    start = next((row for row in history if row.operator == START), None)
    return None if start is None else base_genome(subject.space.from_bytes(start.genome))


def _search_of_full(store: StoreReader, search: str | None) -> SearchRecord:
    if search is not None:
        return store.search(search)
    found = store.searches()
    if len(found) != 1:
        raise UserError(f"full: the store has {len(found)} searches; say whose full model with --search NAME")
    return found[0].search
