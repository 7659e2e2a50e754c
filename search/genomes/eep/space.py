"""The settings of EEP searches, EEP genomes, and the space of these for one model.

Source: Efficient Expert Pruning (arXiv 2407.00945), Sec. 4.2 (parameter space), Sec. 4.3 and App. C (operators),
App. A.1 (groups).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.arrays import FLOATS, ArrayGenome, Shape
from moevolve.search.genomes.contract.base import (
    MOST_PARTS,
    MOST_STEPS,
    MOST_TOKENS,
    Description,
    Offspring,
    offspring_of,
)
from moevolve.search.genomes.contract.operators import (
    gaussian_noise,
    matrix_crossover,
    normalise_rows,
    select_matrices,
)
from moevolve.search.genomes.contract.phases import MergePhase, PhaseConfig, PrunePhase
from moevolve.search.genomes.experts.space import ExpertsSection, ExpertsSpace
from moevolve.search.genomes.experts.subsets import mean_shares
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.facts import ModelFacts, active_parameters, parameters_after
from moevolve.workers.methods.eep.edit import EepEdit, one_hot_layers


class EepSection(ExpertsSection):
    """The EEP genome: a router mapping and an expert merging matrix per group of layers.

    Attributes:
        groups: Number of equal contiguous groups of layers that share coefficients, or `per_layer`.
        naee_tokens: Largest number of calibration tokens, evenly spaced, on which the baseline `naee` compares subsets.
            It keeps n^2 numbers per token and layer, up to 4 GiB of host memory.
        naee_subsets: Largest number of subsets that `naee` tries; if there are more, it drops experts greedily.
    """

    random_title: ClassVar[str] = "random pruning"
    kind: Literal["eep"] = "eep"
    experts: int = Field(ge=1, le=MOST_PARTS)
    groups: Annotated[int, Field(ge=1, le=MOST_PARTS)] | Literal["per_layer"] = 4
    naee_tokens: int = Field(1024, ge=1, le=MOST_TOKENS)
    naee_subsets: int = Field(5000, ge=0, le=MOST_STEPS)


SCORES = {"reap": (1, 1, 1), "man": (0, 1, 1), "msan": (0, 2, 1), "energy": (2, 2, 0)}
"""Exponents a, b, c of scores: sums over an expert's tokens of (routing weight)^a (output norm)^b, by (tokens)^c."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
# More digits than fit into a line of a listing are summed up by their number.
_SUMMARY_DIGITS = 72
# Positions of the two matrices in stacked arrays.
_MAPPING, _MERGING = 0, 1


