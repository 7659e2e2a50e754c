"""EEP candidates described by a few numbers: the width of each layer's kept experts, and how importance is computed.

Which experts are kept follows from their importance, so a search of these numbers has a handful of dimensions however
many experts there are. Widths take effect with `repair.neurons`, which fills the kept experts with the most important
neurons of all experts of their layer.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.base import ArrayGenome, Genome, Offspring, offspring_of
from moevolve.search.genomes.contract.operators import layer_crossover
from moevolve.search.genomes.contract.shares import divided, rounded
from moevolve.search.genomes.eep.genome import EepGenome
from moevolve.search.settings.phases import AllocatePhase
from moevolve.workers.methods.eep.edit import EepEdit

if TYPE_CHECKING:
    from moevolve.search.genomes.eep.space import EepSpace

MAGIC = b"EEPA"
_HEADER = struct.Struct("<4sHHH")
REAP_EXPONENTS = (1.0, 1.0, 1.0)
"""With these, importance is REAP's: the mean over an expert's tokens of routing weight times output norm."""
GRID = (0.0, 1.0, 2.0)
"""Exponents for which the sums of importance are measured."""
_NARROWEST, _WIDEST = 0.25, 2.5
"""Bounds of a layer's width, as multiples of the even width. They limit the memory of the largest fit."""
_LOGIT_SPREAD = 0.5
"""Standard deviation of a random candidate's capacities."""


@dataclass(frozen=True, eq=False)
class AllocationGenome(ArrayGenome):
    """One candidate of an `allocate` phase.

    Attributes:
        space: Space of the genome.
        capacities: Logarithms of the layers' relative widths, float32 [layers], read-only; a common offset has no
            effect.
        exponents: Exponents of routing weight and output norm, and of the number of tokens by whose power sums are
            divided, float32 [3], read-only.
    """

    space: EepSpace = field(repr=False, compare=False)
    capacities: NDArray[np.float32]
    exponents: NDArray[np.float32]

    def __post_init__(self) -> None:
        self._set_array("capacities", np.array(self.capacities, dtype=np.float32), (self.space.layers,))
        self._set_array("exponents", np.array(self.exponents, dtype=np.float32), (3,))

    def to_bytes(self) -> bytes:
        """Return the header (see `_header`) and both arrays as little-endian float32."""
        values = np.concatenate([self.capacities, self.exponents]).astype("<f4")
        return _header(self.space) + values.tobytes()

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Neurons of a kept expert of each layer."""
        return layer_widths(self.space, self.capacities)

    @cached_property
    def pruned(self) -> EepGenome:
        """The kept experts, as a genome of the space in which every layer is a group of its own."""
        space = self.space
        by_layer = replace(space, layer_groups=tuple(range(space.layers)))
        importance = expert_importance(space.statistics["importance_sums"], self.exponents)
        return by_layer.from_kept(space.subsets.best(importance))

    @cached_property
    def content_hash(self) -> str:
        return hashlib.sha256(f"{MAGIC!r} {self.widths} {self.pruned.content_hash}".encode()).hexdigest()

    def express(self) -> EepEdit:
        """Return the edit that keeps the most important experts, with the widths of the layers."""
        return self._edit

    @cached_property
    def _edit(self) -> EepEdit:
        mapping, merging = self.pruned.canonical
        space = self.space
        return EepEdit(mapping, merging, space.active, space.router_space, space.skip_rows, self.widths)


def expert_importance(sums: NDArray[np.floating], exponents: NDArray[np.floating]) -> NDArray[np.float64]:
    """Compute the importance of experts: `sum over tokens of g^a |f|^b`, divided by `tokens^c`.

    Here g is the routing weight of an expert for a token that chose it, and |f| the norm of the expert's output.
    Between the exponents of `GRID` the logarithms of sums are interpolated linearly, which is exact if g and |f| are
    the same for all tokens.

    Args:
        sums: Sums over tokens [layers, n, a, b] for the exponents of `GRID`.
        exponents: a, b and c.

    Returns:
        float64 [layers, n]; 0 for experts that no token chose.
    """
    a, b, c = (float(each) for each in np.clip(exponents, GRID[0], GRID[-1]))
    logs = np.log(np.maximum(sums.astype(np.float64), np.finfo(np.float32).tiny))
    first, second = (min(int(each), len(GRID) - 2) for each in (a, b))
    across, down = a - first, b - second
    corners = logs[:, :, first : first + 2, second : second + 2]
    mixed = (1 - across) * corners[:, :, 0] + across * corners[:, :, 1]
    values = (1 - down) * mixed[..., 0] + down * mixed[..., 1] - c * logs[:, :, 0, 0]
    return np.where(sums[:, :, 0, 0] > 0, np.exp(values), 0.0)


def width_step(width: int) -> int:
    """The power of 2 in which widths change: it divides `width`, is at most 64, and at least 8 where possible."""
    return max(each for each in (1, 2, 4, 8, 16, 32, 64) if width % each == 0 and (each <= 8 or 8 * each <= width))


def width_bounds(space: EepSpace) -> tuple[int, int]:
    """Smallest and largest number of neurons of a kept expert in a layer."""
    step = width_step(space.facts.expert_neurons)
    even = space.facts.expert_neurons // step
    return max(1, int(_NARROWEST * even)) * step, int(min(space.experts / space.retained, _WIDEST) * even) * step


def layer_widths(space: EepSpace, capacities: NDArray[np.floating]) -> tuple[int, ...]:
    """Divide the kept experts' neurons among the layers, in proportion to exp(capacity) within bounds.

    The mean width is exactly that of an original expert.

    Args:
        space: Space with the number of experts and their width.
        capacities: float [layers].
    """
    step = width_step(space.facts.expert_neurons)
    least, most = (bound // step for bound in width_bounds(space))
    total = space.layers * (space.facts.expert_neurons // step)
    weights, ones = np.exp(np.clip(capacities.astype(np.float64), -10, 10)), np.ones(space.layers)
    ideal = divided(weights, least * ones, most * ones, ones, total)
    return tuple(int(each) * step for each in rounded(ideal, total, least, most))


def even_genome(space: EepSpace) -> AllocationGenome:
    """REAP's choice of experts with the same width in all layers."""
    return AllocationGenome(space, np.zeros(space.layers, np.float32), np.array(REAP_EXPONENTS, np.float32))


