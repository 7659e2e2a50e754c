"""The FactorLLM genome: a partition of every network's neurons into equal experts, and routers.

Source: FactorLLM (arXiv 2408.11855), Sec. 3.2 and 3.3. The paper trains experts and routers by gradients; here the
experts keep the network's weights, and partition and routers are searched. A router is

    logits(x) = W x + b + C (D x - o) + c

where `W` and `b` are a router measured in the calibration (`ROUTERS`) or zeros, `D` are the scaled principal directions
of the network's inputs, `o` is `D` times the mean input, and the coordinates `C` and biases `c` are in units of a
logit's standard deviation over tokens. Experts are interchangeable: hash and edit number them by their first neurons.
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
from moevolve.workers.methods.factorllm.edit import FactorLlmEdit

if TYPE_CHECKING:
    from moevolve.search.genomes.factorllm.space import FactorLlmSpace

HEADER = struct.Struct("<4s5I")
MAGIC = b"FLM1"
ROUTERS = ("router", "moefication", "cmoe")
"""Names of measured routers: the start's closed-form router (R of them if R > 1) and the baselines'."""
ARRAYS = {"assignment": np.uint8, "base_router": np.uint8, "coordinates": np.float32, "biases": np.float32}


@dataclass(frozen=True, eq=False)
class FactorLlmGenome(ArrayGenome):
    """One FactorLLM candidate. Arrays are read-only.

    Attributes:
        assignment: Expert of every neuron, uint8 [layers, width]; all experts have equally many neurons.
        base_router: Measured router `W`, `b` of every layer, as 1 + index in `ROUTERS`, or 0 for none: uint8 [layers].
        coordinates: Coordinates `C`, float32 [layers, routers, N, components].
        biases: Biases `c`, float32 [layers, routers, N]; zeros in a space without router biases.
    """

    space: FactorLlmSpace = field(repr=False, compare=False)
    assignment: NDArray[np.uint8] = field(repr=False)
    base_router: NDArray[np.uint8] = field(repr=False)
    coordinates: NDArray[np.float32] = field(repr=False)
    biases: NDArray[np.float32] = field(repr=False)

    def __post_init__(self) -> None:
        for name, dtype in ARRAYS.items():
            self._set_array(name, np.array(getattr(self, name), dtype=dtype), self.space.shapes[name])
        if (self.base_router > len(ROUTERS)).any():
            raise ValueError(f"a genome's routers must be none or one of {', '.join(ROUTERS)}")
        if not (np.sort(self.assignment, axis=1) == self.space.contiguous).all():
            raise ValueError("a genome's experts must have equally many neurons in every layer")

    def to_bytes(self) -> bytes:
        """Return the magic number, the sizes (five uint32) and the four arrays, little-endian."""
        space = self.space
        sizes = (space.dense.layers, space.dense.width, space.routers, space.experts, space.components)
        arrays = (np.dtype(dtype).newbyteorder("<") for dtype in ARRAYS.values())
        return HEADER.pack(MAGIC, *sizes) + b"".join(
            getattr(self, name).astype(dtype).tobytes() for name, dtype in zip(ARRAYS, arrays, strict=True)
        )

    @cached_property
    def _numbering(self) -> NDArray[np.int64]:
        """Experts of every layer in order of their first neurons: int64 [layers, N]."""
        firsts = np.stack([np.unique(row, return_index=True)[1] for row in self.assignment])
        return np.argsort(firsts, axis=1)

    @cached_property
    def _renumbered(self) -> NDArray[np.int64]:
        """Expert of every neuron under that numbering: int64 [layers, width]."""
        return np.take_along_axis(np.argsort(self._numbering, axis=1), self.assignment.astype(np.int64), axis=1)

    @cached_property
    def content_hash(self) -> str:
        numbering = self._numbering
        digest = hashlib.sha256(MAGIC + struct.pack("<I", self.space.components))
        digest.update(self._renumbered.astype(np.uint8).tobytes())
        digest.update(self.base_router.tobytes())
        # Measured routers belong to particular experts; without them, experts differ only in their neurons.
        digest.update((numbering * (self.base_router > 0)[:, None]).astype("<i8").tobytes())
        for array in (self.coordinates, self.biases):
            # Adding zero turns -0.0 into 0.0, so that equal arrays have equal bytes.
            digest.update((_renumber(array, numbering) + np.float32(0)).astype("<f4").tobytes())
        return digest.hexdigest()

    def express(self) -> FactorLlmEdit:
        """Return the edit; the space must be calibrated."""
        return self._edit

    @cached_property
    def _edit(self) -> FactorLlmEdit:
        start = self.space.statistics
        numbering = self._numbering
        shape = self.space.shapes["biases"]
        weight, bias = np.zeros((*shape, self.space.dense.hidden), np.float32), self.biases.copy()
        for number in np.unique(self.base_router[self.base_router > 0]).tolist():
            layers, name = self.base_router == number, ROUTERS[number - 1]
            # A baseline has one router; in a space with several routers, all of them are copies of it.
            weight[layers] = start[f"{name}_weight"].reshape(shape[0], -1, *weight.shape[2:])[layers]
            bias[layers] += start[f"{name}_bias"].reshape(shape[0], -1, shape[2])[layers]
        # Not a matrix product: its last digits, and so the hash, depend on the machine.
        for component, steps in enumerate(np.moveaxis(self.coordinates, 3, 0)):
            weight = weight + steps[..., None] * start["directions"][:, None, None, component]
            bias = bias - steps * start["offsets"][:, None, None, component]
        return FactorLlmEdit(
            order=np.argsort(self._renumbered, axis=1, kind="stable").astype(np.int32),
            router_weight=_renumber(weight, numbering),
            router_bias=_renumber(bias, numbering),
            active=self.space.active,
            output_scale=self.space.output_scale,
        )


def _renumber(array: NDArray[np.float32], numbering: NDArray[np.int64]) -> NDArray[np.float32]:
    """Reorder the experts of an array [layers, routers, N, ...] by `numbering` [layers, N]."""
    index = numbering[:, None].reshape(len(numbering), 1, -1, *[1] * (array.ndim - 3))
    return np.take_along_axis(array, index, axis=2)
