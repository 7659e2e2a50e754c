"""The settings of EEP searches and the space of EEP genomes for one model.

Source: Efficient Expert Pruning (arXiv 2407.00945), Sec. 4.2 (parameter space), Sec. 4.3 and App. C (operators),
App. A.1 (groups).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import NO_SCORES, NO_SKIPPING, SAME_ACTIVE
from moevolve.search.genomes.contract.base import (
    MOST_PARTS,
    MOST_STEPS,
    MOST_TOKENS,
    Description,
    GenomeSection,
    Offspring,
    offspring_of,
)
from moevolve.search.genomes.contract.operators import (
    gaussian_noise,
    matrix_crossover,
    normalise_rows,
    select_matrices,
)
from moevolve.search.genomes.contract.phases import AllocatePhase, MergePhase, PhaseConfig, PrunePhase
from moevolve.search.genomes.eep.allocation import MAGIC as ALLOCATION_MAGIC
from moevolve.search.genomes.eep.allocation import (
    ActiveBudget,
    AllocationGenome,
    WidthBudget,
    allocation_from_bytes,
    as_allocation,
    breed_allocation,
    from_vector,
    sample_allocation,
)
from moevolve.search.genomes.eep.genome import HEADER, MAGIC, EepGenome
from moevolve.search.genomes.eep.subsets import Subsets, mean_shares
from moevolve.workers.contract.edits import ALL_TOKENS, Calibration, CalibrationRecipe
from moevolve.workers.contract.facts import ModelFacts, parameters_after
from moevolve.workers.contract.fitting import FitRows, RowsRecipe
from moevolve.workers.methods.eep.edit import RouterSpace

Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)] | Literal["all"]
"""Number of tokens of the `calibration` rows: whole prompts up to that many, or all prompts."""


def token_limit(tokens: Tokens) -> int:
    """Return the limit on tokens that a setting stands for."""
    return ALL_TOKENS if tokens == "all" else tokens


class EepSection(GenomeSection):
    """The EEP genome: a router mapping and an expert merging matrix per group of layers.

    Attributes:
        experts: Number of retained experts n' per MoE layer; equally many per routing group if the family has these.
            None searches it in allocate phases, with `neuron_share`: from all n by halves down to the fewest that hold
            the share as wide as original experts.
        active: Number of active experts k per token; None keeps the model's, or the most that a token can choose from.
        mean_active: Mean number of active experts of a layer, instead of `active`: allocate phases search how many each
            layer has, with the same total.
        groups: Number of equal contiguous groups of layers that share coefficients, or `per_layer`.
        neuron_share: Share of the model's expert neurons that all kept experts have together, in allocate phases; None
            is n' / n, so that kept experts are as wide as original ones on average.
        router_space: Space that the router mapping acts on: `probs` (the paper) or `logits`.
        dynamic_skipping: Skip a token's second expert if the ratio of its routing weight to the
            first one's is below the layer's median (NAEE, arXiv 2402.14800, Sec. 3.3); needs k = 2.
        skipping_tokens: Number of calibration tokens for these medians, which are measured for every candidate, or
            `all`.
        calibration_tokens: Number of calibration tokens on which experts are measured, or `all`.
        calibration_loss: Scores that are sums over tokens, which need no more memory, are measured on twice as many
            tokens again and again until the expected loss by their errors is at most this in every layer, as a share
            of the kept experts' scores (`moevolve.workers.methods.eep.accuracy`); or until
        calibration_most: so many tokens are reached, or the `calibration` rows end.
        naee_tokens: Largest number of these tokens, evenly spaced, on which the baseline `naee` compares subsets. It
            keeps n^2 numbers per token and layer, up to 4 GiB of host memory.
        naee_subsets: Largest number of subsets that `naee` tries; if there are more, it drops experts greedily.
    """

    random_title: ClassVar[str] = "random pruning"
    count_format: ClassVar[str] = "{experts} retained, {active} active"
    kind: Literal["eep"] = "eep"
    experts: int | None = Field(None, ge=1, le=MOST_PARTS)
    active: int | None = Field(None, ge=1, le=MOST_PARTS)
    mean_active: float | None = Field(None, ge=1, le=MOST_PARTS)
    groups: Annotated[int, Field(ge=1, le=MOST_PARTS)] | Literal["per_layer"] = 4
    neuron_share: float | None = Field(None, gt=0, le=1)
    router_space: Literal["probs", "logits"] = "probs"
    dynamic_skipping: bool = False
    skipping_tokens: Tokens = 2048
    calibration_tokens: Tokens = 8192
    calibration_loss: float = Field(0.002, ge=0, le=1)
    calibration_most: Tokens = 131072
    naee_tokens: int = Field(1024, ge=1, le=MOST_TOKENS)
    naee_subsets: int = Field(5000, ge=0, le=MOST_STEPS)

    @model_validator(mode="after")
    def _something_is_pruned(self) -> Self:
        if self.experts is None and self.neuron_share is None:
            raise ValueError(
                "experts: give the number of experts to keep per layer, or neuron_share to search that number, too"
            )
        for name, active in (("active", self.active), ("mean_active", self.mean_active)):
            if active is not None and self.experts is not None and active > self.experts:
                raise ValueError(f"{name} {active} is more than the {self.experts} retained experts")
        if self.active is not None and self.mean_active is not None:
            raise ValueError("active, mean_active: give active for the same number in all layers, or mean_active")
        if self.dynamic_skipping and self.mean_active is not None:
            raise ValueError(
                "mean_active: dynamic_skipping is defined for 2 active experts in all layers; use active: 2"
            )
        return self


MEAN_SCORES = {"reap": (1, 1), "man": (0, 1), "msan": (0, 2)}
"""Exponents of routing weight and output norm in scores that are means of their products over an expert's tokens."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_SUMMARY_DIGITS = 72
_SUMMARY_WIDTHS = 8
_SUMMARY_TASKS = 4
# Positions of the two matrices in stacked arrays.
_MAPPING, _MERGING = 0, 1