def line_genome(space: EepSpace) -> AllocationGenome:
    """REAP's choice of experts with widths that rise linearly with depth, from half to one and a half of the mean."""
    widths = np.linspace(0.5, 1.5, space.layers) if space.layers > 1 else np.ones(1)
    return replace(even_genome(space), capacities=np.log(widths).astype(np.float32))


def sample_allocation(rng: np.random.Generator, space: EepSpace) -> Offspring[AllocationGenome]:
    """Draw capacities from a normal distribution and exponents uniformly from their range."""
    capacities = rng.normal(0, _LOGIT_SPREAD, space.layers)
    exponents = rng.uniform([0, 0, 0], [GRID[-1], GRID[-1], 1])
    return Offspring(from_vector(space, np.concatenate([capacities, exponents])), "random", ())


def breed_allocation(
    rng: np.random.Generator, phase: AllocatePhase, parents: tuple[Genome, ...]
) -> Offspring[AllocationGenome]:
    """Cross two parents layer by layer, then change numbers by Gaussian steps; at least one changes.

    Since widths have a fixed total, a layer that gains takes from all others.
    """
    given = [as_allocation(parent) for parent in parents]
    first, last = given[0], given[-1]
    vector = np.where(layer_crossover(rng, len(_vector(first))), _vector(last), _vector(first))
    hit = rng.random(len(vector)) < phase.entry_rate
    hit[rng.integers(len(vector))] |= not hit.any()
    vector = vector + hit * rng.normal(0, phase.sigma, len(vector))
    return offspring_of(from_vector(first.space, vector), given)


def as_allocation(genome: Genome) -> AllocationGenome:
    """Return an `allocate` genome as it is, and `even_genome` for a candidate of an earlier phase."""
    return genome if isinstance(genome, AllocationGenome) else even_genome(genome.space)  # type: ignore[arg-type]


def to_vector(genome: Genome) -> NDArray[np.float64]:
    """Capacities followed by exponents, float64 [layers + 3]."""
    return _vector(as_allocation(genome))


def from_vector(space: EepSpace, vector: NDArray[np.floating]) -> AllocationGenome:
    """Invert `to_vector`; exponents are clipped to their range."""
    exponents = np.clip(vector[space.layers :], 0, [GRID[-1], GRID[-1], 1])
    return AllocationGenome(space, vector[: space.layers].astype(np.float32), exponents.astype(np.float32))


def allocation_from_bytes(space: EepSpace, data: bytes) -> AllocationGenome:
    """Invert `AllocationGenome.to_bytes`.

    Raises:
        ValueError: The bytes are no such genome of this space.
    """
    size = _HEADER.size + 4 * (space.layers + 3)
    if len(data) != size or not data.startswith(_header(space)):
        raise ValueError("these bytes are no EEP genome of this space")
    return from_vector(space, np.frombuffer(data, dtype="<f4", offset=_HEADER.size))


def _header(space: EepSpace) -> bytes:
    """The magic number, and the numbers of layers, kept experts and experts as uint16."""
    return _HEADER.pack(MAGIC, space.layers, space.retained, space.experts)


def _vector(genome: AllocationGenome) -> NDArray[np.float64]:
    return np.concatenate([genome.capacities, genome.exponents]).astype(np.float64)
