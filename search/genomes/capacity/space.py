"""The settings of capacity searches, and candidates as a few numbers with the space of these for one model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import SAME_ACTIVE
from moevolve.search.genomes.capacity.budget import Budget, active_budget, even_width, width_step
from moevolve.search.genomes.contract.arrays import FLOATS, ArrayGenome, Shape
from moevolve.search.genomes.contract.base import MOST_PARTS, Description, Offspring, offspring_of
from moevolve.search.genomes.contract.operators import layer_crossover
from moevolve.search.genomes.contract.phases import CapacityPhase, PhaseConfig
from moevolve.search.genomes.experts.space import ExpertsSection, ExpertsSpace, token_limit
from moevolve.workers.contract.edits import PerTaskMeasurement, combined
from moevolve.workers.contract.facts import ModelFacts, parameters_after
from moevolve.workers.methods.eep.edit import EepEdit, ExpertsMeasurement


class CapacitySection(ExpertsSection):
    """How many experts are kept, how wide they are, and how many are active by layer.

    Attributes:
        experts: See `ExpertsSection`. None searches it, with `neuron_share`: from all n by halves down to the fewest
            that hold the share as wide as original experts. Numbers are left out that keep less than others since
            they don't divide the share evenly.
        mean_active: Mean number of active experts of a layer, instead of `active`: how many each layer has is searched,
            with the same total.
        neuron_share: Share of the model's expert neurons that all kept experts have together; None is n' / n, so that
            kept experts are as wide as original ones.
    """

    random_title: ClassVar[str] = "random capacities"
    kind: Literal["capacity"] = "capacity"
    mean_active: float | None = Field(None, ge=1, le=MOST_PARTS)
    neuron_share: float | None = Field(None, gt=0, le=1)

    @property
    def most_active(self) -> tuple[str, int | None]:
        return super().most_active if self.mean_active is None else ("mean_active", math.ceil(self.mean_active))

    @model_validator(mode="after")
    def _something_is_reduced(self) -> Self:
        if self.experts is None and self.neuron_share is None:
            raise ValueError(
                "experts: give the number of experts to keep per layer, or neuron_share to search that number, too"
            )
        if self.active is not None and self.mean_active is not None:
            raise ValueError("active, mean_active: give active for the same number in all layers, or mean_active")
        if self.dynamic_skipping and self.mean_active is not None:
            raise ValueError(
                "mean_active: dynamic_skipping is defined for 2 active experts in all layers; use active: 2"
            )
        return self


SUMS = "per_task_importance_sums"
"""Name of the calibration's sums of importance, float32 [tasks, layers, n, 3, 3]."""
GRID = (0.0, 1.0, 2.0)
"""Exponents for which the sums of importance are measured."""
# Factor on `tasks` before the exponential, so that the usual step of a number changes a task's weight 2.5 times.
_TASK_SCALE = 3.0
# How much of the most that any number of experts keeps has to be kept by others.
_NEARLY = 0.95
# Divisor of `log2_kept`, so that the usual step of a number often changes how many experts are kept.
_KEPT_SCALE = 3.0
_MOST_EXPONENTS = np.array([GRID[-1], GRID[-1], 1.0])
# Standard deviation of a random candidate's logarithms of active experts, and of thirds of those of tasks' weights.
_LOG_SPREAD = 0.5
# Longer lists of active experts and tasks don't fit into a line of a listing.
_SUMMARY_ACTIVE, _SUMMARY_TASKS = 36, 4


