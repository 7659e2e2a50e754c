"""The base of a configuration's sections, and those of phases: operators, rates, parent selection, strategies."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from moevolve.workers.methods.repair.edit import RepairSettings

MOST_EVALUATIONS = 10_000_000
"""Most individuals of a phase: far more than a search evaluates in years, and few enough to count and list."""


def refuse_flags_as_numbers(kind: type[BaseModel], data: Any) -> Any:
    """Refuse `true` and `false` where a number is expected: pydantic takes them for 1 and 0."""
    for name, value in data.items() if isinstance(data, dict) else ():
        if isinstance(value, bool) and name in kind.model_fields:
            expected = _members(kind.model_fields[name].annotation)
            if (int in expected or float in expected) and bool not in expected:
                raise ValueError(f"`{name}` is a number, not {str(value).lower()}")
    return data


def _members(annotation: Any) -> list[Any]:
    return [annotation, *(each for part in get_args(annotation) for each in _members(part))]


class Section(BaseModel):
    """Base of all sections: values are immutable, numbers are finite, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_flags_as_numbers(cls, data: Any) -> Any:
        return refuse_flags_as_numbers(cls, data)

    @model_validator(mode="before")
    @classmethod
    def _no_misspelt_keys(cls, data: Any) -> Any:
        for key in data.keys() - cls.model_fields.keys() if isinstance(data, dict) else ():
            if near := get_close_matches(str(key), cls.model_fields, n=1):
                raise ValueError(f"{key}: unknown key (did you mean `{near[0]}`?)")
        return data


class TopKParents(Section):
    """Parents are the `k` best individuals so far (the paper)."""

    rule: Literal["top_k"] = "top_k"
    k: int = Field(10, ge=1, le=MOST_EVALUATIONS)


class ThresholdParents(Section):
    """Parents are all individuals whose fitness is within a margin of the best; each operator has its own margin.

    The rule and its numbers are those of the EEP authors' code (there in percentage points).

    Attributes:
        crossover_margin: Largest distance in fitness, in [0, 1], between the best individual and a crossover's parents.
        crossover_least: Number of best individuals that may be crossed whatever their distance.
        mutation_margin: Largest distance in fitness between the best individual and a mutation's parent.
    """

    rule: Literal["threshold"] = "threshold"
    crossover_margin: float = Field(0.01, ge=0, le=1e6)
    crossover_least: int = Field(6, ge=1, le=MOST_EVALUATIONS)
    mutation_margin: float = Field(0.03, ge=0, le=1e6)


Parents = Annotated[
    TopKParents | ThresholdParents,
    Field(discriminator="rule"),
    BeforeValidator(lambda value: {"rule": "top_k"} | value if isinstance(value, dict) else value),
]


class EvolutionSection(Section):
    """EEP's evolutionary loop.

    Attributes:
        mode: `steady` makes a child as soon as the window allows; `generations` waits for each generation.
        generation: Individuals per generation in `generations` mode.
    """

    kind: Literal["evolution"] = "evolution"
    mode: Literal["steady", "generations"] = "steady"
    generation: int = Field(16, ge=1, le=MOST_EVALUATIONS)


class NevergradSection(Section):
    """An optimiser of nevergrad on the flattened genome.

    Attributes:
        optimizer: Name in nevergrad's registry, for example `DiagonalCMA`.
        sigma: Standard deviation of the first steps; None takes the default of the phase's kind.
    """

    kind: Literal["nevergrad"] = "nevergrad"
    optimizer: str
    sigma: float | None = Field(None, gt=0, le=1000)


class SurrogateSection(Section):
    """A Bayesian linear model of the fitness proposes children in phases whose genomes choose parts, such as experts.

    In other phases evolution makes all children. See `moevolve.search.strategies.surrogate`.

    Attributes:
        evolution_share: Share of the children that evolution makes. The default was the best that was tried.
        memory: Number of newest individuals that the model is fitted to; bounds the time to make a child.
    """

    kind: Literal["surrogate"] = "surrogate"
    evolution_share: float = Field(0.3, ge=0, le=1)
    memory: int = Field(1000, ge=2, le=MOST_EVALUATIONS)


def _by_name(value: Any) -> Any:
    """Read `evolution`, `surrogate` and `nevergrad:<Optimizer>` as sections; the default kind is `evolution`."""
    if isinstance(value, dict):
        return {"kind": "evolution"} | value
    if not isinstance(value, str):
        return value
    kind, colon, optimizer = value.partition(":")
    return {"kind": kind, "optimizer": optimizer} if colon else {"kind": kind}


StrategySection = Annotated[
    EvolutionSection | NevergradSection | SurrogateSection, Field(discriminator="kind"), BeforeValidator(_by_name)
]


def _by_default(value: Any) -> Any:
    """Read `true` as the default settings, and `false` as none."""
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


Repair = Annotated[RepairSettings | None, BeforeValidator(_by_default)]


START = "start"
"""Name in `init` of the unsearched genome that a method for dense models starts from."""


