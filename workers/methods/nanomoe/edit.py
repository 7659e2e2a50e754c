"""The NanoMoE edit: chosen linear layers become `blockdiag(U) M blockdiag(V)` with given parameters of M.

Source: NanoMoE, Sec. 3: Eq. 1 and 2, the variants I, II and III, and Table 1.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.fitting import FitRows

Variant = Literal["I", "II", "III", "low_rank"]


@dataclass(frozen=True, slots=True)
class BlockForm:
    """The form of a block-mixed linear layer.

    Attributes:
        variant: Form of M's blocks: `a_ij I` (I), `diag(b_ij)` (II) or `diag(c_ij) + alpha_ij beta_ij^T` (III). With
            `low_rank` all blocks are the identity, which is a plain low-rank layer.
        blocks: Number of blocks K; 1 for `low_rank`.
        rank: Rank r of a block.
    """

    variant: Variant
    blocks: int
    rank: int

    @property
    def mixing_shape(self) -> tuple[int, ...]:
        """Shape of M's parameters as `moevolve.kernels.block_mix.block_mix` takes them; [0] for `low_rank`."""
        square = (self.blocks, self.blocks)
        shapes = {"I": square, "II": (*square, self.rank), "III": (3, *square, self.rank), "low_rank": (0,)}
        return shapes[self.variant]

    @property
    def unmixed(self) -> NDArray[np.float32]:
        """Parameters that make all blocks of M the identity, float32 [*mixing_shape]: the layer is plain low rank."""
        parameters = np.ones(self.mixing_shape, dtype=np.float32)
        if self.variant == "III":
            parameters[1:] = 0
        return parameters

    def parameters(self, outputs: int, inputs: int) -> int:
        """Number of parameters of a layer [d2, d1] without its bias (Table 1): (d1 + d2) r plus those of M."""
        return (inputs + outputs) * self.rank + int(np.prod(self.mixing_shape))


@dataclass(frozen=True)
class NanoMoeEdit:
    """M's parameters of every chosen linear layer; U and V follow from the layer's weight and M.

    Attributes:
        form: Form of all layers.
        layers: Names of the linear layers, as in `layers.0.mlp.up_proj`.
        mixing: M's parameters, float32 [layers, *form.mixing_shape]. `mixing - form.unmixed` is added to the fitted
            parameters.
        fit: Rounds of fitting U, V and M together before; 0 leaves all blocks of M the identity.
        rows: Tokens on which the layers' output error is minimised; None minimises the weights' error.

    Raises:
        UserError: The shapes disagree.
    """

    form: BlockForm
    layers: tuple[str, ...]
    mixing: NDArray[np.float32] = field(repr=False)
    fit: int = 0
    rows: FitRows | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mixing", np.ascontiguousarray(self.mixing, dtype=np.float32))
        expected = (len(self.layers), *self.form.mixing_shape)
        if self.mixing.shape != expected:
            raise UserError(f"a NanoMoE edit of this form needs mixing parameters {expected}, got {self.mixing.shape}")

    @cached_property
    def finite(self) -> bool:
        """Whether every parameter is finite."""
        return bool(np.isfinite(self.mixing).all())

    @cached_property
    def phenotype_hash(self) -> str:
        form = self.form
        head = f"nanomoe/2 {form.variant} K={form.blocks} r={form.rank} fit={self.fit} "
        digest = hashlib.sha256((head + " ".join(self.layers) + "\n").encode())
        digest.update(self.mixing.astype("<f4").tobytes())
        if self.rows is not None:
            digest.update(b"rows" + self.rows.fingerprint.encode())
        return digest.hexdigest()
