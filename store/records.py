"""The frozen records that the store takes and returns; ORM objects never leave it.

Hashes and fingerprints are hex text. Scores are the metric in [0, 1]; `gold_logprob` and `tie_break` are mean
log-probabilities of the gold answer in nats (<= 0). Times are aware UTC datetimes; `None` going in means "now".
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Literal, get_args

from pydantic import computed_field

from moevolve.evaluators.errors import FailureKind
from moevolve.evaluators.metrics import scale_of
from moevolve.evaluators.records import short_repr
from moevolve.evaluators.scales import ScaleName
from moevolve.evaluators.types import Split

SearchStatus = Literal["created", "running", "paused", "interrupted", "cancelled", "finished", "failed"]
# The state that users ask of a driver. A stopped search can be resumed, a cancelled one can't.
DesiredState = Literal["running", "paused", "stopped", "cancelled"]
# A new status, a request to the driver, a new best individual, failed candidates, a retry, or a checkpoint.
EventKind = Literal["status", "asked", "best", "failed", "retried", "exported"]
# How a listing sorts individuals: by rank, newest first, or only failed ones, newest first.
Order = Literal["best", "newest", "failed"]
IndividualStatus = Literal["pending", "ok", "failed"]

SEARCH_STATUSES: tuple[SearchStatus, ...] = get_args(SearchStatus)
# The phenotype hash of the unedited model's evaluations.
FULL_MODEL = "full"
# Pydantic's settings for a record whose bytes are base64 text in JSON.
BYTES_AS_TEXT = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}


def new_search_id() -> str:
    """Return a random id for a search: ten hex digits."""
    return uuid.uuid4().hex[:10]


# Prefix of the model fingerprint of individuals that were imported without the model's weights, and can't be run.
UNBOUND = "config:"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """One search.

    Attributes:
        id: Short text, unique in the store (`new_search_id()`).
        name: The user's name for the search, unique in the store, without `:` (references are `name:index`).
        config: Resolved config as JSON text.
        config_hash: Hash of everything in the config that can change the population.
        model_fingerprint: Hash that identifies the checkpoint; begins with `UNBOUND` if its weights are unknown.
        engine_fingerprint: Hash of everything in the evaluation engine that can change a score.
        seed: Signed 64-bit seed.
        status_reason: One-line reason for the status `interrupted` or `failed`.
        winner: Index of the individual that won a finished search; None without one, or if the search isn't finished.
    """

    __repr__ = short_repr

    id: str
    name: str
    config: str = field(repr=False)
    config_hash: str
    model_fingerprint: str
    model_path: str
    engine_fingerprint: str
    seed: int
    genome_kind: str
    software_version: str
    status: SearchStatus = "created"
    status_reason: str | None = None
    winner: int | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None

    def is_orphaned(self, alive: bool) -> bool:
        """Whether the search's driver ended without storing a final status; `alive` says whether it has a driver."""
        return not alive and self.status in ("running", "paused")

    def state(self, alive: bool) -> str:
        """Return the state in one word: the status, or `orphaned`."""
        return "orphaned" if self.is_orphaned(alive) else self.status

    def reason(self, alive: bool) -> str | None:
        """Return why the search is in this state; None if that isn't known."""
        return "its driver is gone: resume it" if self.is_orphaned(alive) else self.status_reason


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of `owner` (`leases.this_process`) to write to a search, until a process acquires the next epoch."""

    search_id: str
    owner: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a running search.

    Attributes:
        done: Number of individuals that are complete, failed ones included.
        phase: Kind of the newest individual's phase.
        best: Index and fitness of the best individual so far.
        full: Fitness of the unedited model; None while unknown.
        reused: Number of evaluations that were found in the store or in this search instead of being run.
        evaluated: Number of evaluations that were run since the driver started.
        rate: Evaluations per second since the first one arrived, so that loading the model doesn't count.
        left: Seconds left at the present rate; None while unknown.
        scale: Scale that `best` and `full` are shown on.
    """

    __repr__ = short_repr

    done: int
    total: int
    phase: str
    best: tuple[int, float] | None
    full: float | None
    failed: int
    reused: int
    evaluated: int
    rate: float | None
    left: float | None
    scale: ScaleName = "percent"


