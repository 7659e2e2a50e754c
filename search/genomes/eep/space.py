"""EEP genomes, and the space of these for one model.

Source: Efficient Expert Pruning (arXiv 2407.00945), Sec. 4.2 (parameter space), Sec. 4.3 and App. C (operators),
App. A.1 (groups).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.arrays import FLOATS, ArrayGenome, ArraySpace, Shape
from moevolve.search.genomes.contract.base import Description, Offspring, offspring_of
from moevolve.search.genomes.contract.operators import (
    gaussian_noise,
    matrix_crossover,
    normalise_rows,
    select_matrices,
)
from moevolve.search.genomes.contract.phases import MergePhase, PhaseConfig, PrunePhase
from moevolve.search.genomes.eep.section import EepSection, token_limit
from moevolve.search.genomes.eep.subsets import Subsets, even_width, mean_shares, width_step
from moevolve.workers.contract.edits import IdentityEdit, Measurement
from moevolve.workers.contract.facts import ModelFacts, active_parameters, parameters_after
from moevolve.workers.contract.fitting import FitRows, RowsMeasurement
from moevolve.workers.methods.eep.edit import EepEdit, RouterSpace, one_hot_layers, stock_space

# Exponents a, b, c of scores: sums over an expert's tokens of (routing weight)^a (output norm)^b, by (tokens)^c.
SCORES = {"reap": (1, 1, 1), "man": (0, 1, 1), "msan": (0, 2, 1), "energy": (2, 2, 0)}
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
# More digits than fit into a line of a listing are summed up by their number.
_SUMMARY_DIGITS = 72
# Positions of the two matrices in stacked arrays.
_MAPPING, _MERGING = 0, 1
# Probability that the rows of all expert mergings are scaled to sum 1, as in the authors' released configuration.
_NORMALISED = 0.1
# How much of the most that any number of experts keeps has to be kept by others.
_NEARLY = 0.95


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.retained not in self.space.counts:
            raise ValueError(f"a genome of this space can't keep {self.retained} experts")

    @property
    def retained(self) -> int:
        """Number n' of kept experts per layer."""
        return self.expert_merging.shape[1]

    @cached_property
    def own_space(self) -> EepSpace:
        """The space of the candidates that keep as many experts."""
        return self.space.keeping(self.retained)

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
        return self.space.pruning_header(self.retained) + self.space.kept(self).astype("<u4").tobytes()

    def express(self) -> EepEdit | IdentityEdit:
        """Return an edit that gives each layer its group's matrices, or an `IdentityEdit` if they change nothing."""
        return self._edit

    @cached_property
    def is_identity(self) -> bool:
        """Whether the candidate is the unedited model."""
        return self.own_space.unchanged and self.one_hot

    @cached_property
    def _edit(self) -> EepEdit | IdentityEdit:
        if self.is_identity:
            return IdentityEdit()
        router_mapping, expert_merging = self.canonical
        groups, space = list(self.space.layer_groups), self.own_space
        matrices = router_mapping[groups], expert_merging[groups]
        width = None if space.width == space.facts.expert_neurons else space.width
        return EepEdit(*matrices, space.active, space.router_space, self.space.skip_rows, width)

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
class EepSpace(ArraySpace[EepGenome]):
    """All EEP genomes for one model.

    Attributes:
        experts: Number of original experts n per MoE layer.
        counts: Numbers n' of retained experts to choose from, the largest first.
        active: Number of active experts k per token after the edit, with the most retained experts.
        layer_groups: Index of every MoE layer's group, in order of depth.
        router_space: See `EepSection`; never None.
        neuron_share, dynamic_skipping: See `EepSection`.
        measurement: Measurements for dynamic skipping, baselines and surrogates; None if there are none.
    """

    kind: ClassVar[str] = "eep"
    genome_type: ClassVar[type[EepGenome]] = EepGenome
    experts: int
    counts: tuple[int, ...]
    active: int
    layer_groups: tuple[int, ...]
    router_space: RouterSpace
    neuron_share: float | None = None
    dynamic_skipping: bool = False
    measurement: Measurement | None = None

    @classmethod
    def of(cls, section: EepSection, facts: ModelFacts) -> EepSpace:
        """Make the space of a model.

        Raises:
            UserError: The model doesn't support the settings; the message names the field.
        """
        section.check_experts(facts.family, facts.experts)
        retained, layers = section.experts or facts.experts, len(facts.moe_layers)
        groups = layers if section.groups == "per_layer" else section.groups
        if groups > layers:
            raise UserError(f"genome.groups: {groups} is more than the model's {layers} MoE layers")
        skipping = RowsMeasurement(token_limit(section.calibration_tokens), "skipping")
        space = cls(
            facts=facts,
            experts=facts.experts,
            counts=(retained,),
            active=section.active_in(facts, retained),
            layer_groups=tuple(layer * groups // layers for layer in range(layers)),
            router_space=section.router_space or stock_space(facts.rule),
            neuron_share=section.neuron_share,
            dynamic_skipping=section.dynamic_skipping,
            measurement=skipping if section.dynamic_skipping else None,
        )
        if section.experts is None:
            counts = _counts(space, section)
            space = replace(space.keeping(counts[0]), counts=counts)
        elif not space.width and space.neuron_share is not None:
            step = width_step(facts.expert_neurons, 0)
            raise UserError(
                f"genome.neuron_share: {section.neuron_share} of the neurons are less than {step} for "
                f"each of {retained} kept experts per layer; give a larger share, or keep fewer experts"
            )
        return space

    def keeping(self, retained: int) -> EepSpace:
        """Return the space of candidates that retain so many experts; a token uses no more than it can choose from."""
        if self.counts == (retained,):
            return self
        reach = self.facts.rule.groups.reach(retained)
        return replace(self, counts=(retained,), active=min(self.active, reach))

    @property
    def retained(self) -> int:
        """Largest number n' of retained experts per MoE layer."""
        return self.counts[0]

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return len(self.facts.moe_layers)

    @property
    def groups(self) -> int:
        return self.layer_groups[-1] + 1

    @property
    def subsets(self) -> Subsets:
        """The subsets of experts that candidates with the most experts can retain."""
        return Subsets(self.experts, self.retained, self.facts.rule.groups.count)

    @property
    def width(self) -> int:
        """Neurons of an expert of the most retained ones; 0 if the share is less than one step of widths for each."""
        neurons = self.facts.expert_neurons
        if self.neuron_share is None:
            return neurons
        return even_width(self.neuron_share * self.experts / self.retained, neurons)

    @property
    def kept_share(self) -> float:
        """Share of the model's expert neurons that the most retained experts keep: widths have steps."""
        return self.retained * self.width / (self.experts * self.facts.expert_neurons)

    @property
    def unchanged(self) -> bool:
        """Whether candidates keep all experts and neurons, and as many active experts as the model."""
        whole = self.retained == self.experts and self.width == self.facts.expert_neurons
        return whole and self.active == self.facts.active and not self.dynamic_skipping

    def native(self, one_hot: bool) -> bool:
        """Say whether router mappings are kept beside the whole router, since they can't be folded into a smaller one.

        `one_hot` says whether every row of the mapping is.
        """
        return self.router_space != "logits" and not (self.facts.rule.one_hot_folds and one_hot)

    @cached_property
    def skip_rows(self) -> FitRows | None:
        """Calibration rows for the thresholds of dynamic skipping; None without dynamic skipping."""
        return FitRows.of(self.statistics, "skipping") if self.dynamic_skipping else None

    @property
    def shapes(self) -> dict[str, Shape]:
        retained = self.retained if len(self.counts) == 1 else None
        return dict.fromkeys(("router_mapping", "expert_merging"), (self.groups, retained, self.experts))

    def pruning_header(self, retained: int) -> bytes:
        """First bytes of genomes that only prune: the tag and the matrices' sizes, uint32, little-endian."""
        return self.tag + np.array((self.groups, retained, self.experts), dtype="<u4").tobytes()

    def from_kept(self, kept: NDArray[np.int64]) -> EepGenome:
        """Return the pruning genome that retains `kept`, int64 [groups, n'].

        Experts are distinct in a row, and if the model has routing groups, in their order with equally many of each.
        """
        one_hot = np.eye(self.experts, dtype=np.float32)[kept]
        return EepGenome(self, one_hot, one_hot)

    def from_bytes(self, data: bytes) -> EepGenome:
        for retained in self.counts:
            header = self.pruning_header(retained)
            kept = data.removeprefix(header)
            # Matrices take more bytes than that, whatever their sizes.
            if data.startswith(header) and len(kept) == 4 * self.groups * retained:
                experts = np.frombuffer(kept, dtype="<u4").reshape(self.groups, retained)
                if experts.max() >= self.experts:
                    raise ValueError(f"these bytes are an eep genome with expert {experts.max()} of {self.experts}")
                return self.from_kept(experts.astype(np.int64))
        return super().from_bytes(data)

    def kept(self, genome: EepGenome) -> NDArray[np.int64]:
        """Return the experts that a pruning genome retains, int64 [groups, n'], in the order of its rows."""
        return genome.expert_merging.argmax(axis=2).astype(np.int64)

    def score(self, name: str) -> NDArray[np.float64]:
        """Return one of `SCORES`, by layer: float64 [layers, n], 0 for experts that no token chose."""
        sums: NDArray[np.float64] = self.statistics["importance_sums"]
        weight, norm, tokens = SCORES[name]
        return sums[:, :, weight, norm] / np.maximum(sums[:, :, 0, 0], 1) ** tokens

    def sample(self, rng: np.random.Generator, phase: PhaseConfig) -> Offspring[EepGenome]:
        space = self if len(self.counts) == 1 else self.keeping(int(rng.choice(self.counts)))
        genome = self.from_kept(space.subsets.sample(rng, self.groups))
        return Offspring(genome, "random" if space.retained < self.experts else "identity", ())

    def breed(
        self, rng: np.random.Generator, phase: PhaseConfig, parents: tuple[EepGenome, ...]
    ) -> Offspring[EepGenome]:
        if isinstance(phase, PrunePhase):
            return offspring_of(self._breed_pruning(rng, phase, parents), parents)
        assert isinstance(phase, MergePhase)
        return offspring_of(self._breed_merging(rng, phase, parents), parents)

    def _breed_pruning(self, rng: np.random.Generator, phase: PrunePhase, parents: tuple[EepGenome, ...]) -> EepGenome:
        sets, subsets = [self.kept(parent) for parent in parents], parents[0].own_space.subsets
        child = sets[0].copy()
        # Parents that keep different numbers of experts aren't crossed.
        if len(sets) == 2 and sets[0].shape == sets[1].shape:
            child = np.stack([subsets.crossover(rng, one, two) for one, two in zip(*sets, strict=True)])
        mutated = select_matrices(rng, (2, self.groups), phase.group_rate)
        for group in np.flatnonzero(mutated[_MERGING]):
            child[group] = subsets.mutate(rng, child[group], phase.replace_rate)
        return self.from_kept(child)

    def _breed_merging(self, rng: np.random.Generator, phase: MergePhase, parents: tuple[EepGenome, ...]) -> EepGenome:
        both = [np.stack([parent.router_mapping, parent.expert_merging]) for parent in parents]
        child, mutated = both[0].copy(), select_matrices(rng, (2, self.groups), phase.group_rate)
        for index in np.ndindex(mutated.shape):
            if len(both) == 2:
                child[index] = matrix_crossover(rng, both[0][index], both[1][index], bool(mutated[index]))
            if mutated[index]:
                child[index] = gaussian_noise(rng, child[index], phase.entry_rate, phase.sigma)
        if rng.random() < _NORMALISED:
            for group in range(self.groups):
                child[_MERGING, group] = normalise_rows(child[_MERGING, group])
        return EepGenome(self, child[_MAPPING], child[_MERGING])

    def selects_subset(self, phase: PhaseConfig) -> bool:
        """Genomes of the prune phase are subsets of the experts of every group; those of one size can be learned."""
        return isinstance(phase, PrunePhase) and len(self.counts) == 1

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
        """Prune phase: 1 for retained experts, else 0, [groups * n]. Merge phase: the entries of both tensors.

        With several numbers of retained experts there are no coordinates.
        """
        if len(self.counts) > 1:
            return np.zeros(0)
        if isinstance(phase, PrunePhase):
            return genome.expert_merging.sum(axis=1).astype(np.float64).ravel()
        return super().flatten(genome, phase)

    def unflatten(self, vector: NDArray[np.float64], phase: PhaseConfig) -> EepGenome:
        """Prune phase: keep the experts with the highest scores of every group. Merge phase: take the entries."""
        if isinstance(phase, PrunePhase):
            return self.from_kept(self.subsets.best(vector.reshape(self.groups, self.experts)))
        return super().unflatten(vector, phase)

    def describe(self, genome: EepGenome) -> Description:
        space, retained = genome.own_space, genome.retained
        if genome.one_hot and self.experts <= len(_DIGITS) and self.groups * (retained + 1) <= _SUMMARY_DIGITS:
            summary = "keep " + " ".join("".join(_DIGITS[each] for each in row) for row in np.sort(self.kept(genome)))
        elif genome.one_hot:
            summary = f"keep {retained} of {self.experts}, {self.groups} groups"
        else:
            off = float(np.abs(genome.expert_merging - np.round(genome.expert_merging)).mean())
            summary = f"merge {self.experts}->{retained}, {self.groups} groups, mean |dW| {off:.3f}"
        narrower = space.width != self.facts.expert_neurons
        if narrower:
            summary += f", width {space.width}"
        if self.dynamic_skipping:
            summary += ", the second of 2 skipped at times"
        parameters, used = space.parameters(genome.one_hot_mapping, genome.is_identity)
        own_code = self.native(genome.one_hot_mapping) or self.dynamic_skipping
        return Description(
            experts=retained,
            active=space.active,
            parameters=parameters,
            active_parameters=used,
            parameters_full=self.facts.parameters,
            active_parameters_full=self.facts.active_parameters,
            summary=summary,
            stock=not (narrower and self.facts.width_linked) and (genome.is_identity or not own_code),
        )

    def parameters(self, one_hot: bool, identity: bool = False) -> tuple[int, int]:
        """Return the parameters of a model with the most retained experts, and those that a token uses.

        `one_hot` says whether every row of the router mapping is.
        """
        facts, native = self.facts, self.native(one_hot) and not identity
        used = active_parameters(facts, self.retained, self.active, native)
        # Parameters of the neurons that one retained expert of every layer lacks.
        lacking = self.layers * (facts.expert_neurons - self.width) * facts.neuron_parameters
        return parameters_after(facts, self.retained, native) - self.retained * lacking, used - self.active * lacking


def _counts(space: EepSpace, section: EepSection) -> tuple[int, ...]:
    """Halve n as long as the kept experts hold the share of neurons, and each has one step of width at least.

    Numbers that keep clearly less of the share than another does are left out.

    Raises:
        UserError: The model's family can't route to any of these numbers of experts.
    """
    assert space.neuron_share is not None
    rule, least = space.facts.rule, max(1.0, space.neuron_share * space.experts)
    halves = (space.experts >> times for times in range(space.experts.bit_length()))
    routable = [space.keeping(each) for each in halves if each >= least and not rule.groups.fault(each)]
    found = [
        each for each in routable if not rule.active_fault(each.retained, section.active or each.active) and each.width
    ]
    if not found:
        raise UserError(
            f"genome.neuron_share: {space.neuron_share} of the neurons can't be divided among {space.experts} experts, "
            "nor among half as many, and so on; give a larger share, or the number of kept experts (genome.experts)"
        )
    enough = _NEARLY * max(each.kept_share for each in found)
    return tuple(each.retained for each in found if each.kept_share >= enough)