@dataclass(frozen=True, eq=False, repr=False)
class CapacityGenome(ArrayGenome):
    """One candidate. Arrays are float32 and read-only.

    Attributes:
        log_active: Logarithms of the layers' relative numbers of active experts, [layers]; a common offset has no
            effect. [0] unless `CapacitySpace.mean_active` is given.
        log2_kept: A third of the logarithm to base 2 of n / n', rounded to the nearest of `CapacitySpace.counts`; [1].
            [0] if the number n' of kept experts is fixed.
        tasks: A third of the logarithms of the weights of the tasks' calibration tokens in the sums of importance,
            [tasks]; [0] with one task. At 0 all tokens count alike.
        exponents: Exponents of routing weight and output norm, and of the number of tokens by whose power sums are
            divided, [3].
    """

    space: CapacitySpace
    log_active: NDArray[np.float32] = field(metadata=FLOATS)
    log2_kept: NDArray[np.float32] = field(metadata=FLOATS)
    tasks: NDArray[np.float32] = field(metadata=FLOATS)
    exponents: NDArray[np.float32] = field(metadata=FLOATS)

    @property
    def task_weights(self) -> NDArray[np.float64]:
        """Weights of the tasks' calibration tokens, float64 [tasks]; [0] with one task."""
        return np.exp(_TASK_SCALE * np.clip(self.tasks.astype(np.float64), -3, 3))

    @cached_property
    def retained(self) -> int:
        """Number n' of kept experts per layer."""
        if not len(self.log2_kept):
            return self.space.retained
        return min(self.space.counts, key=lambda count: abs(self.space.log2_kept(count) - float(self.log2_kept[0])))

    @property
    def width(self) -> int:
        """Neurons of a kept expert."""
        return self.space.keeping(self.retained).width

    @cached_property
    def active(self) -> tuple[int, ...]:
        """Active experts per token of each layer."""
        space = self.space.keeping(self.retained)
        return space.actives.sizes(self.log_active) if len(self.log_active) else (space.active,) * space.layers

    @property
    def idle_parameters(self) -> int:
        """Parameters of the kept experts that a token doesn't use, in all layers."""
        facts, missing = self.space.facts, self.space.facts.expert_neurons - self.width
        idle = sum(self.retained - active for active in self.active)
        return idle * (facts.expert_parameters - missing * facts.neuron_parameters)

    @cached_property
    def kept(self) -> NDArray[np.int64]:
        """The kept experts of every layer, int64 [layers, n'], sorted."""
        sums = self.space.statistics[SUMS].astype(np.float64)
        weights = self.task_weights if len(self.tasks) else np.ones(1)
        importance = expert_importance(np.tensordot(weights, sums, axes=1), self.exponents)
        return self.space.keeping(self.retained).subsets.best(importance)

    def express(self) -> EepEdit:
        """Return the edit that keeps the most important experts, with their width and the layers' active experts."""
        return self._edit

    @cached_property
    def _edit(self) -> EepEdit:
        space, one_hot = self.space, np.eye(self.space.experts, dtype=np.float32)[self.kept]
        widths = None if self.width == space.facts.expert_neurons else (self.width,) * space.layers
        return EepEdit(one_hot, one_hot, self.active, space.router_space, space.skip_rows, widths)


