"""The base of a configuration's sections, and those of phases: operators, rates, parent selection, strategies."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from moevolve.workers.methods.repair.edit import RepairSettings

# Most individuals of a phase: far more than a search evaluates in years, and few enough to count and list.
MOST_EVALUATIONS = 10_000_000


def refuse_flags_as_numbers(kind: type[BaseModel], data: object) -> object:
    """Refuse `true` and `false` where a number is expected: pydantic takes them for 1 and 0."""
    for name, value in data.items() if isinstance(data, dict) else ():
        if isinstance(value, bool) and name in kind.model_fields:
            expected = _members(kind.model_fields[name].annotation)
            if (int in expected or float in expected) and bool not in expected:
                raise ValueError(f"`{name}` is a number, not {str(value).lower()}")
    return data


def _members(annotation: object) -> list[object]:
    return [annotation, *(each for part in get_args(annotation) for each in _members(part))]


class Section(BaseModel):
    """Base of all sections: values are immutable, numbers are finite, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_flags_as_numbers(cls, data: object) -> object:
        return refuse_flags_as_numbers(cls, data)

    @model_validator(mode="before")
    @classmethod
    def _no_misspelt_keys(cls, data: object) -> object:
        for key in data.keys() - cls.model_fields.keys() if isinstance(data, dict) else ():
            if near := get_close_matches(str(key), cls.model_fields, n=1):
                raise ValueError(f"{key}: unknown key (did you mean `{near[0]}`?)")
        return data


# How many of the best individuals so far may become parents (the paper), or the `threshold` of the authors' code.
Parents = Annotated[int, Field(ge=1, le=MOST_EVALUATIONS)] | Literal["threshold"]


def _known_strategy(name: str) -> str:
    if name in ("evolution", "surrogate") or (name.startswith(NEVERGRAD) and name != NEVERGRAD):
        return name
    raise ValueError(f"{name} is unknown; there are evolution, surrogate, {NEVERGRAD}<Optimizer>")


# Prefix of strategies that are optimisers of nevergrad, whose names in its registry follow.
NEVERGRAD = "nevergrad:"
# EEP's loop (`evolution`), a model that learns the value of each part of a genome (`surrogate`), or an optimiser.
Strategy = Annotated[str, AfterValidator(_known_strategy)]


def _by_default(value: object) -> object:
    """Read `true` as the default settings, and `false` as none."""
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


Repair = Annotated[RepairSettings | None, BeforeValidator(_by_default)]


# Name in `init` of the unsearched genome that a method for dense models starts from.
START = "start"


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
    parents: Parents = 10
    strategy: Strategy | None = None
    crossover_rate: float = Field(0.3, ge=0, le=1)
    group_rate: float = Field(0.25, ge=0.01, le=1)
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
    replace_rate: float = Field(0.15, ge=0, le=1)


class MergePhase(PhaseBase):
    """A search of continuous matrices: router mapping and expert merging are decoupled.

    Operators are those of EEP's Sec. 4.3 and App. C: a changed matrix takes each row from either parent, and others
    come whole from one parent. The rates, and what the paper leaves open, follow the authors' code.

    Attributes:
        start: Parents in addition to the phase's own individuals: the `best` of the previous phase (the paper), or
            `all` individuals of the previous phases (the authors' code).
        group_rate: Probability that a group's matrix is changed. Groups of the router mapping and of the expert merging
            are drawn until one of either is.
        entry_rate: Probability that an entry of a changed matrix is perturbed.
        sigma: Standard deviation of the perturbation.
    """

    kind: Literal["merge"] = "merge"
    start: Literal["best", "all"] = "best"
    entry_rate: float = Field(0.25, ge=0, le=1)
    sigma: float = Field(0.065, gt=0, le=1000)


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
