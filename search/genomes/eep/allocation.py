"""EEP candidates described by a few numbers: kept experts, their widths and active experts by layer, and importance.

Which experts are kept follows from their importance, so a search of these numbers has a handful of dimensions however
many experts there are. Widths take effect with `repair.neurons`, which fills the kept experts with the most important
neurons of all experts of their layer.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.base import ArrayGenome, Genome, Offspring, offspring_of
from moevolve.search.genomes.contract.operators import divided, layer_crossover, rounded
from moevolve.search.genomes.contract.phases import AllocatePhase
from moevolve.search.genomes.eep.genome import EepGenome
from moevolve.workers.methods.eep.edit import EepEdit

if TYPE_CHECKING:
    from moevolve.search.genomes.eep.space import EepSpace

MAGIC = b"EEPA"
_HEADER = struct.Struct("<4sHHHH")
REAP_EXPONENTS = (1.0, 1.0, 1.0)
"""With these, importance is REAP's: the mean over an expert's tokens of routing weight times output norm."""
_TASK_SCALE = 3.0
"""Factor on `tasks` before the exponential. A step that changes a width by a third changes a task's weight 2.5 times:
a subset of experts is less sensitive than a width."""
_HALVING_SCALE = 3.0
"""Factor on `halvings`, so that the usual step of a number often changes how many experts are kept."""
SUMS = "per_task_importance_sums"
"""Name of the calibration's sums of importance, float32 [tasks, layers, n, 3, 3]."""
GRID = (0.0, 1.0, 2.0)
"""Exponents for which the sums of importance are measured."""
_MOST_EXPONENTS = np.array([GRID[-1], GRID[-1], 1.0])
_NARROWEST, _WIDEST = 0.25, 2.5
"""Bounds of a layer's width, as multiples of the mean width. They limit the memory of the largest fit."""
_LOGIT_SPREAD = 0.5
"""Standard deviation of a random candidate's capacities."""
_BISECTIONS = 60
_EPS = 1e-9


@dataclass(frozen=True, eq=False)
class AllocationGenome(ArrayGenome):
    """One candidate of an `allocate` phase.

    Attributes:
        space: Space of the genome.
        capacities: Logarithms of the layers' relative widths, float32 [layers], read-only; a common offset has no
            effect. [0] for equal widths.
        activity: Logarithms of the layers' relative numbers of active experts, float32 [layers], read-only; a common
            offset has no effect. [0] unless `EepSpace.mean_active` is given.
        halvings: A third of the logarithm to base 2 of n / n', rounded to the nearest of `EepSpace.counts`; float32
            [1], read-only. [0] if the number n' of kept experts is fixed.
        tasks: A third of the logarithms of the weights of the tasks' calibration tokens in the sums of importance,
            float32 [tasks], read-only; [0] with one task. At 0 all tokens count alike.
        exponents: Exponents of routing weight and output norm, and of the number of tokens by whose power sums are
            divided, float32 [3], read-only.
    """

    space: EepSpace = field(repr=False, compare=False)
    capacities: NDArray[np.float32]
    activity: NDArray[np.float32]
    halvings: NDArray[np.float32]
    tasks: NDArray[np.float32]
    exponents: NDArray[np.float32]

    def __post_init__(self) -> None:
        for name in ("capacities", "activity", "halvings", "tasks", "exponents"):
            array = np.array(getattr(self, name), dtype=np.float32)
            self._set_array(name, array, array.shape)

    def to_bytes(self) -> bytes:
        """Return a header and the arrays as little-endian float32.

        The header has the magic number, and as uint16 the numbers of capacities, tasks, kept experts (the largest one
        if it is searched) and experts.
        """
        sizes = len(self.capacities), len(self.tasks), self.space.retained, self.space.experts
        return _HEADER.pack(MAGIC, *sizes) + self.vector.astype("<f4").tobytes()

    @cached_property
    def vector(self) -> NDArray[np.float64]:
        """All numbers: float64 [capacities + activity + halvings + tasks + 3]."""
        parts = [self.capacities, self.activity, self.halvings, self.tasks, self.exponents]
        return np.concatenate(parts).astype(np.float64)

    @property
    def task_weights(self) -> NDArray[np.float64]:
        """Weights of the tasks' calibration tokens, float64 [tasks]; [0] with one task."""
        return np.exp(_TASK_SCALE * np.clip(self.tasks.astype(np.float64), -3, 3))

    @property
    def retained(self) -> int:
        """Number n' of kept experts per layer."""
        if not len(self.halvings):
            return self.space.retained
        return min(self.space.counts, key=lambda count: abs(_halvings(self.space, count) - float(self.halvings[0])))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Neurons of a kept expert of each layer."""
        capacities = self.capacities if len(self.capacities) else np.zeros(self.space.layers)
        return WidthBudget.of(self.pruned.space).widths(capacities)

    @cached_property
    def active(self) -> tuple[int, ...]:
        """Active experts per token of each layer."""
        space = self.pruned.space
        if not len(self.activity):
            return (space.active,) * space.layers
        return ActiveBudget.of(space).numbers(self.activity)

    @property
    def idle_parameters(self) -> int:
        """Parameters of the kept experts that a token doesn't use, in all layers."""
        facts, retained = self.space.facts, self.retained
        layers = zip(self.widths, self.active, strict=True)
        narrower = ((retained - active, facts.expert_neurons - width) for width, active in layers)
        return sum(idle * (facts.expert_parameters - missing * facts.neuron_parameters) for idle, missing in narrower)

    @cached_property
    def pruned(self) -> EepGenome:
        """The kept experts, as a genome of the space in which every layer is a group of its own."""
        space = self.space.keeping(self.retained)
        by_layer = replace(space, layer_groups=tuple(range(space.layers)))
        sums = space.statistics[SUMS].astype(np.float64)
        weights = self.task_weights if len(self.tasks) else np.ones(1)
        importance = expert_importance(np.tensordot(weights, sums, axes=1), self.exponents)
        return by_layer.from_kept(space.subsets.best(importance))

    @cached_property
    def content_hash(self) -> str:
        # Different numbers can choose the same experts and widths, so the hash is the edit's.
        return hashlib.sha256(MAGIC + self._edit.phenotype_hash.encode()).hexdigest()

    def express(self) -> EepEdit:
        """Return the edit that keeps the most important experts, with the layers' widths and active experts."""
        return self._edit

    @cached_property
    def _edit(self) -> EepEdit:
        mapping, merging = self.pruned.canonical
        space = self.pruned.space
        original = set(self.widths) == {space.facts.expert_neurons}
        widths = None if original else self.widths
        return EepEdit(mapping, merging, self.active, space.router_space, space.skip_rows, widths)


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