@dataclass(frozen=True)
class EepSpace:
    """All EEP genomes for one model.

    Attributes:
        experts: Number of original experts n per MoE layer.
        retained: Number of retained experts n' per MoE layer; the largest one if it is searched.
        active: Number of active experts k per token after the edit; the largest one if n' is searched, and the mean
            rounded up if layers may differ.
        layer_groups: Index of every MoE layer's group, in order of depth.
        router_space: See `EepSection`.
        facts: Sizes and family of the model.
        dynamic_skipping: See `EepSection`.
        mean_active, neuron_share: See `EepSection`.
        counts: Numbers of retained experts to choose from, the largest first; () if their number isn't searched.
        recipe: Measurements for dynamic skipping and for baselines; None if there are none.
        calibration: Results of these measurements; None before calibration.
    """

    kind: ClassVar[str] = "eep"
    phase_kinds: ClassVar[tuple[str, ...]] = ("prune", "merge", "allocate")
    experts: int
    retained: int
    active: int
    layer_groups: tuple[int, ...]
    router_space: RouterSpace
    facts: ModelFacts = field(repr=False)
    dynamic_skipping: bool = False
    mean_active: float | None = None
    neuron_share: float | None = None
    counts: tuple[int, ...] = ()
    recipe: CalibrationRecipe | None = None
    calibration: Calibration | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, section: EepSection, facts: ModelFacts) -> EepSpace:
        """Make the space of a model.

        Raises:
            UserError: The model doesn't support the settings; the message names the field.
        """
        layers = len(facts.moe_layers)
        if not layers:
            raise UserError(f"genome.kind: eep needs MoE layers, and this model ({facts.family}) is dense")
        retained = facts.experts if section.experts is None else section.experts
        if retained > facts.experts:
            raise UserError(f"genome.experts: {retained} is more than the model's {facts.experts} experts")
        reachable = _check_family(section, retained, facts)
        active = min(_asked_active(section) or facts.active, reachable)
        groups = layers if section.groups == "per_layer" else section.groups
        if groups > layers:
            raise UserError(f"genome.groups: {groups} is more than the model's {layers} MoE layers")
        layer_groups = tuple(layer * groups // layers for layer in range(layers))
        if section.dynamic_skipping and active != 2:
            raise UserError(f"genome.dynamic_skipping: it is defined for 2 active experts per token, not {active}")
        skips = section.dynamic_skipping
        recipe = RowsRecipe(token_limit(section.skipping_tokens), "skipping") if skips else None
        space = cls(
            experts=facts.experts,
            retained=retained,
            active=active,
            layer_groups=layer_groups,
            router_space=section.router_space,
            facts=facts,
            dynamic_skipping=skips,
            mean_active=section.mean_active,
            neuron_share=section.neuron_share,
            recipe=recipe,
        )
        if section.experts is None:
            counts = _searched_counts(space, section)
            return replace(space.keeping(counts[0]), counts=counts)
        budget = WidthBudget.of(space)
        if not budget.fits:
            raise UserError(
                f"genome.neuron_share: {section.neuron_share} of the neurons are less than {budget.step} for each of "
                f"{retained} kept experts per layer; give a larger share, or keep fewer experts"
            )
        return space

    def keeping(self, retained: int) -> EepSpace:
        """Return the space of candidates that retain so many experts; a token uses no more than it can choose from."""
        reach = self.facts.rule.groups.reach(retained)
        return replace(self, retained=retained, active=min(self.active, reach))

    @property
    def groups(self) -> int:
        return self.layer_groups[-1] + 1

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return len(self.layer_groups)

    @property
    def share(self) -> float:
        """Share of the model's expert neurons that candidates of allocate phases keep."""
        return self.retained / self.experts if self.neuron_share is None else self.neuron_share

    @property
    def fewest(self) -> int:
        """Smallest number of experts that a candidate retains."""
        return min(self.counts, default=self.retained)

    @property
    def saved_neurons(self) -> int:
        """How many neurons narrower than original experts the kept ones are, summed over layers; 0 without a share."""
        whole = self.layers * self.facts.expert_neurons
        return 0 if self.neuron_share is None else whole - WidthBudget.of(self).neurons

    @property
    def subsets(self) -> Subsets:
        """The subsets of experts that the prune phase searches."""
        return Subsets(self.experts, self.retained, self.facts.rule.groups.count)

    def from_kept(self, kept: NDArray[np.int64]) -> EepGenome:
        """Return the pruning genome that retains `kept`, int64 [groups, n'].

        Experts are distinct in a row, and if the model has routing groups, sorted with equally many of each.
        """
        one_hot = np.eye(self.experts, dtype=np.float32)[kept]
        return EepGenome(self, one_hot, one_hot)

    def kept(self, genome: EepGenome) -> NDArray[np.int64]:
        """Return the experts that a pruning genome retains, int64 [groups, n'], sorted."""
        return np.sort(genome.expert_merging.argmax(axis=2), axis=1).astype(np.int64)

    def calibrated(self, calibration: Calibration) -> EepSpace:
        return replace(self, calibration=calibration)

    @property
    def statistics(self) -> dict[str, NDArray[Any]]:
        assert self.calibration is not None, "the space isn't calibrated"
        return dict(self.calibration.arrays)

    def mean_score(self, name: str) -> NDArray[np.float64]:
        """One of `MEAN_SCORES`, by layer: float64 [layers, n], 0 for experts that no token chose."""
        sums: NDArray[np.float64] = self.statistics["importance_sums"]
        return sums[:, :, *MEAN_SCORES[name]] / np.maximum(sums[:, :, 0, 0], 1)

    @cached_property
    def skip_rows(self) -> FitRows | None:
        """Calibration rows for the thresholds of dynamic skipping; None without dynamic skipping."""
        return FitRows.of(self.statistics, "skipping") if self.dynamic_skipping else None

    def start(self, phase: PhaseConfig) -> None:
        return None

    def sample(self, rng: np.random.Generator, phase: PhaseConfig) -> Offspring[Any]:
        if isinstance(phase, AllocatePhase):
            return sample_allocation(rng, self, phase)
        kept = self.subsets.sample(rng, self.groups)
        operator = "random" if self.retained < self.experts else "identity"
        return Offspring(self.from_kept(kept), operator, ())

    def breed(self, rng: np.random.Generator, phase: PhaseConfig, parents: tuple[Any, ...]) -> Offspring[Any]:
        if isinstance(phase, AllocatePhase):
            return breed_allocation(rng, phase, parents)
        if isinstance(phase, PrunePhase):
            return offspring_of(self._breed_pruning(rng, phase, parents), parents)
        assert isinstance(phase, MergePhase)
        return offspring_of(self._breed_merging(rng, phase, parents), parents)

    def _breed_pruning(self, rng: np.random.Generator, phase: PrunePhase, parents: tuple[EepGenome, ...]) -> EepGenome:
        sets = [self.kept(parent) for parent in parents]
        child = sets[0].copy()
        if len(sets) == 2:
            child = np.stack([self.subsets.crossover(rng, one, two) for one, two in zip(*sets, strict=True)])
        mutated = select_matrices(rng, (2, self.groups), phase.group_rate)
        for group in np.flatnonzero(mutated[_MERGING]):
            child[group] = self.subsets.mutate(rng, child[group], phase.row_rate)
        return self.from_kept(child)

    def _breed_merging(self, rng: np.random.Generator, phase: MergePhase, parents: tuple[EepGenome, ...]) -> EepGenome:
        both = [np.stack([parent.router_mapping, parent.expert_merging]) for parent in parents]
        child, mutated = both[0].copy(), select_matrices(rng, (2, self.groups), phase.group_rate)
        for index in np.ndindex(mutated.shape):
            if len(both) == 2:
                units = phase.crossover if mutated[index] else "whole"
                child[index] = matrix_crossover(rng, both[0][index], both[1][index], phase.first_parent_rate, units)
            if mutated[index]:
                child[index] = gaussian_noise(rng, child[index], phase.entry_rate, phase.sigma)
        if rng.random() < phase.normalise_rate:
            for group in range(self.groups):
                child[_MERGING, group] = normalise_rows(child[_MERGING, group])
        return EepGenome(self, child[_MAPPING], child[_MERGING])

    def from_bytes(self, data: bytes) -> EepGenome | AllocationGenome:
        if data.startswith(ALLOCATION_MAGIC):
            return allocation_from_bytes(self, data)
        magic, *shape = HEADER.unpack_from(data) if len(data) >= HEADER.size else (b"", 0, 0, 0)
        size = int(np.prod(shape))
        if magic != MAGIC or len(data) != HEADER.size + 8 * size:
            raise ValueError("these bytes are no EEP genome")
        values = np.frombuffer(data, dtype="<f4", offset=HEADER.size).reshape(2, *shape)
        return EepGenome(self, values[0], values[1])

    def selects_subset(self, phase: PhaseConfig) -> bool:
        """See `SubsetSpace`: genomes of the prune phase are subsets of the experts of every group."""
        return isinstance(phase, PrunePhase)

    def importance(self, phase: PhaseConfig) -> NDArray[np.float64]:
        """See `SubsetSpace`: how often experts are chosen, `MEAN_SCORES`, and HOPE's, summed over an expert's pairs.

        Each is a share of its layer's sum, averaged over the layers of a group. There are rows for what was measured.
        """
        measured = {} if self.calibration is None else self.statistics
        scores = [measured["counts"]] if "counts" in measured else []
        scores += map(self.mean_score, MEAN_SCORES) if "importance_sums" in measured else ()
        scores += [measured["pair_norms"].sum(axis=2)] if "pair_norms" in measured else []
        rows = [mean_shares(each, self.layer_groups).ravel() for each in scores]
        return np.array(rows, dtype=np.float64).reshape(len(rows), self.groups * self.experts)

    def flatten(self, genome: Any, phase: PhaseConfig) -> NDArray[np.float64]:
        """Prune phase: 1 for retained experts, else 0, [groups * n]. Merge phase: the entries of both tensors.

        Allocate phase: see `AllocationGenome.vector`.
        """
        if isinstance(phase, AllocatePhase):
            return as_allocation(genome, phase).vector
        if isinstance(phase, PrunePhase):
            return genome.expert_merging.sum(axis=1).astype(np.float64).ravel()
        both = np.concatenate([genome.router_mapping.ravel(), genome.expert_merging.ravel()])
        return both.astype(np.float64)

    def unflatten(self, vector: NDArray[np.float64], phase: PhaseConfig) -> EepGenome | AllocationGenome:
        """Prune phase: keep the experts with the highest scores of every group. Merge phase: take the entries."""
        if isinstance(phase, AllocatePhase):
            return from_vector(self, vector, phase)
        if isinstance(phase, PrunePhase):
            return self.from_kept(self.subsets.best(vector.reshape(self.groups, self.experts)))
        halves = vector.astype(np.float32).reshape(2, self.groups, self.retained, self.experts)
        return EepGenome(self, halves[0], halves[1])

    def describe(self, genome: EepGenome | AllocationGenome) -> Description:
        if isinstance(genome, AllocationGenome):
            summary = self._summary_of_allocation(genome)
            pruned = genome.pruned.space.describe(genome.pruned)
            return replace(pruned, active_parameters=pruned.parameters - genome.idle_parameters, summary=summary)
        if genome.one_hot:
            summary = self._summary_of_pruning(genome)
        else:
            off = float(np.abs(genome.expert_merging - np.round(genome.expert_merging)).mean())
            summary = f"merge {self.experts}->{self.retained}, {self.groups} groups, mean |dW| {off:.3f}"
        if self.dynamic_skipping:
            summary += ", the second of 2 skipped at times"
        parameters, used = self.parameters(genome.one_hot_mapping, genome.is_identity)
        return Description(
            experts=self.retained,
            active=self.active,
            parameters=parameters,
            active_parameters=used,
            parameters_full=self.facts.parameters,
            summary=summary,
        )

    def parameters(self, one_hot: bool, identity: bool = False) -> tuple[int, int]:
        """Return the parameters of a candidate's model, and those that a token uses.

        With `neuron_share` and `mean_active` the active ones are those of layers of the mean width and the mean number
        of active experts. `one_hot` says whether every row of the router mapping is.
        """
        # A mapping that can't be folded into a smaller router is kept in addition to the whole router.
        folds = self.router_space == "logits" or (self.facts.rule.one_hot_folds and one_hot) or identity
        facts, saved = self.facts, self.saved_neurons * self.facts.neuron_parameters
        parameters = parameters_after(facts, self.retained, native=not folds) - self.retained * saved
        idle = self.retained - ActiveBudget.of(self).mean
        return parameters, parameters - round(idle * (self.layers * facts.expert_parameters - saved))

    def _summary_of_allocation(self, genome: AllocationGenome) -> str:
        """Widths, exponents of importance, and relative weights of the tasks, as far as they are searched and few."""
        parts = [f"keep {genome.retained} of {self.experts}"]
        if len(genome.capacities):
            parts.append(f"widths {_listed(genome.widths, _SUMMARY_WIDTHS)}")
        if len(genome.activity):
            parts.append(f"active {_listed(genome.active, _SUMMARY_DIGITS // 2)}")
        parts.append("importance " + "/".join(f"{each:.2g}" for each in genome.exponents))
        if 0 < len(genome.tasks) <= _SUMMARY_TASKS:
            parts.append("tasks " + "/".join(f"{each:.2g}" for each in genome.task_weights / genome.task_weights.max()))
        return ", ".join(parts)

    def _summary_of_pruning(self, genome: EepGenome) -> str:
        """The retained experts of every group, one digit each, or only their number if that gets too long."""
        if self.experts > len(_DIGITS) or self.groups * (self.retained + 1) > _SUMMARY_DIGITS:
            return f"keep {self.retained} of {self.experts}, {self.groups} groups"
        return "keep " + " ".join("".join(_DIGITS[expert] for expert in row) for row in self.kept(genome))


def _listed(numbers: Sequence[int], most: int) -> str:
    """All numbers of layers if there are at most `most`, or else their range."""
    return " ".join(map(str, numbers)) if len(numbers) <= most else f"{min(numbers)} to {max(numbers)}"


def _searched_counts(space: EepSpace, section: EepSection) -> tuple[int, ...]:
    """Halve n as long as the kept experts hold the share of neurons, and each has one step of width at least.

    Raises:
        UserError: The model's family can't route to any of these numbers of experts.
    """
    rule, least = space.facts.rule, max(1.0, space.share * space.experts)
    halves = (space.experts >> times for times in range(space.experts.bit_length()))
    routable = [space.keeping(each) for each in halves if each >= least and not rule.groups.fault(each)]
    counts = tuple(
        each.retained
        for each in routable
        if not rule.active_fault(each.retained, _asked_active(section) or each.active) and WidthBudget.of(each).fits
    )
    if not counts:
        raise UserError(
            f"genome.neuron_share: {space.share} of the neurons can't be divided among {space.experts} experts, nor "
            "among half as many, and so on; give a larger share, or the number of kept experts (genome.experts)"
        )
    return counts


def _asked_active(section: EepSection) -> int | None:
    """The number of active experts that settings give, of the mean over layers rounded up; None if they give none."""
    return section.active if section.mean_active is None else ceil(section.mean_active)


def _check_family(section: EepSection, retained: int, facts: ModelFacts) -> int:
    """Check the settings against the model's family, and return how many of the kept experts a token can choose from.

    Raises:
        UserError: The model's family doesn't support the settings.
    """
    groups = facts.rule.groups
    problem = groups.fault(retained)
    if problem is not None:
        raise UserError(f"genome.experts: {retained} experts of a {facts.family} model {problem}")
    active = _asked_active(section) or min(facts.active, facts.rule.groups.reach(retained))
    name, numbers = ("active", (active,)) if section.mean_active is None else ("mean_active", (1, active))
    for number in numbers:
        problem = facts.rule.active_fault(retained, number)
        if problem is not None:
            raise UserError(f"genome.{name}: {number} active experts of a {facts.family} model {problem}")
    if not facts.rule.has_scores and section.router_space == "probs":
        raise UserError(f"genome.router_space ({facts.family} model): {NO_SCORES}")
    if facts.rule.has_tables and section.mean_active is not None:
        raise UserError(f"genome.mean_active ({facts.family} model): {SAME_ACTIVE}")
    if not facts.rule.can_skip and section.dynamic_skipping:
        raise UserError(f"genome.dynamic_skipping ({facts.family} model): {NO_SKIPPING}")
    return facts.rule.groups.reach(retained)