class PhaseBase(Section):
    """Settings that phases of all kinds have.

    Attributes:
        evaluations: Individuals of the phase, including the initial ones.
        initial: Number of initial individuals: those that `init` names, then random ones.
        parents: Individuals that may become parents.
        strategy: Strategy of this phase; None takes the search's.
        crossover_rate: Probability that a child has two parents.
        group_rate: Probability that mutation changes a group of layers, or for dense models a layer.
        init: Baselines of the genome kind, and `random`; random individuals fill the rest in any case.
        repair: Settings by which every candidate of the phase is repaired before it is scored.
        allow_duplicates: A child that repeats an earlier individual stays, reuses the earlier evaluation, and counts
            among the parents each time it occurs. Otherwise its operator and parents are drawn again.
    """

    evaluations: int = Field(ge=1, le=MOST_EVALUATIONS)
    initial: int = Field(0, ge=0, le=MOST_EVALUATIONS)
    parents: Parents = TopKParents()
    strategy: StrategySection | None = None
    crossover_rate: float = Field(0.3, ge=0, le=1)
    group_rate: float = Field(0.25, ge=0, le=1)
    init: tuple[str, ...] = Field(("random",), min_length=1)
    repair: Repair = None
    allow_duplicates: bool = False

    @property
    def named(self) -> tuple[str, ...]:
        """Names in `init` besides `random`: baselines, and the method's own start."""
        return tuple(name for name in self.init if name != "random")

    @property
    def baselines(self) -> tuple[str, ...]:
        return tuple(name for name in self.named if name != START)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(set(self.init)) != len(self.init):
            raise ValueError(f"init: a name comes twice in {', '.join(self.init)}")
        if len(self.named) > self.initial:
            raise ValueError(f"initial {self.initial} is less than the {len(self.named)} individuals that init names")
        if self.initial > self.evaluations:
            raise ValueError(f"initial {self.initial} is more than evaluations {self.evaluations}")
        if isinstance(self.strategy, EvolutionSection) and self.strategy.mode == "generations":
            raise ValueError("strategy: only the whole search can wait for generations, not one phase")
        return self


class PrunePhase(PhaseBase):
    """A search of the experts to keep: both matrices are equal and one-hot.

    As in the authors' code, mutation draws groups of the router mapping and of the expert merging until one of either
    is drawn, and changes the latter, which may be none; a replaced expert may be drawn again. Rates are from the
    authors' released configuration. The paper describes crossover for both phases, the authors' code only for merging.

    Attributes:
        replace_rate: Probability that a retained expert of a changed group is replaced.
    """

    kind: Literal["prune"] = "prune"
    initial: int = Field(31, ge=0, le=MOST_EVALUATIONS)
    group_rate: float = Field(0.25, ge=0.01, le=1)
    replace_rate: float = Field(0.15, ge=0, le=1)


class MergePhase(PhaseBase):
    """A search of continuous matrices: router mapping and expert merging are decoupled.

    Operators are those of EEP's Sec. 4.3 and App. C. The rates, and what the paper leaves open, follow the authors'
    code.

    Attributes:
        start: Parents in addition to the phase's own individuals: the `best` of the previous phase (the paper), or
            `all` individuals of the previous phases (the authors' code).
        group_rate: Probability that a group's matrix is changed. Groups of the router mapping and of the expert merging
            are drawn until one of either is.
        crossover: The unit that a changed matrix takes from either parent: `rows` (App. C) or `entries` (Sec. 4.3).
            Other matrices come whole from one parent.
        first_parent_rate: Probability that a row, entry or whole matrix is the first parent's; the order of the parents
            is drawn.
        entry_rate: Probability that an entry of a changed matrix is perturbed.
        sigma: Standard deviation of the perturbation.
        normalise_rate: Probability that the rows of all groups' expert mergings are scaled to sum 1.
    """

    kind: Literal["merge"] = "merge"
    start: Literal["best", "all"] = "best"
    group_rate: float = Field(0.25, ge=0.01, le=1)
    crossover: Literal["rows", "entries"] = "rows"
    first_parent_rate: float = Field(0.6, ge=0, le=1)
    entry_rate: float = Field(0.25, ge=0, le=1)
    sigma: float = Field(0.065, gt=0, le=1000)
    normalise_rate: float = Field(0.1, ge=0, le=1)


class TunePhase(PhaseBase):
    """A search of genomes of dense models: continuous coordinates, each in its own unit, and discrete choices.

    Attributes:
        group_rate: See `PhaseBase`; at least one layer is changed.
        init: See `PhaseBase`; also `start`, the method's unsearched genome.
        entry_rate: Probability that a coordinate of a changed layer is perturbed.
        sigma: Standard deviation of the perturbation.
        swap_rate: Probability that a discrete choice of a changed layer is changed.
    """

    kind: Literal["tune"] = "tune"
    initial: int = Field(8, ge=0, le=MOST_EVALUATIONS)
    init: tuple[str, ...] = Field((START, "random"), min_length=1)
    entry_rate: float = Field(0.25, ge=0, le=1)
    sigma: float = Field(0.1, gt=0, le=1000)
    swap_rate: float = Field(0.02, ge=0, le=1)


class RepairPhase(PhaseBase):
    """Repairs the best individuals of the previous phases anew, whose genomes stay as they are.

    Unrepaired individuals of the previous phases are ranked together with its own.

    Attributes:
        evaluations: Number of different genomes that are repaired.
        repair: Settings of the repair.
    """

    kind: Literal["repair"] = "repair"
    repair: Annotated[RepairSettings, BeforeValidator(_by_default)] = RepairSettings()

    @model_validator(mode="after")
    def _breeds_nothing(self) -> Self:
        for name, field in type(self).model_fields.items():
            if name not in ("evaluations", "repair") and getattr(self, name) != field.default:
                raise ValueError(
                    f"{name}: a repair phase has only `evaluations` and `repair`, since it repairs that many of the "
                    "best of the earlier phases; leave it out"
                )
        return self


PhaseConfig = PrunePhase | MergePhase | TunePhase | RepairPhase
Phase = Annotated[PhaseConfig, Field(discriminator="kind")]
