"""One EEP genome: router mapping `W_RM` and expert merging `W_EM`, one pair of (n' x n) matrices per group of layers.

Source: Efficient Expert Pruning (arXiv 2407.00945), Sec. 4.2 (parameter space).

New expert i is row i of both matrices, so rows are interchangeable. A genome keeps its own order of rows, so that
crossover mixes rows with a common ancestor; hash and edit use a canonical order. In families with routing groups, the
row's position determines the expert's routing group, and only rows of one group are interchangeable.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.base import ArrayGenome
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.methods.eep.edit import EepEdit, one_hot_layers

if TYPE_CHECKING:
    from moevolve.search.genomes.eep.space import EepSpace

HEADER = struct.Struct("<4sHHH")
MAGIC = b"EEP1"


@dataclass(frozen=True, eq=False)
class EepGenome(ArrayGenome):
    """One EEP candidate.

    Attributes:
        space: Space of the genome.
        router_mapping: `W_RM` of every group of layers, float32 [groups, n', n], read-only.
        expert_merging: `W_EM` of every group of layers, float32 [groups, n', n], read-only.
    """

    space: EepSpace = field(repr=False, compare=False)
    router_mapping: NDArray[np.float32] = field(repr=False)
    expert_merging: NDArray[np.float32] = field(repr=False)

    def __post_init__(self) -> None:
        expected = (self.space.groups, self.space.retained, self.space.experts)
        for name in ("router_mapping", "expert_merging"):
            self._set_array(name, np.array(getattr(self, name), dtype=np.float32), expected)

    def to_bytes(self) -> bytes:
        """Return the magic number, the shape (three uint16) and both tensors as little-endian float32."""
        header = HEADER.pack(MAGIC, *self.router_mapping.shape)
        return header + self.router_mapping.astype("<f4").tobytes() + self.expert_merging.astype("<f4").tobytes()

    @cached_property
    def canonical(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Both tensors with interchangeable rows sorted by `W_EM`, then `W_RM`, in descending order."""
        keys = np.concatenate([self.expert_merging, self.router_mapping], axis=2)
        groups, retained, _ = keys.shape
        size = retained // self.space.subsets.routing_groups
        interchangeable = keys.reshape(-1, size, keys.shape[2])
        within = np.stack([np.lexsort(-rows.T[::-1]) for rows in interchangeable]).reshape(groups, -1, size)
        orders = (within + np.arange(0, retained, size)[:, None]).reshape(groups, retained, 1)
        # Adding zero turns -0.0 into 0.0, so that equal matrices have equal bytes.
        return (
            np.take_along_axis(self.router_mapping, orders, axis=1) + np.float32(0),
            np.take_along_axis(self.expert_merging, orders, axis=1) + np.float32(0),
        )

    @cached_property
    def content_hash(self) -> str:
        digest = hashlib.sha256(MAGIC)
        for matrices in self.canonical:
            digest.update(matrices.astype("<f4").tobytes())
        return digest.hexdigest()

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