@dataclass(frozen=True, eq=False, repr=False)
class EepGenome(ArrayGenome):
    """One EEP candidate: router mapping `W_RM` and expert merging `W_EM`, one matrix of each per group of layers.

    New expert i is row i of both matrices, so rows are interchangeable. A genome keeps its own order of rows: those
    that a child inherits keep their places, so that crossover of relatives' rows takes no expert from both. The edit
    has a canonical order. In families with routing groups, the row's position determines the expert's routing group,
    and only rows of one group are interchangeable.

    Attributes:
        router_mapping: `W_RM` of every group of layers, float32 [groups, n', n], read-only.
        expert_merging: `W_EM` of every group of layers, float32 [groups, n', n], read-only.
    """

    space: EepSpace
    router_mapping: NDArray[np.float32] = field(metadata=FLOATS)
    expert_merging: NDArray[np.float32] = field(metadata=FLOATS)

    @cached_property
    def canonical(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Both tensors with interchangeable rows sorted by `W_EM`, then `W_RM`, in descending order."""
        keys = np.concatenate([self.expert_merging, self.router_mapping], axis=2)
        groups, retained, _ = keys.shape
        size = retained // self.space.subsets.routing_groups
        interchangeable = keys.reshape(-1, size, keys.shape[2])
        within = np.stack([np.lexsort(-rows.T[::-1]) for rows in interchangeable]).reshape(groups, -1, size)
        orders = (within + np.arange(0, retained, size)[:, None]).reshape(groups, retained, 1)
        both = self.router_mapping, self.expert_merging
        return np.take_along_axis(both[0], orders, axis=1), np.take_along_axis(both[1], orders, axis=1)

    def to_bytes(self) -> bytes:
        """Return the matrices, or only the kept experts, uint32 [groups, n'], of a genome that only prunes.

        Matrices of Qwen3-30B are 3 MB, so a thousand candidates that only prune it would be 3 GB in the store.
        """
        if not self.one_hot:
            return super().to_bytes()
        return self.space.pruning_header + self.space.kept(self).astype("<u4").tobytes()

    def express(self) -> EepEdit | IdentityEdit:
        """Return an edit that gives each layer its group's matrices, or an `IdentityEdit` if they change nothing."""
        return self._edit

    @cached_property
    def is_identity(self) -> bool:
        """Whether the candidate is the unedited model."""
        return self.space.unchanged and self.one_hot

    @cached_property
    def _edit(self) -> EepEdit | IdentityEdit:
        if self.is_identity:
            return IdentityEdit()
        router_mapping, expert_merging = self.canonical
        groups, space = list(self.space.layer_groups), self.space
        matrices = router_mapping[groups], expert_merging[groups]
        return EepEdit(*matrices, space.active, space.router_space, space.skip_rows)

    @property
    def one_hot_mapping(self) -> bool:
        """Whether every row of `W_RM` is one-hot."""
        return bool(one_hot_layers(self.router_mapping).all())

    @cached_property
    def one_hot(self) -> bool:
        """Whether the genome only prunes."""
        return np.array_equal(self.router_mapping, self.expert_merging) and bool(
            one_hot_layers(self.expert_merging).all()
        )


@dataclass(frozen=True, kw_only=True)
class EepSpace(ExpertsSpace[EepGenome]):
    """All EEP genomes for one model.

    Attributes:
        layer_groups: Index of every MoE layer's group, in order of depth.
    """

    kind: ClassVar[str] = "eep"
    genome_type: ClassVar[type[EepGenome]] = EepGenome
    phase_kinds: ClassVar[tuple[str, ...]] = ("prune", "merge")
    layer_groups: tuple[int, ...] = ()

    @classmethod
    def of(cls, section: EepSection, facts: ModelFacts) -> EepSpace:
        """Make the space of a model.

        Raises:
            UserError: The model doesn't support the settings; the message names the field.
        """
        space = cls.checked(section, facts)
        groups = space.layers if section.groups == "per_layer" else section.groups
        if groups > space.layers:
            raise UserError(f"genome.groups: {groups} is more than the model's {space.layers} MoE layers")
        return replace(space, layer_groups=tuple(layer * groups // space.layers for layer in range(space.layers)))

    @property
    def groups(self) -> int:
        return self.layer_groups[-1] + 1

    @property
    def shapes(self) -> dict[str, Shape]:
        return dict.fromkeys(("router_mapping", "expert_merging"), (self.groups, self.retained, self.experts))

    @cached_property
    def pruning_header(self) -> bytes:
        """First bytes of genomes that only prune: the tag and the matrices' sizes, uint32, little-endian."""
        return self.tag + np.array(self.shapes["expert_merging"], dtype="<u4").tobytes()

    def from_kept(self, kept: NDArray[np.int64]) -> EepGenome:
        """Return the pruning genome that retains `kept`, int64 [groups, n'].

        Experts are distinct in a row, and if the model has routing groups, in their order with equally many of each.
        """
        one_hot = np.eye(self.experts, dtype=np.float32)[kept]
        return EepGenome(self, one_hot, one_hot)

    def from_bytes(self, data: bytes) -> EepGenome:
        kept = data[len(self.pruning_header) :]
        # Matrices take more bytes than that, whatever their sizes.
        if not data.startswith(self.pruning_header) or len(kept) != 4 * self.groups * self.retained:
            return super().from_bytes(data)
        experts = np.frombuffer(kept, dtype="<u4").reshape(self.groups, self.retained)
        if experts.max() >= self.experts:
            raise ValueError(f"these bytes are an eep genome with expert {experts.max()} of {self.experts}")
        return self.from_kept(experts.astype(np.int64))

    def kept(self, genome: EepGenome) -> NDArray[np.int64]:
        """Return the experts that a pruning genome retains, int64 [groups, n'], in the order of its rows."""
        return genome.expert_merging.argmax(axis=2).astype(np.int64)

    def score(self, name: str) -> NDArray[np.float64]:
        """One of `SCORES`, by layer: float64 [layers, n], 0 for experts that no token chose."""
        sums: NDArray[np.float64] = self.statistics["importance_sums"]
        weight, norm, tokens = SCORES[name]
        return sums[:, :, weight, norm] / np.maximum(sums[:, :, 0, 0], 1) ** tokens

    def sample(self, rng: np.random.Generator, phase: PhaseConfig) -> Offspring[EepGenome]:
        kept = self.subsets.sample(rng, self.groups)
        operator = "random" if self.retained < self.experts else "identity"
        return Offspring(self.from_kept(kept), operator, ())

    def breed(
        self, rng: np.random.Generator, phase: PhaseConfig, parents: tuple[EepGenome, ...]
    ) -> Offspring[EepGenome]:
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
            child[group] = self.subsets.mutate(rng, child[group], phase.replace_rate)
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

    def selects_subset(self, phase: PhaseConfig) -> bool:
        """Genomes of the prune phase are subsets of the experts of every group."""
        return isinstance(phase, PrunePhase)

    def importance(self, phase: PhaseConfig) -> NDArray[np.float64]:
        """Return how often experts are chosen, `SCORES`, and HOPE's scores, summed over an expert's pairs.

        Each is a share of its layer's sum, averaged over the layers of a group. There are rows for what was measured.
        """
        measured = {} if self.calibration is None else self.statistics
        scores = [measured["counts"]] if "counts" in measured else []
        scores += map(self.score, SCORES) if "importance_sums" in measured else ()
        scores += [measured["pair_norms"].sum(axis=2)] if "pair_norms" in measured else []
        rows = [mean_shares(each, self.layer_groups).ravel() for each in scores]
        return np.array(rows, dtype=np.float64).reshape(len(rows), self.groups * self.experts)

    def flatten(self, genome: EepGenome, phase: PhaseConfig) -> NDArray[np.float64]:
        """Prune phase: 1 for retained experts, else 0, [groups * n]. Merge phase: the entries of both tensors."""
        if isinstance(phase, PrunePhase):
            return genome.expert_merging.sum(axis=1).astype(np.float64).ravel()
        return super().flatten(genome, phase)

    def unflatten(self, vector: NDArray[np.float64], phase: PhaseConfig) -> EepGenome:
        """Prune phase: keep the experts with the highest scores of every group. Merge phase: take the entries."""
        if isinstance(phase, PrunePhase):
            return self.from_kept(self.subsets.best(vector.reshape(self.groups, self.experts)))
        return super().unflatten(vector, phase)

    def describe(self, genome: EepGenome) -> Description:
        if genome.one_hot and self.experts <= len(_DIGITS) and self.groups * (self.retained + 1) <= _SUMMARY_DIGITS:
            summary = "keep " + " ".join("".join(_DIGITS[each] for each in row) for row in np.sort(self.kept(genome)))
        elif genome.one_hot:
            summary = f"keep {self.retained} of {self.experts}, {self.groups} groups"
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
            active_parameters_full=self.facts.active_parameters,
            summary=summary,
            stock=genome.is_identity or not (self.native(genome.one_hot_mapping) or self.dynamic_skipping),
        )

    def parameters(self, one_hot: bool, identity: bool = False) -> tuple[int, int]:
        """Return the parameters of a candidate's model, and those that a token uses.

        `one_hot` says whether every row of the router mapping is.
        """
        facts, native = self.facts, self.native(one_hot) and not identity
        used = active_parameters(facts, self.retained, self.active, native)
        return parameters_after(facts, self.retained, native), used
