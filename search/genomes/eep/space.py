"""The space of EEP genomes for one model: what is drawn, bred, described, and brought back from bytes.

Source: Efficient Expert Pruning (arXiv 2407.00945), Sec. 4.2 (parameter space), Sec. 4.3 and App. C (operators),
App. A.1 (groups).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import NO_SCORES
from moevolve.search.genomes.contract.base import Description, Offspring, bred
from moevolve.search.genomes.contract.operators import (
    gaussian_noise,
    matrix_crossover,
    normalise_rows,
    select_groups,
    select_matrices,
)
from moevolve.search.genomes.eep.genome import HEADER, MAGIC, EepGenome
from moevolve.search.genomes.eep.section import EepSection, limit_of
from moevolve.search.genomes.eep.subsets import Subsets
from moevolve.search.settings.phases import MergePhase, PhaseConfig, PrunePhase
from moevolve.workers.contract.edits import Calibration, CalibrationRecipe
from moevolve.workers.contract.facts import ModelFacts, active_parameters, parameters_after
from moevolve.workers.contract.fitting import FitRows, RowsRecipe
from moevolve.workers.methods.eep.edit import RouterSpace

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_SUMMARY_DIGITS = 72
_MAPPING, _MERGING = 0, 1


@dataclass(frozen=True)
class EepSpace:
    """All EEP genomes for one model.

    Attributes:
        experts: experts n per MoE layer.
        retained: retained experts n'.
        active: experts per token k after the edit.
        layer_groups: group of every MoE layer, in order of depth.
        router_space: see `EepEdit`.
        facts: the model, for accounting.
        dynamic_skipping: whether candidates skip a token's second expert; see `EepSection`.
        recipe: what must be measured for that, and for baselines.
        calibration: what was measured.
    """

    kind: ClassVar[str] = "eep"
    experts: int
    retained: int
    active: int
    layer_groups: tuple[int, ...]
    router_space: RouterSpace
    facts: ModelFacts = field(repr=False)
    dynamic_skipping: bool = False
    recipe: CalibrationRecipe | None = None
    calibration: Calibration | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, section: EepSection, facts: ModelFacts) -> EepSpace:
        """Build the space of a configuration for a model.

        Raises:
            UserError: n' > n, k > n', more groups than MoE layers, or what the model's family can't express; the
                message names the field.
        """
        layers = len(facts.moe_layers)
        if not layers:
            raise UserError(f"genome.kind: eep needs MoE layers, and this model ({facts.family}) is dense")
        if section.experts > facts.experts:
            raise UserError(f"genome.experts: {section.experts} is more than the model's {facts.experts} experts")
        reach = _check_family(section, facts)
        active = section.active if section.active is not None else min(facts.active, reach)
        groups = layers if section.groups == "per_layer" else section.groups
        if groups > layers:
            raise UserError(f"genome.groups: {groups} is more than the model's {layers} MoE layers")
        layer_groups = tuple(layer * groups // layers for layer in range(layers))
        if section.dynamic_skipping and active != 2:
            raise UserError(f"genome.dynamic_skipping: it is defined for 2 active experts per token, not {active}")
        skips = section.dynamic_skipping
        recipe = RowsRecipe(limit_of(section.skipping_tokens), "skipping") if skips else None
        return cls(facts.experts, section.experts, active, layer_groups, section.router_space, facts, skips, recipe)

    @property
    def groups(self) -> int:
        return self.layer_groups[-1] + 1

    @property
    def subsets(self) -> Subsets:
        """What the prune phase chooses from."""
        return Subsets(self.experts, self.retained, self.facts.rule.groups.count)

    def from_kept(self, kept: NDArray[np.int64]) -> EepGenome:
        """The pruning genome that retains `kept`: int64 [groups, n'], distinct per row.

        Raises:
            ValueError: the model has routing groups, and `kept` does not keep as many experts of each, in order.
        """
        if self.subsets.parts > 1 and not self.subsets.holds(kept):
            raise ValueError(f"{self.facts.family} needs as many experts kept in each of {self.subsets.parts} groups")
        one_hot = np.eye(self.experts, dtype=np.float32)[kept]
        return EepGenome(self, one_hot, one_hot)

    def kept(self, genome: EepGenome) -> NDArray[np.int64]:
        """The experts a pruning genome retains: int64 [groups, n'], sorted."""
        return np.sort(genome.expert_merging.argmax(axis=2), axis=1).astype(np.int64)

    @property
    def phase_kinds(self) -> tuple[str, ...]:
        return "prune", "merge"

    def calibrated(self, calibration: Calibration) -> EepSpace:
        return replace(self, calibration=calibration)

    @property
    def measured(self) -> dict[str, NDArray[Any]]:
        """The calibration's arrays."""
        assert self.calibration is not None, "the space has to be calibrated before this is known"
        return dict(self.calibration.arrays)

    @cached_property
    def skip_rows(self) -> FitRows | None:
        """What thresholds of dynamic skipping are measured on; None without."""
        return FitRows.of(self.measured, "skipping") if self.dynamic_skipping else None

    def start(self, phase: PhaseConfig) -> None:
        return None

    def sample(self, rng: np.random.Generator, phase: PhaseConfig) -> Offspring[EepGenome]:
        kept = self.subsets.sample(rng, self.groups)
        operator = "random" if self.retained < self.experts else "identity"
        return Offspring(self.from_kept(kept), operator, ())

    def breed(
        self, rng: np.random.Generator, phase: PhaseConfig, parents: tuple[EepGenome, ...]
    ) -> Offspring[EepGenome]:
        if isinstance(phase, PrunePhase):
            return bred(self._breed_pruning(rng, phase, parents), parents)
        assert isinstance(phase, MergePhase)
        return bred(self._breed_merging(rng, phase, parents), parents)

    def _breed_pruning(self, rng: np.random.Generator, phase: PrunePhase, parents: tuple[EepGenome, ...]) -> EepGenome:
        sets = [self.kept(parent) for parent in parents]
        child = sets[0].copy()
        if len(sets) == 2:
            child = np.stack([self.subsets.cross(rng, one, two) for one, two in zip(*sets, strict=True)])
        rate, forced = phase.row_rate, phase.force_change
        for group in np.flatnonzero(self._touched(rng, phase)[_MERGING]):
            child[group] = self.subsets.mutate(rng, child[group], rate, redraw=phase.redraw, at_least_one=forced)
        return self.from_kept(child)

    def _breed_merging(self, rng: np.random.Generator, phase: MergePhase, parents: tuple[EepGenome, ...]) -> EepGenome:
        both = [np.stack([parent.router_mapping, parent.expert_merging]) for parent in parents]
        child, touched = both[0].copy(), self._touched(rng, phase)
        for place in np.ndindex(touched.shape):
            if len(both) == 2:
                units = phase.crossover if touched[place] else "whole"
                child[place] = matrix_crossover(rng, both[0][place], both[1][place], phase.first_parent_rate, units)
            if touched[place]:
                child[place] = gaussian_noise(rng, child[place], phase.entry_rate, phase.sigma)
        for groups in (range(self.groups),) if phase.normalise == "all" else np.argwhere(touched[_MERGING]):
            if rng.random() < phase.normalise_rate:
                for group in groups:
                    child[_MERGING, group] = normalise_rows(child[_MERGING, group])
        return EepGenome(self, child[_MAPPING], child[_MERGING])

    def _touched(self, rng: np.random.Generator, phase: PrunePhase | MergePhase) -> NDArray[np.bool_]:
        """Which groups' matrices a mutation touches: bool [2, groups], by `_MAPPING` and `_MERGING`."""
        if phase.matrices == "independent":
            return select_matrices(rng, (2, self.groups), phase.group_rate)
        touched = np.zeros((2, self.groups), dtype=np.bool_)
        touched[:, select_groups(rng, self.groups, phase.group_rate)] = True
        return touched

    def from_bytes(self, data: bytes) -> EepGenome:
        magic, *shape = HEADER.unpack_from(data) if len(data) >= HEADER.size else (b"", 0, 0, 0)
        size = int(np.prod(shape))
        if magic != MAGIC or len(data) != HEADER.size + 8 * size:
            raise ValueError("these bytes are no EEP genome")
        values = np.frombuffer(data, dtype="<f4", offset=HEADER.size).reshape(2, *shape)
        return EepGenome(self, values[0], values[1])

    def chooses(self, phase: PhaseConfig) -> bool:
        """The prune phase chooses experts of every group."""
        return isinstance(phase, PrunePhase)

    def flatten(self, genome: EepGenome, phase: PhaseConfig) -> NDArray[np.float64]:
        """Prune: expert scores [groups * n], 1 for retained ones, else 0. Merge: both tensors' entries in order."""
        if isinstance(phase, PrunePhase):
            return genome.expert_merging.sum(axis=1).astype(np.float64).ravel()
        both = np.concatenate([genome.router_mapping.ravel(), genome.expert_merging.ravel()])
        return both.astype(np.float64)

    def unflatten(self, vector: NDArray[np.float64], phase: PhaseConfig) -> EepGenome:
        """Prune: the highest scores of every group are retained, as `Subsets.best` has it. Merge: the entries."""
        if isinstance(phase, PrunePhase):
            return self.from_kept(self.subsets.best(vector.reshape(self.groups, self.experts)))
        halves = vector.astype(np.float32).reshape(2, self.groups, self.retained, self.experts)
        return EepGenome(self, halves[0], halves[1])

    def describe(self, genome: EepGenome) -> Description:
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
        """Parameters of a candidate's model, and of these what a token passes through.

        A mapping that isn't folded into a smaller router stands beside the whole one.

        Args:
            one_hot: whether every row of its router mapping is one-hot.
            identity: whether it is the unedited model.
        """
        folds = self.router_space == "logits" or (self.facts.rule.one_hot_folds and one_hot) or identity
        sizes = self.facts, self.retained
        used = active_parameters(*sizes, self.active, native=not folds)
        return parameters_after(*sizes, native=not folds), used

    def _summary_of_pruning(self, genome: EepGenome) -> str:
        """The retained experts of every group, one digit each; only their number where that gets long."""
        if self.experts > len(_DIGITS) or self.groups * (self.retained + 1) > _SUMMARY_DIGITS:
            return f"keep {self.retained} of {self.experts}, {self.groups} groups"
        return "keep " + " ".join("".join(_DIGITS[expert] for expert in row) for row in self.kept(genome))


def _check_family(section: EepSection, facts: ModelFacts) -> int:
    """How many of n' experts a token can choose from.

    Raises:
        UserError: the model's family can't express what the section asks for.
    """
    groups = facts.rule.groups
    fault = groups.fault(section.experts)
    if fault is not None:
        raise UserError(f"genome.experts: {section.experts} experts of a {facts.family} model {fault}")
    reach = groups.reach(section.experts)
    if section.active is not None and section.active > reach:
        raise UserError(
            f"genome.active: {section.active} is more than the {reach} experts that a token of this {facts.family} "
            f"model can choose from (those of {groups.chosen} of its {groups.count} routing groups)"
        )
    if facts.rule.scores == "softmax_of_chosen" and section.router_space == "probs":
        raise UserError(f"genome.router_space ({facts.family} model): {NO_SCORES}")
    return reach