@dataclass(frozen=True, kw_only=True)
class CapacitySpace(ExpertsSpace[CapacityGenome]):
    """All capacity genomes for one model.

    Attributes:
        mean_active, neuron_share: See `CapacitySection`.
        counts: Numbers of retained experts to choose from, the largest first; () if their number isn't searched.
    """

    kind: ClassVar[str] = "capacity"
    genome_type: ClassVar[type[CapacityGenome]] = CapacityGenome
    phase_kinds: ClassVar[tuple[str, ...]] = ("capacity",)
    mean_active: float | None = None
    neuron_share: float | None = None
    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, section: CapacitySection, facts: ModelFacts) -> CapacitySpace:
        """Make the space of a model.

        Raises:
            UserError: The model doesn't support the settings; the message names the field.
        """
        space = cls.checked(section, facts, mean_active=section.mean_active, neuron_share=section.neuron_share)
        if section.mean_active is not None:
            problem = facts.rule.active_fault(space.retained, 1)
            if problem is not None:
                raise UserError(f"genome.mean_active: 1 active experts of a {facts.family} model {problem}")
            if facts.rule.has_tables:
                raise UserError(f"genome.mean_active ({facts.family} model): {SAME_ACTIVE}")
        if section.experts is None:
            counts = _searched_counts(space, section)
            space = replace(space.keeping(counts[0]), counts=counts)
        elif not space.width:
            step = width_step(facts.expert_neurons, 0)
            raise UserError(
                f"genome.neuron_share: {section.neuron_share} of the neurons are less than {step} for "
                f"each of {space.retained} kept experts per layer; give a larger share, or keep fewer experts"
            )
        tokens = token_limit(section.calibration_tokens)
        importance = PerTaskMeasurement(ExpertsMeasurement(("importance",), None, tokens, section.until(space.fewest)))
        return replace(space, measurement=combined(importance, space.measurement))

    def keeping(self, retained: int) -> CapacitySpace:
        """Return the space of candidates that retain so many experts; a token uses no more than it can choose from."""
        reach = self.facts.rule.groups.reach(retained)
        return replace(self, retained=retained, active=min(self.active, reach))

    @property
    def shapes(self) -> dict[str, Shape]:
        active, kept = self.searched
        tasks = None if self.calibration is None else self.searched_tasks
        sizes = {"log_active": active, "log2_kept": kept, "tasks": tasks, "exponents": 3}
        return {name: (size,) for name, size in sizes.items()}

    @property
    def identity(self) -> tuple[int, int]:
        return self.experts, self.retained

    @property
    def share(self) -> float:
        """Share of the model's expert neurons that candidates keep."""
        return self.retained / self.experts if self.neuron_share is None else self.neuron_share

    @property
    def fewest(self) -> int:
        """Smallest number of experts that a candidate retains."""
        return min(self.counts, default=self.retained)

    @property
    def width(self) -> int:
        """Neurons of a kept expert; 0 if the share is less than one step of widths for each."""
        return even_width(self.share * self.experts / self.retained, self.facts.expert_neurons)

    @property
    def actives(self) -> Budget:
        """The numbers of active experts that layers can have: all the same one if they aren't searched."""
        if self.mean_active is None:
            return Budget(self.layers, self.layers * self.active, self.active)
        return active_budget(self.mean_active, self.retained, self.facts)

    @property
    def kept_share(self) -> float:
        """Share of the model's expert neurons that so many experts keep: at most `share`, since widths have steps."""
        return self.retained * self.width / (self.experts * self.facts.expert_neurons)

    @property
    def saved_neurons(self) -> int:
        """How many neurons narrower than original experts the kept ones are, summed over layers."""
        return self.layers * (self.facts.expert_neurons - self.width)

    @property
    def searched(self) -> tuple[int, int]:
        """How many numbers of a genome divide the active experts, and how many give the number of kept ones."""
        return 0 if self.mean_active is None else self.layers, 1 if len(self.counts) > 1 else 0

    @property
    def searched_tasks(self) -> int:
        """How many numbers of a genome weight tasks: none if there is only one."""
        tasks = len(self.statistics[SUMS])
        return tasks if tasks > 1 else 0

    def log2_kept(self, count: int) -> float:
        """Return `CapacityGenome.log2_kept` of a number of kept experts."""
        return math.log2(self.experts / count) / _KEPT_SCALE

    def sample(self, rng: np.random.Generator, phase: PhaseConfig) -> Offspring[CapacityGenome]:
        """Draw logarithms and weights of tasks from a normal distribution; n' and exponents uniformly."""
        assert isinstance(phase, CapacityPhase)
        active, counts = self.searched
        by_layer = rng.normal(0, _LOG_SPREAD, active)
        tasks = rng.normal(0, _LOG_SPREAD, self.searched_tasks)
        kept = [self.log2_kept(int(rng.choice(self.counts))) for _ in range(counts)]
        vector = np.concatenate([by_layer, kept, tasks, rng.uniform(0, _MOST_EXPONENTS)])
        return Offspring(self.unflatten(vector, phase), "random", ())

    def breed(
        self, rng: np.random.Generator, phase: PhaseConfig, parents: tuple[CapacityGenome, ...]
    ) -> Offspring[CapacityGenome]:
        """Cross two parents number by number, then change numbers by Gaussian steps; at least one changes.

        Since active experts have a fixed total, a layer that gains takes from all others.
        """
        assert isinstance(phase, CapacityPhase)
        first, last = (self.flatten(parent, phase) for parent in (parents[0], parents[-1]))
        vector = np.where(layer_crossover(rng, len(first)), last, first)
        hit = rng.random(len(vector)) < phase.entry_rate
        hit[rng.integers(len(vector))] |= not hit.any()
        vector = vector + hit * rng.normal(0, phase.sigma, len(vector))
        return offspring_of(self.unflatten(vector, phase), parents)

    def unflatten(self, vector: NDArray[np.float64], phase: PhaseConfig) -> CapacityGenome:
        """Invert `flatten`; numbers are clipped."""
        made = super().unflatten(vector, phase)
        kept = np.clip(made.log2_kept, self.log2_kept(self.retained), self.log2_kept(self.fewest))
        return replace(made, log2_kept=kept, exponents=np.clip(made.exponents, 0, _MOST_EXPONENTS))

    def describe(self, genome: CapacityGenome) -> Description:
        space = self.keeping(genome.retained)
        parameters, _ = space.parameters(space.unchanged)
        return Description(
            experts=space.retained,
            active=space.active,
            parameters=parameters,
            active_parameters=parameters - genome.idle_parameters,
            parameters_full=self.facts.parameters,
            active_parameters_full=self.facts.active_parameters,
            summary=self._summary(genome),
            stock=len(set(genome.active)) == 1 and not self.native(one_hot=True),
        )

    def parameters(self, identity: bool = False) -> tuple[int, int]:
        """Return the parameters of a candidate's model, and those that a token uses in layers of the mean capacity."""
        facts, saved = self.facts, self.saved_neurons * self.facts.neuron_parameters
        native = self.native(one_hot=True) and not identity
        parameters = parameters_after(facts, self.retained, native) - self.retained * saved
        idle = self.retained - self.actives.mean
        return parameters, parameters - round(idle * (self.layers * facts.expert_parameters - saved))

    def _summary(self, genome: CapacityGenome) -> str:
        """Width, active experts, exponents of importance, and relative weights of the tasks, if they are few."""
        parts = [f"keep {genome.retained} of {self.experts}"]
        if genome.width != self.facts.expert_neurons:
            parts.append(f"width {genome.width}")
        if len(genome.log_active):
            few = len(genome.active) <= _SUMMARY_ACTIVE
            shown = " ".join(map(str, genome.active)) if few else f"{min(genome.active)} to {max(genome.active)}"
            parts.append(f"active {shown}")
        parts.append("importance " + "/".join(f"{each:.2g}" for each in genome.exponents))
        if 0 < len(genome.tasks) <= _SUMMARY_TASKS:
            parts.append("tasks " + "/".join(f"{each:.2g}" for each in genome.task_weights / genome.task_weights.max()))
        return ", ".join(parts)


