"""Frozen values that cross the store's border: what goes in and what comes out. ORM objects never leave the store.

Hashes and fingerprints are hex text. Scores are the metric in [0, 1]; `gold_logprob` and `tie_break` are mean
log-probabilities of the gold answer in nats (<= 0). Times are aware UTC datetimes; `None` going in means "now".
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Literal, get_args

from pydantic import computed_field

SearchStatus = Literal["created", "running", "paused", "interrupted", "cancelled", "finished", "failed"]
DesiredState = Literal["running", "paused", "stopped", "cancelled"]
"""What can be asked of a driver. A stopped search can be resumed, a cancelled one is over."""
EventKind = Literal["status", "asked", "best", "failed", "retried", "exported"]
"""A new status; something asked of the driver; a new best; candidates that failed; a step back; a checkpoint."""
Order = Literal["best", "newest", "failed"]
"""Of individuals in a listing: by rank, the latest first, or the latest of those that failed."""
IndividualStatus = Literal["pending", "ok", "failed"]
FailureKind = Literal["candidate", "worker", "timeout"]
"""Whose fault a failure is: the candidate's own, its workers' that died again and again, or the limit on time."""
Split = Literal["calibration", "search", "dev", "test"]
ExportForm = Literal["stock", "native"]

SPLITS: tuple[Split, ...] = ("calibration", "search", "dev", "test")
SCORED: tuple[Split, ...] = ("search", "dev", "test")
"""Splits that evaluations and rankings are on; `calibration` is measured on only."""
SEARCH_STATUSES: tuple[SearchStatus, ...] = get_args(SearchStatus)
DESIRED_STATES: tuple[DesiredState, ...] = get_args(DesiredState)
FULL_MODEL = "full"
"""Phenotype hash under which evaluations of the unedited model are kept."""
BYTES_AS_TEXT = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}
"""How pydantic is to write a record's bytes in JSON, and read them."""


def new_search_id() -> str:
    """A fresh id for a search: ten hex digits."""
    return uuid.uuid4().hex[:10]


UNBOUND = "config:"
"""What the model fingerprint of a search begins with that was stored with a model's config, but without its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """One search.

    Attributes:
        id: short text, unique in the store (`new_search_id()`).
        name: unique in the store; the user's handle, so no `:` in it (references are `name:index`).
        config: the resolved config as JSON text.
        config_hash: hash of everything in the config that can change the population.
        model_fingerprint: identity of the checkpoint; begins with `UNBOUND` while it is open which it is.
        model_path: where the model was loaded from.
        engine_fingerprint: identity of everything in the evaluation engine that can change a score.
        seed: of the search; fits 64 bits signed.
        genome_kind: `eep`, `factorllm` ...
        software_version: of moevolve.
        status_reason: one line, for `interrupted` and `failed`.
    """

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
    created_at: datetime | None = None
    updated_at: datetime | None = None

    @property
    def is_bound(self) -> bool:
        """Whether it is known which weights it is about."""
        return not self.model_fingerprint.startswith(UNBOUND)

    def is_orphaned(self, alive: bool) -> bool:
        """Whether its driver, which is or isn't alive, is gone without having said how it ended."""
        return not alive and self.status in ("running", "paused")


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write to a search, until another process has the next epoch.

    Attributes:
        search_id: of the search.
        owner: who has it, for people.
        epoch: how many times the lease was taken.
    """

    search_id: str
    owner: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a search stands.

    Attributes:
        done: individuals complete, failed ones included.
        total: individuals of the whole search.
        phase: kind of the phase of the newest individual.
        best: index and fitness of the best individual so far, None before the first.
        full: fitness of the unedited model, None while unknown.
        failed: individuals that failed.
        reused: evaluations found in the store or in this search instead of being run.
        evaluated: evaluations run since the driver started.
        rate: evaluations per second since the first one arrived (loading the model left out); None before.
        left: seconds left at the present pace, None while unknown.
    """

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


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """What a running search could use of a Ray cluster that others may share.

    Attributes:
        cluster: what tells it from others.
        least, most: workers.
        cpus, gpus: that each of them reserves.
    """

    cluster: str
    least: int
    most: int
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Control:
    """Who runs a search, where it stands, and what is asked of it.

    Attributes:
        owner: who took the lease last and didn't give it back; None if nobody.
        epoch: how many times it was taken.
        alive: whether the owner's lease lasts.
        desired_state: what the driver is to do.
        workers: how many it is to have; None leaves that to the configuration.
        priority: of searches that want the same workers, those of a higher one get them first.
        stage: what the driver last said that it does, one line.
        progress: where it last said that it stands.
        events: how many events the search has.
        claim: which workers it could use; None if it has not joined a cluster.
    """

    owner: str | None
    epoch: int
    alive: bool
    desired_state: DesiredState
    workers: int | None
    priority: int = 0
    stage: str | None = None
    progress: Progress | None = None
    events: int = 0
    claim: ResourceRequest | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a search.

    Attributes:
        search_id: of the search.
        seq: 1, 2, ... in the order in which a search's events were committed.
        kind: what sort of thing.
        text: one line for people.
        index: of the individual that it is about.
        at: when.
    """

    search_id: str
    seq: int
    kind: EventKind
    text: str
    index: int | None
    at: datetime


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Which schema a store had, and has now.

    Attributes:
        before: its revision.
        after: the one that this software writes; the same if there was nothing to do.
    """

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class SearchTaskRecord:
    """One task split of a search, in the config's order (`position` is the place in the sequence given).

    Attributes:
        task: name of the task.
        split: `calibration`, `search`, `dev` or `test`.
        task_fingerprint: identity of the prepared split.
        weight: of the task in the fitness; 0 for splits beside it: what was measured on, what breaks ties, and
            tasks held out.
    """

    task: str
    split: Split
    task_fingerprint: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class SearchSummary:
    """One line of a listing of searches.

    Attributes:
        individuals: recorded in all; `evaluated` of them are `ok`, `failed` failed, the rest are pending.
        best_fitness: the largest fitness of an `ok` individual; None while there is none.
        tasks: names of the tasks in the fitness, in order, without repeats.
        owner: who runs it; None if nobody does.
    """

    search: SearchRecord
    individuals: int
    evaluated: int
    failed: int
    best_fitness: float | None
    tasks: tuple[str, ...]
    owner: str | None

    @property
    def is_orphaned(self) -> bool:
        return self.search.is_orphaned(self.owner is not None)

    @property
    def pending(self) -> int:
        return self.individuals - self.evaluated - self.failed


