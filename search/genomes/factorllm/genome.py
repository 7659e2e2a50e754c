"""The FactorLLM genome: a division of every network's neurons into equal experts, and its routers.

Source: FactorLLM (arXiv 2408.11855), Sec. 3.2 and 3.3. The paper trains experts and routers by gradients; here the
experts keep the network's weights, and the division and the routers are searched. A router is

    logits(x) = W x + b + C (D x - o) + c

with `W`, `b` one of the calibration's routers (`ROUTERS`) or zeros, `D` the scaled principal directions of the
network's inputs, `o` the mean input's products with them, and coordinates `C` and biases `c` in units of a logit's
standard deviation over tokens. Experts are interchangeable: hash and edit number them by their first neurons.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moevolve.workers.methods.factorllm.edit import FactorLlmEdit

if TYPE_CHECKING:
    from moevolve.search.genomes.factorllm.space import FactorLlmSpace

HEADER = struct.Struct("<4s5I")
MAGIC = b"FLM1"
ROUTERS = ("router", "moefication", "cmoe")
"""Routers that a calibration may have: the closed form of the start, one for each linear layer, and baselines'."""
ARRAYS = {"experts": np.uint8, "anchored": np.uint8, "coordinates": np.float32, "biases": np.float32}


@dataclass(frozen=True)
class FactorLlmGenome:
    """One candidate.

    Attributes:
        space: the space it belongs to.
        experts: expert of every neuron, uint8 [layers, width], each of the N as often; read-only, as all arrays.
        anchored: which of the calibration's routers a layer's include, 1 for the first of `ROUTERS`, 0 for none: uint8
            [layers].
        coordinates: `C`, float32 [layers, routers, N, components].
        biases: `c`, float32 [layers, routers, N]; zeros in a space without them.
    """

    space: FactorLlmSpace = field(repr=False, compare=False)
    experts: NDArray[np.uint8] = field(repr=False)
    anchored: NDArray[np.uint8] = field(repr=False)
    coordinates: NDArray[np.float32] = field(repr=False)
    biases: NDArray[np.float32] = field(repr=False)

    def __post_init__(self) -> None:
        for name, dtype in ARRAYS.items():
            array = np.array(getattr(self, name), dtype=dtype)
            if array.shape != self.space.shapes[name]:
                raise ValueError(f"{name} has shape {array.shape}, the space has {self.space.shapes[name]}")
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        if (self.anchored > len(ROUTERS)).any():
            raise ValueError(f"a genome's routers must be none or one of {', '.join(ROUTERS)}")
        if not (np.sort(self.experts, axis=1) == self.space.in_order).all():
            raise ValueError("a genome's experts must have equally many neurons in every layer")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FactorLlmGenome) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Magic, sizes (five uint32) and the four arrays, little-endian."""
        space = self.space
        sizes = (space.dense.layers, space.dense.width, space.routers, space.n, space.components)
        arrays = (np.dtype(dtype).newbyteorder("<") for dtype in ARRAYS.values())
        return HEADER.pack(MAGIC, *sizes) + b"".join(
            getattr(self, name).astype(dtype).tobytes() for name, dtype in zip(ARRAYS, arrays, strict=True)
        )

    @cached_property
    def _numbering(self) -> NDArray[np.int64]:
        """The experts of every layer by their first neurons: int64 [layers, N]."""
        firsts = np.stack([np.unique(experts, return_index=True)[1] for experts in self.experts])
        return np.argsort(firsts, axis=1)

    @cached_property
    def _renumbered(self) -> NDArray[np.int64]:
        """The expert of every neuron under that numbering: int64 [layers, width]."""
        return np.take_along_axis(np.argsort(self._numbering, axis=1), self.experts.astype(np.int64), axis=1)

    @cached_property
    def content_hash(self) -> str:
        numbering = self._numbering
        digest = hashlib.sha256(MAGIC + struct.pack("<I", self.space.components))
        digest.update(self._renumbered.astype(np.uint8).tobytes())
        digest.update(self.anchored.tobytes())
        # The calibration's routers tell experts apart; without them only their neurons do.
        digest.update((numbering * (self.anchored > 0)[:, None]).astype("<i8").tobytes())
        for array in (self.coordinates, self.biases):
            # Adding zero turns -0.0 into 0.0: equal arrays have equal bytes.
            digest.update((_renumber(array, numbering) + np.float32(0)).astype("<f4").tobytes())
        return digest.hexdigest()

    def express(self) -> FactorLlmEdit:
        """The division and the routers of every layer. The space must be calibrated."""
        return self._edit

    @cached_property
    def _edit(self) -> FactorLlmEdit:
        start = self.space.measured
        numbering = self._numbering
        shape = self.space.shapes["biases"]
        weight, bias = np.zeros((*shape, self.space.dense.hidden), np.float32), self.biases.copy()
        for number in np.unique(self.anchored[self.anchored > 0]).tolist():
            layers, name = self.anchored == number, ROUTERS[number - 1]
            # A baseline has one router; where several must agree on an expert, all of them are that one.
            weight[layers] = start[f"{name}_weight"].reshape(shape[0], -1, *weight.shape[2:])[layers]
            bias[layers] += start[f"{name}_bias"].reshape(shape[0], -1, shape[2])[layers]
        # Term by term rather than by a matrix product, whose last digits, and so the hash, depend on the machine.
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
    """The experts' axis of [layers, routers, N, ...] in the order of `numbering` [layers, N]."""
    index = numbering[:, None].reshape(len(numbering), 1, -1, *[1] * (array.ndim - 3))
    return np.take_along_axis(array, index, axis=2)
