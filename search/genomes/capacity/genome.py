"""One candidate as a few numbers: kept experts, widths and active experts by layer, and importance of experts."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.base import ArrayGenome
from moevolve.workers.methods.eep.edit import EepEdit

if TYPE_CHECKING:
    from moevolve.search.genomes.capacity.space import CapacitySpace

HEADER = struct.Struct("<4sHHHH")
MAGIC = b"CAP1"
SUMS = "per_task_importance_sums"
"""Name of the calibration's sums of importance, float32 [tasks, layers, n, 3, 3]."""
GRID = (0.0, 1.0, 2.0)
"""Exponents for which the sums of importance are measured."""
_TASK_SCALE = 3.0
"""Factor on `tasks` before the exponential. A step that changes a width by a third changes a task's weight 2.5 times:
a subset of experts is less sensitive than a width."""


@dataclass(frozen=True, eq=False)
class CapacityGenome(ArrayGenome):
    """One candidate.

    Attributes:
        space: Space of the genome.
        log_widths: Logarithms of the layers' relative widths, float32 [layers], read-only; a common offset has no
            effect. [0] for equal widths.
        log_active: Logarithms of the layers' relative numbers of active experts, float32 [layers], read-only; a common
            offset has no effect. [0] unless `CapacitySpace.mean_active` is given.
        log2_kept: A third of the logarithm to base 2 of n / n', rounded to the nearest of `CapacitySpace.counts`;
            float32 [1], read-only. [0] if the number n' of kept experts is fixed.
        tasks: A third of the logarithms of the weights of the tasks' calibration tokens in the sums of importance,
            float32 [tasks], read-only; [0] with one task. At 0 all tokens count alike.
        exponents: Exponents of routing weight and output norm, and of the number of tokens by whose power sums are
            divided, float32 [3], read-only.
    """

    space: CapacitySpace = field(repr=False, compare=False)
    log_widths: NDArray[np.float32]
    log_active: NDArray[np.float32]
    log2_kept: NDArray[np.float32]
    tasks: NDArray[np.float32]
    exponents: NDArray[np.float32]

    def __post_init__(self) -> None:
        for name in ("log_widths", "log_active", "log2_kept", "tasks", "exponents"):
            array = np.array(getattr(self, name), dtype=np.float32)
            self._set_array(name, array, array.shape)

    def to_bytes(self) -> bytes:
        """Return a header and the arrays as little-endian float32.

        The header has the magic number, and as uint16 the numbers of widths, tasks, kept experts (the largest one if
        it is searched) and experts.
        """
        sizes = len(self.log_widths), len(self.tasks), self.space.retained, self.space.experts
        return HEADER.pack(MAGIC, *sizes) + self.vector.astype("<f4").tobytes()

    @cached_property
    def vector(self) -> NDArray[np.float64]:
        """All numbers: float64 [widths + active + kept + tasks + 3]."""
        parts = [self.log_widths, self.log_active, self.log2_kept, self.tasks, self.exponents]
        return np.concatenate(parts).astype(np.float64)

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

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Neurons of a kept expert of each layer."""
        log_widths = self.log_widths if len(self.log_widths) else np.zeros(self.space.layers)
        return self.space.keeping(self.retained).widths.sizes(log_widths)

    @cached_property
    def active(self) -> tuple[int, ...]:
        """Active experts per token of each layer."""
        space = self.space.keeping(self.retained)
        return space.actives.sizes(self.log_active) if len(self.log_active) else (space.active,) * space.layers

    @property
    def idle_parameters(self) -> int:
        """Parameters of the kept experts that a token doesn't use, in all layers."""
        facts, retained = self.space.facts, self.retained
        layers = zip(self.widths, self.active, strict=True)
        narrower = ((retained - active, facts.expert_neurons - width) for width, active in layers)
        return sum(idle * (facts.expert_parameters - missing * facts.neuron_parameters) for idle, missing in narrower)

    @cached_property
    def kept(self) -> NDArray[np.int64]:
        """The kept experts of every layer, int64 [layers, n'], sorted."""
        sums = self.space.statistics[SUMS].astype(np.float64)
        weights = self.task_weights if len(self.tasks) else np.ones(1)
        importance = expert_importance(np.tensordot(weights, sums, axes=1), self.exponents)
        return self.space.keeping(self.retained).subsets.best(importance)

    @cached_property
    def content_hash(self) -> str:
        # Different numbers can choose the same experts and widths, so the hash is the edit's.
        return hashlib.sha256(MAGIC + self._edit.phenotype_hash.encode()).hexdigest()

    def express(self) -> EepEdit:
        """Return the edit that keeps the most important experts, with the layers' widths and active experts."""
        return self._edit

    @cached_property
    def _edit(self) -> EepEdit:
        space, one_hot = self.space, np.eye(self.space.experts, dtype=np.float32)[self.kept]
        original = set(self.widths) == {space.facts.expert_neurons}
        widths = None if original else self.widths
        return EepEdit(one_hot, one_hot, self.active, space.router_space, space.skip_rows, widths)


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
