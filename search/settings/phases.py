"""Phases of a search, who may become a parent, and strategies."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from moevolve.search.settings.section import Section
from moevolve.workers.methods.repair.edit import RepairRecipe


class TopKParents(Section):
    """Parents are the `k` best individuals so far (the paper)."""

    rule: Literal["top_k"] = "top_k"
    k: int = Field(10, ge=1)


class ThresholdParents(Section):
    """Parents are all individuals whose fitness is near enough to the best; one margin per operator.

    The EEP authors' code has this rule, with these numbers (there in points of 100).

    Attributes:
        crossover_margin: how much less than the best the two parents of a crossover may have.
        crossover_least: the best so many may be crossed, however much less they have.
        mutation_margin: how much less than the best the parent of a mutation may have.
    """

    rule: Literal["threshold"] = "threshold"
    crossover_margin: float = Field(0.01, ge=0)
    crossover_least: int = Field(6, ge=1)
    mutation_margin: float = Field(0.03, ge=0)


def _by_rule(value: Any) -> Any:
    """A mapping that names no rule is about the default one."""
    return {"rule": "top_k"} | value if isinstance(value, dict) else value


Parents = Annotated[TopKParents | ThresholdParents, Field(discriminator="rule"), BeforeValidator(_by_rule)]


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


class SurrogateSection(Section):
    """A Bayesian linear model of the fitness proposes children where genomes are a choice among parts.

    Which experts stay is one. Other phases are evolution's. See `moevolve.search.strategies.surrogate`.

    `signal` and `noise` are round numbers near those that made the histories of pruning a small MoE likeliest (6
    layers, 2 of 8 experts, 31 to 190 individuals; marginal likelihood); the other defaults are from trials on it, too.

    Attributes:
        bred: share of the children that evolution makes.
        signal: prior standard deviation of what the model says of an individual, whatever the number of features; the
            targets' own is between 1.4 and 2.
        noise: standard deviation of the targets about the model: what a sum over parts can't say, mostly.
        memory: the model is fitted to the newest this many individuals, which bounds what a child takes to make.
    """

    kind: Literal["surrogate"] = "surrogate"
    bred: float = Field(0.3, ge=0, le=1)
    signal: float = Field(1.0, gt=0)
    noise: float = Field(0.7, gt=0)
    memory: int = Field(1000, ge=2)


def _by_name(value: Any) -> Any:
    """`evolution`, `surrogate` and `nevergrad:<Optimizer>` for their sections; one without a kind is evolution's."""
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
    """`true` for a recipe with its defaults, `false` for none."""
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


Repair = Annotated[RepairRecipe | None, BeforeValidator(_by_default)]
Matrices = Literal["independent", "joint"]


START = "start"
"""Name in `init` of the method's own unsearched start, which genomes of dense models have."""