@dataclass(frozen=True, slots=True, kw_only=True)
class IndividualRecord:
    """A genome in its search, and what its evaluations amount to there.

    Attributes:
        index: 0-based within the search.
        phase: `prune`, `merge` ...
        operator: what made it, as text.
        genome: its serialised bytes.
        content_hash: of the genome.
        phenotype_hash: of the edit it expresses to; evaluations are kept under it.
        experts: retained experts n' per MoE layer.
        active: experts per token k.
        parameters: kept by the edited model.
        active_parameters: used per token by the edited model.
        parameters_full: of the unedited model.
        summary: short text for listings.
        depth: 0 without parents, else 1 + the largest depth of a parent.
        parents: indices in the same search, in order; all smaller than `index`.
        status: `pending` while it is evaluated; `ok`, then `fitness` and `tie_break` are set; or `failed`, then
            `failure` and `failure_kind` are.
        fitness: weighted mean of the search-split scores over the search's tasks, less its penalty.
        tie_break: decides between equal fitness, higher is better: mostly the mean gold log-probability.
        failure: the reason, one line.
        failure_kind: whose fault it is.
    """

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
    summary: str = ""
    depth: int = 0
    parents: tuple[int, ...] = ()
    status: IndividualStatus = "pending"
    fitness: float | None = None
    tie_break: float | None = None
    failure: str | None = None
    failure_kind: FailureKind | None = None
    created_at: datetime | None = None


INDIVIDUAL_COLUMNS = tuple(one.name for one in fields(IndividualRecord) if one.name not in ("index", "parents"))
"""Attributes that the store keeps in columns of the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """One phenotype on one task split: shared by every individual, of any search, that expresses to it.

    The key is (phenotype_hash, model_fingerprint, engine_fingerprint, task_fingerprint). An evaluation either is scored
    (then `score` and `gold_logprob` are set and `failure` is None) or failed (the other way round) by its own fault.

    Attributes:
        metric: name of the metric that makes the score of the outcomes; a property of the task split.
        outcomes: float32 little-endian, one per example, in [0, 1]; None when not kept.
        seconds: wall time on the worker.
        worker: who did it, for the record only.
        attempt: 1 for the first.
        experts, active, parameters: as on the individual; None for the full model. Kept here so that "best for so many
            experts" and Pareto fronts read one index.
    """

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
    created_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class ExportRecord:
    """One exported checkpoint.

    Attributes:
        path: of the directory.
        form: `stock` or `native`.
        checks: what was verified after reloading, as JSON text.
    """

    path: str
    form: ExportForm
    checks: str = "{}"
    created_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class IndividualDetail:
    """All the store knows of one individual.

    Attributes:
        evaluations: of its phenotype with the search's model and engine, by task, then split (search, dev, test).
    """

    search: SearchRecord
    individual: IndividualRecord
    evaluations: tuple[EvaluationRecord, ...]
    exports: tuple[ExportRecord, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ref(self) -> str:
        """`name:index`, as the command line takes it."""
        return f"{self.search.name}:{self.individual.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRow:
    """One configuration in a ranking for one task.

    Attributes:
        task: the task it is ranked for.
        ranked_by: the split whose score ranks this row.
        search_score, dev_score, test_score: of this phenotype on the task's splits; None where not evaluated.
        index: of the earliest individual that has this phenotype.
        genome_kind: of the search.
    """

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
    summary: str
    depth: int
    phase: str
    operator: str
    phenotype_hash: str
    model_fingerprint: str

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ref(self) -> str:
        """`name:index`, as the command line takes it."""
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

    index: int
    depth: int
    phase: str
    operator: str
    status: IndividualStatus
    fitness: float | None
    summary: str


@dataclass(frozen=True, slots=True)
class LineageGraph:
    """Ancestors or descendants of one individual, itself included.

    Attributes:
        root: index of the individual asked for.
        nodes: by index, ascending.
        edges: (parent, child) pairs of indices, both among the nodes, ascending.
    """

    search_id: str
    search_name: str
    root: int
    nodes: tuple[LineageNode, ...]
    edges: tuple[tuple[int, int], ...]