def _searched_counts(space: CapacitySpace, section: CapacitySection) -> tuple[int, ...]:
    """Halve n as long as the kept experts hold the share of neurons, and each has one step of width at least.

    Numbers that keep clearly less of the share than another does are left out.

    Raises:
        UserError: The model's family can't route to any of these numbers of experts.
    """
    rule, least = space.facts.rule, max(1.0, space.share * space.experts)
    halves = (space.experts >> times for times in range(space.experts.bit_length()))
    routable = [space.keeping(each) for each in halves if each >= least and not rule.groups.fault(each)]
    _, setting = section.most_active
    found = [each for each in routable if not rule.active_fault(each.retained, setting or each.active) and each.width]
    if not found:
        raise UserError(
            f"genome.neuron_share: {space.share} of the neurons can't be divided among {space.experts} experts, nor "
            "among half as many, and so on; give a larger share, or the number of kept experts (genome.experts)"
        )
    enough = _NEARLY * max(each.kept_share for each in found)
    return tuple(each.retained for each in found if each.kept_share >= enough)


def expert_importance(sums: NDArray[np.floating], exponents: NDArray[np.floating]) -> NDArray[np.float64]:
    """Compute the importance of experts: `sum over tokens of g^a |f|^b`, divided by `tokens^c`.

    Here g is the routing weight of an expert for a token that chose it, and |f| the norm of the expert's output.
    Between the exponents of `GRID` the logarithms of sums are interpolated linearly, which is exact if g and |f| are
    the same for all tokens.

    From sums over tokens [layers, n, a, b] for the exponents of `GRID`, and a, b and c: float64 [layers, n], 0 for
    experts that no token chose.
    """
    a, b, c = (float(each) for each in np.clip(exponents, GRID[0], GRID[-1]))
    logs = np.log(np.maximum(sums.astype(np.float64), np.finfo(np.float32).tiny))
    first, second = (min(int(each), len(GRID) - 2) for each in (a, b))
    across, down = a - first, b - second
    corners = logs[:, :, first : first + 2, second : second + 2]
    mixed = (1 - across) * corners[:, :, 0] + across * corners[:, :, 1]
    values = (1 - down) * mixed[..., 0] + down * mixed[..., 1] - c * logs[:, :, 0, 0]
    return np.where(sums[:, :, 0, 0] > 0, np.exp(values), 0.0)
