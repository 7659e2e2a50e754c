"""The configuration of a search as frozen, checked values; `config_files` reads it."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from moevolve.evaluators.types import Split
from moevolve.workers import config as worker_config


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSection(Section):
    """Which checkpoint, and how a worker holds it; see `moevolve.workers.config.ModelConfig`."""

    path: str
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    device_map: str | None = None
    originals: Literal["device", "host"] = "device"
    experts_implementation: Literal["grouped_mm", "batched_mm", "eager"] = "grouped_mm"
    attn_implementation: str = "sdpa"
    trust_remote_code: bool = False

    def to_worker(self) -> worker_config.ModelConfig:
        return worker_config.ModelConfig(**self.model_dump())


class EngineSection(Section):
    """How prompts are batched; see `moevolve.workers.config.EngineConfig`."""

    batch_tokens: int = Field(worker_config.EngineConfig().batch_tokens, ge=1)
    threads: int = Field(1, ge=1)
    max_prompt_tokens: int | None = Field(None, ge=1)
    tail_tokens: int = Field(64, ge=0)

    @model_validator(mode="after")
    def _tail_fits(self) -> Self:
        if self.max_prompt_tokens is not None and self.tail_tokens >= self.max_prompt_tokens:
            raise ValueError(f"tail_tokens {self.tail_tokens} must be below max_prompt_tokens {self.max_prompt_tokens}")
        return self

    def to_worker(self) -> worker_config.EngineConfig:
        return worker_config.EngineConfig(**self.model_dump())


class TaskSection(Section):
    """A task by name or YAML path.

    Attributes:
        name: name of a packaged task, or path of a task file.
        weight: its weight in the fitness.
        counts: use this many examples of a split instead of the task file's number.
    """

    name: str
    weight: float = Field(1.0, gt=0)
    counts: dict[Split, Annotated[int, Field(ge=1)]] = {}


class EepSection(Section):
    """The EEP genome: a router mapping and an expert merging matrix per group of layers.

    Attributes:
        experts: retained experts n' per MoE layer.
        active: experts per token k; None keeps the model's (but at most n').
        groups: layers share coefficients within a group: a number of equal contiguous groups, or `per_layer`.
        router_space: `probs` (the paper) or `logits`.
    """

    kind: Literal["eep"] = "eep"
    experts: int = Field(ge=1)
    active: int | None = Field(None, ge=1)
    groups: Annotated[int, Field(ge=1)] | Literal["per_layer"] = 4
    router_space: Literal["probs", "logits"] = "probs"

    @model_validator(mode="after")
    def _active_within_experts(self) -> Self:
        if self.active is not None and self.active > self.experts:
            raise ValueError(f"active {self.active} is more than the {self.experts} retained experts")
        return self


class TopKParents(Section):
    """Parents are the `k` best individuals so far (the paper)."""

    rule: Literal["top_k"] = "top_k"
    k: int = Field(10, ge=1)


class ThresholdParents(Section):
    """Parents are all individuals whose fitness is within `margin` of the best (the authors' code)."""

    rule: Literal["threshold"] = "threshold"
    margin: float = Field(0.03, ge=0)


Parents = Annotated[TopKParents | ThresholdParents, Field(discriminator="rule")]


class EvolutionSection(Section):
    """EEP's evolutionary loop.

    Attributes:
        mode: `steady` makes a child as soon as the window allows; `generations` waits for each generation.
        generation: individuals per generation in `generations` mode.
    """

    kind: Literal["evolution"] = "evolution"
    mode: Literal["steady", "generations"] = "steady"
    generation: int = Field(16, ge=1)


class NevergradSection(Section):
    """An optimiser of nevergrad on the flattened genome.

    Attributes:
        optimizer: its name in nevergrad's registry, `DiagonalCMA` for example.
        sigma: standard deviation of its first steps; None takes what suits the phase.
    """

    kind: Literal["nevergrad"] = "nevergrad"
    optimizer: str
    sigma: float | None = Field(None, gt=0)


def _by_name(value: Any) -> Any:
    """`evolution` and `nevergrad:<Optimizer>` for their sections; a section without a kind is evolution's."""
    if isinstance(value, dict):
        return {"kind": "evolution"} | value
    if not isinstance(value, str):
        return value
    kind, colon, optimizer = value.partition(":")
    return {"kind": kind, "optimizer": optimizer} if colon else {"kind": kind}


StrategySection = Annotated[EvolutionSection | NevergradSection, Field(discriminator="kind"), BeforeValidator(_by_name)]


class PhaseBase(Section):
    evaluations: int = Field(ge=1)
    initial: int = Field(0, ge=0)
    parents: Parents = TopKParents()
    strategy: StrategySection | None = None
    group_rate: float = Field(0.25, ge=0, le=1)

    @model_validator(mode="after")
    def _initial_fits(self) -> Self:
        if self.initial > self.evaluations:
            raise ValueError(f"initial {self.initial} is more than evaluations {self.evaluations}")
        return self

    @model_validator(mode="after")
    def _waiting_is_for_all(self) -> Self:
        if isinstance(self.strategy, EvolutionSection) and self.strategy.mode == "generations":
            raise ValueError("strategy: only the whole search can wait for generations, not one phase")
        return self


class PrunePhase(PhaseBase):
    """One-hot matrices: which experts stay.

    Attributes:
        evaluations: individuals of the phase, the initial ones included.
        strategy: for this phase, if not the search's.
        initial: random individuals at the start.
        crossover_rate: probability that a child has two parents.
        group_rate: probability that mutation touches a group (at least one is).
        row_rate: probability that a retained expert of a touched group is replaced.
        force_change: replace at least one expert in every touched group (off in the paper).
    """

    kind: Literal["prune"] = "prune"
    initial: int = Field(31, ge=0)
    crossover_rate: float = Field(0.5, ge=0, le=1)
    row_rate: float = Field(0.15, ge=0, le=1)
    force_change: bool = False


class MergePhase(PhaseBase):
    """Continuous matrices, router mapping and expert merging decoupled, from the best of the phase before.

    Attributes:
        evaluations: individuals of the phase.
        strategy: for this phase, if not the search's.
        crossover_rate: probability that a child has two parents.
        entry_rate: probability that an entry of a touched group's matrices is perturbed.
        sigma: standard deviation of the perturbation.
        normalise_rate: probability that the rows of a touched merging matrix are scaled to sum 1.
    """

    kind: Literal["merge"] = "merge"
    crossover_rate: float = Field(0.3, ge=0, le=1)
    entry_rate: float = Field(0.25, ge=0, le=1)
    sigma: float = Field(0.065, gt=0)
    normalise_rate: float = Field(0.1, ge=0, le=1)


PhaseConfig = PrunePhase | MergePhase
Phase = Annotated[PhaseConfig, Field(discriminator="kind")]


class WorkersSection(Section):
    """Execution only: nothing here changes a result, so all of it may differ between launch and resume.

    Attributes:
        count: worker actors.
        num_cpus: CPUs that Ray reserves per worker.
        num_gpus: GPUs (also fractions) that Ray reserves per worker.
        max_attempts: a candidate that kills its worker this many times is recorded as failed.
        timeout_s: an evaluation running longer counts as having killed its worker.
        start_timeout_s: how long the first worker may take to load the model.
        address: Ray address to join (`auto`, `host:port`); None starts Ray on this machine.
    """

    count: int = Field(1, ge=1)
    num_cpus: float = Field(1, ge=0)
    num_gpus: float = Field(0, ge=0)
    max_attempts: int = Field(3, ge=1)
    timeout_s: float = Field(3600, gt=0)
    start_timeout_s: float = Field(3600, gt=0)
    address: str | None = None


class FinalSection(Section):
    """What happens once the last individual is evaluated.

    Attributes:
        rerank: the best this many on `search` are scored on `dev`, which picks the winner; 0 skips it.
        test: score the full model and the winner on `test` for the final table.
        random_draws: this many of the random initial individuals are scored on `test` too, as the random-pruning
            baseline of the final table.
    """

    rerank: int = Field(5, ge=0)
    test: bool = True
    random_draws: int = Field(0, ge=0)


class StoredConfig(Section):
    """What every stored search has, imported ones included: enough to rebuild a genome, its model and its engine."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    model: ModelSection
    genome: EepSection
    engine: EngineSection = EngineSection()

    def canonical_json(self) -> str:
        """The configuration as stored with the search."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)

    @property
    def config_hash(self) -> str:
        """SHA-256 (hex) of what determines the population: execution settings, name and store are left out."""
        content = self.model_dump(mode="json", exclude={"name", "workers", "store", "final"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class RunConfig(StoredConfig):
    """One search, whole."""

    seed: int = Field(0, ge=0)
    tasks: tuple[TaskSection, ...] = Field(min_length=1)
    strategy: StrategySection = EvolutionSection()
    phases: tuple[Phase, ...] = Field(min_length=1)
    window: int = Field(8, ge=1)
    workers: WorkersSection = WorkersSection()
    final: FinalSection = FinalSection()
    store: str = "sqlite:///moevolve.db"

    @model_validator(mode="after")
    def _tasks_differ(self) -> Self:
        names = [task.name for task in self.tasks]
        if len(set(names)) != len(names):
            raise ValueError(f"tasks: a task is named twice in {', '.join(names)}")
        return self

    @model_validator(mode="after")
    def _prune_before_merge(self) -> Self:
        kinds = [phase.kind for phase in self.phases]
        if kinds != sorted(kinds, key=("prune", "merge").index):
            raise ValueError("phases: a prune phase can't follow a merge phase, merged experts have no retained ones")
        return self
