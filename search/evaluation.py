"""A stored individual brought back with its genome and its model, and scored on any task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.metrics import confidence_interval
from moevolve.evaluators.prepare import prepare_split
from moevolve.evaluators.registry import load_task
from moevolve.evaluators.types import PreparedSplit, Split
from moevolve.search.calibrating import calibrated_space
from moevolve.search.config import RunConfig, StoredConfig
from moevolve.search.config_files import parse_stored_config
from moevolve.search.desk import EvaluationDesk, Job, SplitRef
from moevolve.search.genomes.base import Genome, GenomeSpace
from moevolve.search.genomes.registry import make_space
from moevolve.search.ranking_values import weighted_means
from moevolve.store.records import EvaluationRecord, HistoryRow, IndividualDetail, SearchRecord
from moevolve.store.repository import Store
from moevolve.workers.config import engine_fingerprint
from moevolve.workers.edits.base import Edit, IdentityEdit
from moevolve.workers.facts import describe_model
from moevolve.workers.messages import ModelFacts

FULL = "full"


@dataclass(frozen=True)
class Subject:
    """What an evaluation or an export is about: an individual, or the full model of a search.

    Attributes:
        search: the search it belongs to.
        config: the search's stored configuration.
        facts: its model.
        space: its genomes.
        detail: the individual; None for the full model.
        genome: its genome; None for the full model.
    """

    search: SearchRecord
    config: StoredConfig = field(repr=False)
    facts: ModelFacts = field(repr=False)
    space: GenomeSpace[Any] = field(repr=False)
    detail: IndividualDetail | None
    genome: Genome | None = field(repr=False)

    @property
    def edit(self) -> Edit:
        return IdentityEdit() if self.genome is None else self.genome.express()


def find_subject(store: Store, reference: str, search: str | None = None) -> Subject:
    """Look up `SEARCH:INDEX`, or `full` (of `search`, or of the store's only search).

    Raises:
        StoreError: no such individual or search.
        UserError: `full` without saying of which search; the model isn't there any more, or isn't the same.
    """
    detail = None if reference == FULL else store.individual(reference)
    record = _search_of_full(store, search) if detail is None else detail.search
    config = parse_stored_config(record.config)
    facts = describe_model(config.model.to_worker())
    check_checkpoint(config, facts, record)
    phases = config.phases if isinstance(config, RunConfig) else ()
    space = make_space(config.genome, facts, phases)
    space = calibrated_space(space, config, store, record.id, facts.fingerprint)
    genome = None if detail is None else space.from_bytes(detail.individual.genome)
    return Subject(record, config, facts, space, detail, genome)


def check_checkpoint(config: StoredConfig, facts: ModelFacts, record: SearchRecord) -> None:
    """Refuse a model that isn't the one that a search ran on.

    Raises:
        UserError: its fingerprint is another.
    """
    if facts.fingerprint != record.model_fingerprint:
        raise UserError(
            f"model {config.model.path}: not the checkpoint that search {record.name} ran on: its weights, tokenizer "
            "or configuration files are others now; put them back, or launch another search"
        )


def start_of(subject: Subject, history: Sequence[HistoryRow]) -> Genome | None:
    """The genome that a subject's search started from; None where its kind has no start of its own."""
    return subject.space.from_bytes(history[0].genome) if history and history[0].operator == "start" else None


def evaluate_subject(store: Store, subject: Subject, task: str, split: Split) -> EvaluationRecord:
    """Score a subject on one split of a task in this process; a stored evaluation is reused.

    Raises:
        UserError: unknown task, or it has no such split.
    """
    from moevolve.search.local_pool import LocalPool
    from moevolve.workers.actor import EvaluationWorker

    prepared = prepared_split(subject.config, task, split)
    model, engine = subject.config.model.to_worker(), subject.config.engine.to_worker()
    reference = SplitRef.of(prepared)
    individual = None if subject.detail is None else subject.detail.individual
    job = Job(
        subject.edit,
        (reference,),
        None if individual is None else individual.experts,
        None if individual is None else individual.active,
        None if individual is None else individual.parameters,
    )
    pool = LocalPool(lambda: EvaluationWorker(model, engine), {prepared.fingerprint: prepared})
    desk = EvaluationDesk(store, pool, subject.facts.fingerprint, engine_fingerprint(model, engine))
    (settled,) = desk.run([job])
    store.record(subject.search.id, evaluations=desk.unsaved)
    return with_outcomes(store, settled.evaluations[0])


def interval(record: EvaluationRecord) -> tuple[float, float]:
    """95 % confidence interval of a stored evaluation's score, from its per-example outcomes."""
    outcomes = np.frombuffer(record.outcomes or b"", dtype="<f4")
    return confidence_interval(outcomes, metric=record.metric)


def prepared_split(config: StoredConfig, name: str, split: Split) -> PreparedSplit:
    """The split as the search's configuration has it, or as the task file says for another task."""
    sections = config.tasks if isinstance(config, RunConfig) else ()
    section = next((item for item in sections if name in (item.name, load_task(item.name).name)), None)
    task = load_task(name if section is None else section.name)
    counts = {} if section is None else {key: count for key, count in section.counts.items() if key == split}
    return prepare_split(task.with_counts(counts) if counts else task, split)


def with_outcomes(store: Store, record: EvaluationRecord) -> EvaluationRecord:
    """The same evaluation with its per-example outcomes."""
    return store.evaluations(
        record.phenotype_hash, record.model_fingerprint, record.engine_fingerprint, [record.task_fingerprint]
    )[0]


def _search_of_full(store: Store, search: str | None) -> SearchRecord:
    if search is not None:
        return store.search(search)
    found = store.searches()
    if len(found) != 1:
        raise UserError(f"full: the store has {len(found)} searches; say whose full model with --search NAME")
    return found[0].search


def full_fitness(store: Store, search: SearchRecord) -> float | None:
    """Fitness of a search's unedited model, None if it isn't evaluated yet."""
    tasks = [task for task in store.search_tasks(search.id) if task.split == "search"]
    found = {
        record.task_fingerprint: record
        for record in store.evaluations(
            IdentityEdit().phenotype_hash,
            search.model_fingerprint,
            search.engine_fingerprint,
            [task.task_fingerprint for task in tasks],
        )
    }
    if not tasks or any(task.task_fingerprint not in found for task in tasks):
        return None
    records = tuple(found[task.task_fingerprint] for task in tasks)
    return weighted_means(records, tuple(task.weight for task in tasks))[0]