@dataclass(frozen=True, slots=True)
class WidthBudget:
    """The widths that the layers' kept experts may have: all candidates of a space have the same total.

    Attributes:
        step: Number of neurons in which widths change: a power of 2 that divides an original expert's width, at most 64
            and an eighth of the mean width, but at least 8 where possible.
        least, most: Smallest and largest width of a layer, in steps.
        layers: Number of layers.
        total: Sum of the layers' widths, in steps.
    """

    step: int
    least: int
    most: int
    layers: int
    total: int

    @classmethod
    def of(cls, space: EepSpace) -> WidthBudget:
        """Return the budget of a space: its share of the model's neurons, divided among its kept experts.

        Without `genome.neuron_share` the mean width is exactly that of an original expert. With it, the total is the
        largest number of steps within the share.
        """
        neurons = space.facts.expert_neurons
        # The quotient may fall short of a whole number by a rounding error.
        mean = space.share * space.experts * neurons / space.retained + _EPS
        step = width_step(neurons, mean)
        widest = space.experts * neurons // (space.retained * step)
        total = min(int(space.layers * mean) // step, space.layers * widest)
        even = total / space.layers
        most = max(min(widest, int(_WIDEST * even)), math.ceil(even))
        return cls(step, max(1, int(_NARROWEST * even)), most, space.layers, total)

    @property
    def fits(self) -> bool:
        """Whether the share of neurons is at least one step for every kept expert."""
        return self.total >= self.layers

    @property
    def neurons(self) -> int:
        """Sum of the layers' widths."""
        return self.total * self.step

    @property
    def widest(self) -> int:
        """Largest width of a layer, in neurons."""
        return self.most * self.step

    def widths(self, capacities: NDArray[np.floating]) -> tuple[int, ...]:
        """Divide the total among the layers in proportion to exp(capacity), float [layers], within the bounds."""
        return tuple(each * self.step for each in _shared(capacities, self.total, self.least, self.most))


def width_step(neurons: int, mean: float) -> int:
    """Return `WidthBudget.step` for original experts of so many neurons, and a mean width."""
    return max(step for step in (1, 2, 4, 8, 16, 32, 64) if neurons % step == 0 and (step <= 8 or 8 * step <= mean))


def evenly_divided(share: float, neurons: int) -> float:
    """Return the largest `neuron_share` up to `share` that layers divide evenly, however many experts they keep.

    Args:
        share: Share of the model's neurons.
        neurons: Neurons of an original expert.

    Returns:
        The share; 0 if it is less than one step for each of all experts.
    """
    width = int(share * neurons + _EPS)
    step = width_step(neurons, width)
    return width // step * step / neurons


@dataclass(frozen=True, slots=True)
class ActiveBudget:
    """The numbers of active experts that layers may have: all candidates of a space have the same total.

    Attributes:
        most: Largest number of a layer: that of the unedited model, or the mean rounded up if that is more. The
            smallest number is 1.
        layers: Number of layers.
        total: Sum of the layers' numbers.
    """

    most: int
    layers: int
    total: int

    @classmethod
    def of(cls, space: EepSpace) -> ActiveBudget:
        """Return the budget of a space: the largest total whose mean is at most `genome.mean_active`.

        A layer has no more active experts than it keeps. If its number of active experts isn't searched, all have it.
        """
        if space.mean_active is None:
            return cls(space.active, space.layers, space.layers * space.active)
        reach = space.facts.rule.groups.reach(space.retained)
        total = min(int(space.layers * space.mean_active + _EPS), space.layers * reach)
        most = max(space.facts.active, math.ceil(total / space.layers))
        return cls(min(reach, most), space.layers, total)

    @property
    def mean(self) -> float:
        """Mean number of active experts of a layer."""
        return self.total / self.layers

    def numbers(self, activity: NDArray[np.floating]) -> tuple[int, ...]:
        """Divide the total among the layers in proportion to exp(activity), float [layers], within the bounds."""
        return tuple(_shared(activity, self.total, 1, self.most))


def _shared(logits: NDArray[np.floating], total: int, least: int, most: int) -> list[int]:
    """Divide a total among layers in proportion to exp(logits), in integers within bounds."""
    weights, ones = np.exp(np.clip(logits.astype(np.float64), -10, 10)), np.ones(len(logits))
    ideal = divided(weights, least * ones, most * ones, ones, total)
    sizes: list[int] = rounded(ideal, total, least, most).tolist()
    return sizes


def even_genome(space: EepSpace) -> AllocationGenome:
    """REAP's choice of experts with the same width in all layers, and as many active experts, as far as these divide.

    If the number of kept experts is searched, it is the largest one.
    """
    halvings = np.full(_halving_count(space), _halvings(space, space.retained))
    even, tasks = (np.zeros(count) for count in (_activity_count(space), _task_count(space)))
    arrays = np.zeros(space.layers), even, halvings, tasks, np.array(REAP_EXPONENTS)
    return AllocationGenome(space, *(array.astype(np.float32) for array in arrays))


def fewest(genome: AllocationGenome) -> AllocationGenome:
    """The same candidate with as few experts as the search may keep, which are as wide as original ones on average."""
    space = genome.space
    return replace(genome, halvings=np.full(_halving_count(space), _halvings(space, space.fewest), np.float32))


def line_genome(space: EepSpace) -> AllocationGenome:
    """REAP's choice of experts with widths that rise linearly with depth, from half to one and a half of the mean."""
    widths = np.linspace(0.5, 1.5, space.layers) if space.layers > 1 else np.ones(1)
    return replace(even_genome(space), capacities=np.log(widths).astype(np.float32))


def coverage_genome(space: EepSpace) -> AllocationGenome:
    """REAP's choice of experts, with widths by how many experts of a layer hold the same share of its importance.

    The share is found by bisection, so that the experts counted in all layers together have as many neurons as are
    kept. Importance is the sum over tokens of routing weight times output norm; experts are counted from the most
    important one on, with a fraction of the last.
    """
    sums = space.statistics[SUMS].astype(np.float64).sum(axis=0)
    values = -np.sort(-expert_importance(sums, np.array([1.0, 1.0, 0.0])), axis=1)
    held = np.pad(np.cumsum(values, axis=1) / values.sum(axis=1, keepdims=True), ((0, 0), (1, 0)))
    places = np.arange(space.experts + 1)
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        share = (low + high) / 2
        counts = np.array([np.interp(share, layer, places) for layer in held])
        low, high = (share, high) if counts.sum() <= space.layers * space.share * space.experts else (low, share)
    return replace(even_genome(space), capacities=np.log(counts).astype(np.float32))


def sample_allocation(rng: np.random.Generator, space: EepSpace, phase: AllocatePhase) -> Offspring[AllocationGenome]:
    """Draw capacities, activity and weights of tasks from a normal distribution; n' and exponents uniformly."""
    by_layer = rng.normal(0, _LOGIT_SPREAD, _capacity_count(space, phase) + _activity_count(space))
    tasks = rng.normal(0, _LOGIT_SPREAD, _task_count(space))
    halvings = [_halvings(space, int(rng.choice(space.counts))) for _ in range(_halving_count(space))]
    vector = np.concatenate([by_layer, halvings, tasks, rng.uniform(0, _MOST_EXPONENTS)])
    return Offspring(from_vector(space, vector, phase), "random", ())


def breed_allocation(
    rng: np.random.Generator, phase: AllocatePhase, parents: tuple[Genome, ...]
) -> Offspring[AllocationGenome]:
    """Cross two parents number by number, then change numbers by Gaussian steps; at least one changes.

    Since widths and active experts have fixed totals, a layer that gains takes from all others.
    """
    given = [as_allocation(parent, phase) for parent in parents]
    first, last = given[0].vector, given[-1].vector
    vector = np.where(layer_crossover(rng, len(first)), last, first)
    hit = rng.random(len(vector)) < phase.entry_rate
    hit[rng.integers(len(vector))] |= not hit.any()
    vector = vector + hit * rng.normal(0, phase.sigma, len(vector))
    return offspring_of(from_vector(given[0].space, vector, phase), given)


def as_allocation(genome: Genome, phase: AllocatePhase) -> AllocationGenome:
    """Return a genome in the form of a phase: `even_genome` for a candidate of a prune or merge phase."""
    if not isinstance(genome, AllocationGenome):
        genome = even_genome(genome.space)  # type: ignore[arg-type]
    count = _capacity_count(genome.space, phase)
    return genome if len(genome.capacities) == count else replace(genome, capacities=np.zeros(count, np.float32))


def from_vector(space: EepSpace, vector: NDArray[np.floating], phase: AllocatePhase) -> AllocationGenome:
    """Invert `AllocationGenome.vector`; exponents are clipped to their range."""
    return _genome(space, vector, _capacity_count(space, phase))


def allocation_from_bytes(space: EepSpace, data: bytes) -> AllocationGenome:
    """Invert `AllocationGenome.to_bytes`.

    Raises:
        ValueError: The bytes are no such genome of this space.
    """
    head = _HEADER.unpack_from(data) if len(data) >= _HEADER.size else (MAGIC, 0, 0, 0, 0)
    _, capacities, tasks, retained, experts = head
    fits = (retained, experts) == (space.retained, space.experts) and capacities in (0, space.layers)
    known = space.calibration is None or (SUMS in space.statistics and tasks == _task_count(space))
    numbers = capacities + _activity_count(space) + _halving_count(space) + tasks + 3
    if not fits or not known or len(data) != _HEADER.size + 4 * numbers:
        raise ValueError("these bytes are no EEP genome of this space")
    return _genome(space, np.frombuffer(data, dtype="<f4", offset=_HEADER.size), capacities)


def _genome(space: EepSpace, vector: NDArray[np.floating], capacities: int) -> AllocationGenome:
    values = vector.astype(np.float32)
    exponents = np.clip(values[-3:], 0, _MOST_EXPONENTS)
    sizes = capacities, _activity_count(space), _halving_count(space)
    by_layer, activity, halvings, tasks = np.split(values[:-3], np.cumsum(sizes))
    halvings = np.clip(halvings, _halvings(space, space.retained), _halvings(space, space.fewest))
    return AllocationGenome(space, by_layer, activity, halvings, tasks, exponents)


def _capacity_count(space: EepSpace, phase: AllocatePhase) -> int:
    return space.layers if phase.widths == "searched" else 0


def _activity_count(space: EepSpace) -> int:
    return 0 if space.mean_active is None else space.layers


def _halvings(space: EepSpace, count: int) -> float:
    return math.log2(space.experts / count) / _HALVING_SCALE


def _halving_count(space: EepSpace) -> int:
    """Number of genes for the number of kept experts: 1 if it is searched, else 0."""
    return 1 if len(space.counts) > 1 else 0


def _task_count(space: EepSpace) -> int:
    """Number of tasks whose weights are searched; 0 if there is only one."""
    tasks = len(space.statistics[SUMS])
    return tasks if tasks > 1 else 0