@dataclass(frozen=True, slots=True)
class Control:
    """The driver of a search, its state, and what users ask of it.

    Attributes:
        owner: Process that acquired the lease last and has not released it.
        epoch: Number of times that the lease has been acquired.
        alive: True if the lease has not expired and its owner is not known to have ended.
        workers: Number of workers that users ask for; None means that of the config.
        stage, progress: What the driver was doing at the last renewal, in a line and in numbers.
        fault: Damage to the lease's row; None if it is intact.
    """

    __repr__ = short_repr

    owner: str | None
    epoch: int
    alive: bool
    desired_state: DesiredState
    workers: int | None
    stage: str | None = None
    progress: Progress | None = None
    events: int = 0
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a search.

    Attributes:
        seq: Number of the event within the search: 1, 2, ... in the order of commits.
        index: Index of the individual that the event is about, if it is about one.
    """

    search_id: str
    seq: int
    kind: EventKind
    text: str
    index: int | None
    at: datetime


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Schema revisions of a store before and after an upgrade; equal if there was nothing to do."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class SearchTaskRecord:
    """One task split of a search, in the config's order (`position` is the place in the sequence given).

    Attributes:
        task_fingerprint: Hash that identifies the prepared split.
        weight: Weight of the task in the fitness; 0 for auxiliary splits (calibration, tie-breaks, held-out tasks).
    """

    task: str
    split: Split
    task_fingerprint: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class SearchSummary:
    """One line of a listing of searches.

    Attributes:
        individuals: Number of recorded individuals: `evaluated` are `ok`, `failed` failed, and others are pending.
        best_fitness: Largest fitness of an `ok` individual; None before the first.
        dev, test: Scores of a finished search's winner, weighted means over the tasks of the fitness; None where a task
            has no score.
        tasks: Distinct names of the tasks in the fitness, in the config's order.
        owner: Process that drives the search; None if it has no driver.
        size: Share of the full model's parameters that the winner has; None for a search without a winner.
        scale, mean_scale: Scales that the fitness, and `dev` and `test`, are shown on.
    """

    __repr__ = short_repr

    search: SearchRecord
    individuals: int
    evaluated: int
    failed: int
    best_fitness: float | None
    dev: float | None
    test: float | None
    tasks: tuple[str, ...]
    owner: str | None
    size: float | None = None
    scale: ScaleName = "percent"
    mean_scale: ScaleName = "percent"

    @property
    def state(self) -> str:
        return self.search.state(self.owner is not None)

    @property
    def reason(self) -> str | None:
        return self.search.reason(self.owner is not None)

    @property
    def pending(self) -> int:
        return self.individuals - self.evaluated - self.failed


@dataclass(frozen=True, slots=True, kw_only=True)
class IndividualRecord:
    """A genome in its search, with its fitness there.

    Attributes:
        index: 0-based index within the search.
        phase: Kind of the phase, such as `prune` or `merge`.
        phenotype_hash: Hash of the edit that the genome expresses to; part of the key of its evaluations.
        experts: Number of retained experts n' per MoE layer.
        active: Number of active experts k per token.
        parameters, active_parameters: Numbers of parameters of the edited model, and of those it uses per token.
        depth: 0 without parents, else 1 + the largest depth of a parent.
        parents: Indices of the parents in the same search, in order, each smaller than `index`.
        stock: See `Description`.
        status: `ok` individuals have a `fitness` and a `tie_break`, `failed` ones a `failure` and a `failure_kind`.
        fitness: Weighted mean of the search-split scores over the search's tasks, less a penalty if one is configured.
        tie_break: Rank among individuals of equal fitness, larger is better: usually the mean gold log-probability.
    """

    __repr__ = short_repr

    __pydantic_config__ = BYTES_AS_TEXT
    index: int
    phase: str
    operator: str
    genome: bytes = field(repr=False)
    content_hash: str
    phenotype_hash: str
    experts: int
    active: int
    parameters: int
    active_parameters: int
    parameters_full: int
    active_parameters_full: int
    stock: bool = False
    summary: str = ""
    depth: int = 0
    parents: tuple[int, ...] = ()
    status: IndividualStatus = "pending"
    fitness: float | None = None
    tie_break: float | None = None
    failure: str | None = None
    failure_kind: FailureKind | None = None
    created_at: datetime | None = None


SEARCH_COLUMNS = tuple(one.name for one in fields(SearchRecord))
# Attributes that have a column of the same name, for each of the two records.
INDIVIDUAL_COLUMNS = tuple(one.name for one in fields(IndividualRecord) if one.name not in ("index", "parents"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """The evaluation of one phenotype on one task split, shared by all individuals of any search with that phenotype.

    The key is (phenotype_hash, model_fingerprint, engine_fingerprint, task_fingerprint). An evaluation either is scored
    (`score` and `gold_logprob` are set, `failure` is None) or failed by the candidate's fault (the reverse).

    Attributes:
        metric: Name of the metric that computes the score from the outcomes; a property of the task split.
        outcomes: Little-endian float32 values in [0, 1], one per example; None if they were not kept.
        experts, active, parameters, active_parameters: Size of the edited model, as in `IndividualRecord`; None for the
            full model. Repeated here so that rankings by number of experts and Pareto fronts read a single index.
    """

    __repr__ = short_repr

    __pydantic_config__ = BYTES_AS_TEXT
    phenotype_hash: str
    model_fingerprint: str
    engine_fingerprint: str
    task_fingerprint: str
    task: str
    split: Split
    metric: str
    score: float | None
    gold_logprob: float | None
    outcomes: bytes | None = field(default=None, repr=False)
    examples_seen: int = 0
    failure: str | None = None
    seconds: float = 0.0
    worker: str = ""
    attempt: int = 1
    experts: int | None = None
    active: int | None = None
    parameters: int | None = None
    active_parameters: int | None = None
    created_at: datetime | None = None

    @property
    def scale(self) -> ScaleName:
        """The scale that the score is shown on."""
        return scale_of(self.metric)


@dataclass(frozen=True, slots=True)
class ExportRecord:
    """One exported checkpoint.

    Attributes:
        form: `stock`, `native`, `source` or `mask`; see `moevolve.workers.contract.card.CheckpointForm`.
        checks: Results of comparing the files with the model or the source checkpoint, as JSON text.
    """

    path: str
    form: str
    checks: str = "{}"
    created_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class StoredShrink:
    """What a shrink has decided, done and found.

    Attributes:
        name: Name of the shrink.
        searches: Names of its searches.
        content: The rest, as JSON text.
    """

    name: str
    searches: tuple[str, ...]
    content: str
    updated_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class IndividualDetail:
    """An individual with all that the store has about it.

    Attributes:
        evaluations: Evaluations of its phenotype with the search's model and engine, by task, then split.
        scale: Scale that its fitness is shown on.
    """

    __repr__ = short_repr

    search: SearchRecord
    individual: IndividualRecord
    evaluations: tuple[EvaluationRecord, ...]
    exports: tuple[ExportRecord, ...]
    scale: ScaleName = "percent"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ref(self) -> str:
        """The reference `name:index`, as the command line takes it."""
        return f"{self.search.name}:{self.individual.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRow:
    """One configuration in a ranking for one task.

    Attributes:
        ranked_by: Split whose score ranks this row.
        search_score, dev_score, test_score: Scores of this phenotype on the task's splits; None where not evaluated.
        index: Index of the earliest individual with this phenotype.
        scale: Scale that the scores are shown on.
    """

    __repr__ = short_repr

    task: str
    ranked_by: Split
    search_id: str
    search_name: str
    index: int
    genome_kind: str
    search_score: float | None
    dev_score: float | None
    test_score: float | None
    gold_logprob: float
    experts: int
    active: int
    parameters: int
    active_parameters: int
    parameters_full: int
    active_parameters_full: int
    summary: str
    depth: int
    phase: str
    operator: str
    phenotype_hash: str
    model_fingerprint: str
    scale: ScaleName = "percent"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ref(self) -> str:
        """The reference `name:index`, as the command line takes it."""
        return f"{self.search_name}:{self.index}"

    @property
    def score(self) -> float:
        """The score that ranks this row, on the split `ranked_by`."""
        scores = {"search": self.search_score, "dev": self.dev_score, "test": self.test_score}
        score = scores[self.ranked_by]
        assert score is not None
        return score


@dataclass(frozen=True, slots=True)
class LineageNode:
    """One individual of a lineage graph."""

    __repr__ = short_repr

    index: int
    depth: int
    phase: str
    operator: str
    status: IndividualStatus
    fitness: float | None
    summary: str


@dataclass(frozen=True, slots=True)
class LineageGraph:
    """Ancestors of one individual, itself included.

    Attributes:
        edges: Pairs of indices (parent, child) among the nodes, in ascending order.
        scale: Scale that the fitness is shown on.
    """

    __repr__ = short_repr

    search_id: str
    search_name: str
    root: int
    nodes: tuple[LineageNode, ...]
    edges: tuple[tuple[int, int], ...]
    scale: ScaleName = "percent"

    @property
    def main_line(self) -> list[LineageNode]:
        """The individual's better parents back to one without parents, the oldest first, itself included.

        The better of two parents has the higher fitness, or is the younger one if they tie.
        """
        nodes = {node.index: node for node in self.nodes}
        parents: dict[int, list[LineageNode]] = {}
        for parent, child in self.edges:
            if parent < child:  # others are damage, and may go round in a circle
                parents.setdefault(child, []).append(nodes[parent])
        line = [nodes[self.root]]
        while line[-1].index in parents:
            line.append(max(parents[line[-1].index], key=lambda node: (node.fitness or 0.0, node.index)))
        return line[::-1]
