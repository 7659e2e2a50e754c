"""The NanoMoE genome: the mixing matrix M of every chosen linear layer.

Source: NanoMoE, Sec. 3. U and V are no part of it: a worker derives them from the layer's weight and M. What is stored
is relative to the M that the layer's fit gives (see `NanoMoeSection.fit`): without a fit, M's parameters themselves.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moevolve.workers.methods.nanomoe.edit import NanoMoeEdit

if TYPE_CHECKING:
    from moevolve.search.genomes.nanomoe.space import NanoMoeSpace


@dataclass(frozen=True)
class NanoMoeGenome:
    """One candidate.

    Attributes:
        space: the space it belongs to.
        mixing: float32 [layers, *form.mixing_shape], read-only; see `NanoMoeEdit`.
    """

    space: NanoMoeSpace = field(repr=False, compare=False)
    mixing: NDArray[np.float32] = field(repr=False)

    def __post_init__(self) -> None:
        # Adding zero turns -0.0 into 0.0: equal parameters have equal bytes.
        mixing = np.array(self.mixing, dtype=np.float32) + np.float32(0)
        if mixing.shape != self.space.shape:
            raise ValueError(f"mixing has shape {mixing.shape}, the space has {self.space.shape}")
        mixing.flags.writeable = False
        object.__setattr__(self, "mixing", mixing)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NanoMoeGenome) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Magic, variant, K, r, layers (uint16 each) and a digest of their names, then M as little-endian float32."""
        return self.space.header + self.mixing.astype("<f4").tobytes()

    @cached_property
    def content_hash(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def express(self) -> NanoMoeEdit:
        """The layers' names beside their parameters."""
        return self._edit

    @cached_property
    def _edit(self) -> NanoMoeEdit:
        space = self.space
        assert space.tokens is None or space.rows is not None, "the space has to be calibrated before this is known"
        names = tuple(each.name for each in space.layers)
        return NanoMoeEdit(space.form, names, self.mixing, space.fit, space.start_seed, space.refine, space.rows)
