"""An alignment of experts: in which order, and with which sign, the hidden neurons of every expert are to lie.

Averages of two networks' weights mean something only where equal places hold equal roles (Git Re-Basin, arXiv
2209.04836, Sec. 2 and 3). A gated expert `down(act(gate x) * up x)` stays the same function when its neurons (rows of
gate and up, columns of down) change places together, and also when a neuron's up row and down column both change sign.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError


@dataclass(frozen=True)
class Alignment:
    """Where every expert's neurons go.

    Attributes:
        codes: int16 or int32 [layers, n, width], one row per expert of every MoE layer. Place i is taken by neuron
            `codes[.., i]`; where that is negative, by neuron `-1 - codes[.., i]` with its sign changed.

    Raises:
        UserError: a row doesn't hold every neuron once.
    """

    codes: NDArray[np.signedinteger] = field(repr=False)

    def __post_init__(self) -> None:
        codes = np.ascontiguousarray(self.codes)
        if codes.ndim != 3 or codes.dtype not in (np.int16, np.int32):
            raise UserError(f"an alignment needs integers [layers, n, width], got {codes.dtype} {codes.shape}")
        if not (np.sort(sources(codes), axis=-1) == np.arange(codes.shape[-1])).all():
            raise UserError(f"an alignment must hold each of {codes.shape[-1]} neurons of an expert once")
        object.__setattr__(self, "codes", codes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """MoE layers, experts n per layer, neurons per expert."""
        layers, experts, width = self.codes.shape
        return layers, experts, width

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the content."""
        head = f"alignment/1 {self.shape} ".encode()
        return hashlib.sha256(head + self.codes.astype("<i4").tobytes()).hexdigest()


def sources(codes: NDArray[np.signedinteger]) -> NDArray[np.signedinteger]:
    """Which neuron takes every place, signs apart."""
    return np.where(codes < 0, -1 - codes, codes)


def encode(neurons: NDArray[np.integer], flipped: NDArray[np.bool_]) -> NDArray[np.signedinteger]:
    """Codes of neurons and signs, in the smallest of the two integer types that holds them."""
    codes = np.where(flipped, -1 - neurons, neurons)
    return codes.astype(np.int16 if codes.shape[-1] <= np.iinfo(np.int16).max else np.int32)


def step(now: NDArray[np.signedinteger], then: NDArray[np.signedinteger]) -> NDArray[np.signedinteger]:
    """How neurons that lie as `now` says have to move to lie as `then` says.

    Args:
        now: codes [n, width].
        then: likewise.

    Returns:
        Codes [n, width] that refer to the places of `now`.
    """
    # The place that every neuron has now, and then the place now of the neuron wanted in every place.
    moved = np.take_along_axis(np.argsort(sources(now), axis=-1), sources(then), axis=-1)
    return encode(moved, (np.take_along_axis(now, moved, axis=-1) < 0) != (then < 0))


def in_place(experts: int, width: int) -> NDArray[np.signedinteger]:
    """Codes [n, width] of experts whose neurons lie as they were loaded."""
    return encode(np.tile(np.arange(width), (experts, 1)), np.zeros((experts, width), dtype=np.bool_))
