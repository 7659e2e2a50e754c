"""The NanoMoE genome: the mixing matrix M of every chosen linear layer.

Source: NanoMoE, Sec. 3. U and V are not in the genome: a worker derives them from the layer's weight and M. M is stored
relative to the result of the layer's fit (see `NanoMoeSection.fit`); without a fit the genome has M's parameters.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.base import ArrayGenome
from moevolve.workers.methods.nanomoe.edit import NanoMoeEdit

if TYPE_CHECKING:
    from moevolve.search.genomes.nanomoe.space import NanoMoeSpace


@dataclass(frozen=True, eq=False)
class NanoMoeGenome(ArrayGenome):
    """One NanoMoE candidate: `mixing` are the parameters of M, as in `NanoMoeEdit`, read-only."""

    space: NanoMoeSpace = field(repr=False, compare=False)
    mixing: NDArray[np.float32] = field(repr=False)

    def __post_init__(self) -> None:
        # Adding zero turns -0.0 into 0.0, so that equal parameters have equal bytes.
        mixing = np.array(self.mixing, dtype=np.float32) + np.float32(0)
        self._set_array("mixing", mixing, self.space.shape)

    def to_bytes(self) -> bytes:
        """Return a header (`NanoMoeSpace.header`) and M as little-endian float32."""
        return self.space.header + self.mixing.astype("<f4").tobytes()

    @cached_property
    def content_hash(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def express(self) -> NanoMoeEdit:
        return self._edit

    @cached_property
    def _edit(self) -> NanoMoeEdit:
        space = self.space
        assert space.tokens is None or space.rows is not None, "the space isn't calibrated"
        names = tuple(each.name for each in space.layers)
        return NanoMoeEdit(space.form, names, self.mixing, space.fit, space.rows)