class PhaseBase(Section):
    """What the phases of all kinds have.

    `repair` is how every candidate of the phase is repaired before it is scored, if it is. A child that is an earlier
    individual again is drawn anew, operator and parents too, since it would tell nothing; with `repeats` it stays, and
    counts among the parents as often as it comes (its evaluation is the earlier one's).
    """

    evaluations: int = Field(ge=1)
    initial: int = Field(0, ge=0)
    parents: Parents = TopKParents()
    strategy: StrategySection | None = None
    group_rate: float = Field(0.25, ge=0, le=1)
    init: tuple[str, ...] = Field(("random",), min_length=1)
    repair: Repair = None
    repeats: bool = False

    @property
    def named(self) -> tuple[str, ...]:
        """What the phase begins with before random individuals, in order: baselines, and the method's own start."""
        return tuple(name for name in self.init if name != "random")

    @property
    def baselines(self) -> tuple[str, ...]:
        """The baselines among these."""
        return tuple(name for name in self.named if name != START)

    @model_validator(mode="after")
    def _baselines_fit(self) -> Self:
        if len(set(self.init)) != len(self.init):
            raise ValueError(f"init: a name comes twice in {', '.join(self.init)}")
        if len(self.named) > self.initial:
            raise ValueError(f"initial {self.initial} is less than the {len(self.named)} individuals that init names")
        return self

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

    Rates are from the EEP authors' released configuration; of crossover the paper says nothing that is for merging
    only, but their code crosses nothing before.

    Attributes:
        evaluations: individuals of the phase, the initial ones included.
        strategy: for this phase, if not the search's.
        initial: individuals at the start: the baselines of `init`, then random ones.
        init: names of baselines of the genome kind, and `random`, which fills the rest in any case.
        crossover_rate: probability that a child has two parents.
        group_rate: probability that mutation touches a group.
        matrices: `independent` draws groups of the router mapping and of the expert merging until there is one of
            either, as the authors' code does; the latter are touched, possibly none. `joint` touches at least one.
        row_rate: probability that a retained expert of a touched group is replaced.
        redraw: whether it may be drawn again itself, as in the authors' code.
        force_change: replace at least one expert in every touched group (off in the paper).
    """

    kind: Literal["prune"] = "prune"
    initial: int = Field(31, ge=0)
    crossover_rate: float = Field(0.3, ge=0, le=1)
    group_rate: float = Field(0.25, ge=0.01, le=1)
    matrices: Matrices = "independent"
    row_rate: float = Field(0.15, ge=0, le=1)
    redraw: bool = True
    force_change: bool = False

    @model_validator(mode="after")
    def _forced_change_is_one(self) -> Self:
        if self.force_change and self.redraw:
            raise ValueError("force_change: with redraw an expert may replace itself; set redraw: false")
        return self


class MergePhase(PhaseBase):
    """Continuous matrices, router mapping and expert merging decoupled.

    Operators are those of EEP's Sec. 4.3 and App. C; rates, and what the paper leaves open, are the authors' code's.

    Attributes:
        evaluations: individuals of the phase.
        strategy: for this phase, if not the search's.
        initial, init: as in the prune phase; they stand beside what `start` says.
        start: who may become a parent besides the phase's own individuals: the `best` of the phase before (the paper),
            or `all` individuals of the phases before (the authors' code).
        group_rate: probability that a group's matrix is touched.
        matrices: whether the router mapping and the expert merging are touched in the same groups (`together`, at least
            one) or in groups of their own (`apart`, drawn until there is one of either).
        crossover_rate: probability that a child has two parents.
        crossover: what of two parents is combined in a touched matrix: its `rows` (App. C) or its `entries` (Sec. 4.3).
            Other matrices come whole from one of them.
        first_parent_rate: probability that a row, entry or whole matrix is the first parent's; which of the two is
            first is drawn.
        entry_rate: probability that an entry of a touched matrix is perturbed.
        sigma: standard deviation of the perturbation.
        normalise: what is scaled with `normalise_rate`: the expert merging of `all` groups at once, or that of each
            `touched` group by a draw of its own.
        normalise_rate: probability that rows of the expert merging are scaled to sum 1.
    """

    kind: Literal["merge"] = "merge"
    start: Literal["best", "all"] = "best"
    group_rate: float = Field(0.25, ge=0.01, le=1)
    matrices: Matrices = "independent"
    crossover_rate: float = Field(0.3, ge=0, le=1)
    crossover: Literal["rows", "entries"] = "rows"
    first_parent_rate: float = Field(0.6, ge=0, le=1)
    entry_rate: float = Field(0.25, ge=0, le=1)
    sigma: float = Field(0.065, gt=0)
    normalise: Literal["all", "touched"] = "all"
    normalise_rate: float = Field(0.1, ge=0, le=1)


class TunePhase(PhaseBase):
    """The genomes of dense models: continuous coordinates in units that suit them, and discrete choices.

    Attributes:
        evaluations: individuals of the phase, the initial ones included.
        initial: individuals at the start: those that `init` names, then random ones.
        init: names of baselines of the genome kind, `start`, the method's own, and `random`, which fills the rest in
            any case.
        strategy: for this phase, if not the search's.
        crossover_rate: probability that a child has two parents.
        group_rate: probability that mutation touches a layer (at least one is).
        entry_rate: probability that a coordinate of a touched layer is perturbed.
        sigma: standard deviation of the perturbation.
        swap_rate: probability that a discrete choice of a touched layer is changed.
    """

    kind: Literal["tune"] = "tune"
    initial: int = Field(8, ge=0)
    init: tuple[str, ...] = Field((START, "random"), min_length=1)
    crossover_rate: float = Field(0.3, ge=0, le=1)
    entry_rate: float = Field(0.25, ge=0, le=1)
    sigma: float = Field(0.1, gt=0)
    swap_rate: float = Field(0.02, ge=0, le=1)


class RepairPhase(PhaseBase):
    """How the best of the phases before are repaired: their genomes stay, the recipe varies.

    Not to repair needs no individual of its own: those that the phase starts from are ranked beside its own.

    Attributes:
        evaluations: individuals of the phase, the initial ones included.
        initial: at first so many different ones of the best before it are repaired as `repair` says.
        repair: how; children have other values. Its `tokens` are the most that any takes.
        crossover_rate: probability that a child has two parents: one's genome, the other's recipe.
    """

    kind: Literal["repair"] = "repair"
    initial: int = Field(4, ge=1)
    repair: Annotated[RepairRecipe, BeforeValidator(_by_default)] = RepairRecipe()
    crossover_rate: float = Field(0.25, ge=0, le=1)

    @model_validator(mode="after")
    def _has_no_baselines(self) -> Self:
        if self.named or self.strategy is not None or self.repeats:
            raise ValueError(
                "a repair phase has no `init`, `strategy` or `repeats`: it starts from the phases before it"
            )
        return self


PhaseConfig = PrunePhase | MergePhase | TunePhase | RepairPhase
Phase = Annotated[PhaseConfig, Field(discriminator="kind")]
