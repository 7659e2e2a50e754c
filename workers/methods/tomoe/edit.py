"""The ToMoE edit: overlapping expert masks on feed-forward networks, and masks on the dimensions of attention heads.

Source: ToMoE (arXiv 2501.15316), Eq. 2 and 3 (experts of a network), Eq. 4 and 5 (attention heads), App. B.3 (masked
form).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError


@dataclass(frozen=True, slots=True)
class ToMoeMeasurement:
    """Settings of the calibration that ToMoE genomes start from.

    Attributes:
        attention: Measure attention heads too.
        experts: Number of experts to fit per network.
        share: Share of a network's neurons that an expert keeps while experts are fitted.
        components: Number of directions of every layer's inputs.
        sample: Limit on the number of tokens whose coordinates are stored, to estimate the load of experts.
        tokens: See `Measurement`.
    """

    attention: bool
    experts: int
    share: float
    components: int
    sample: int
    tokens: int


@dataclass(frozen=True)
class HeadMasks:
    """Masks on the dimensions of attention heads, shared by all heads of a layer.

    Attributes:
        pairs: Kept pairs of query and key dimensions i and i + head_dim / 2, which rotary embedding rotates together,
            bool [layers, head_dim / 2].
        active: Number of value and output dimensions that a token keeps, int64 [layers]. These have its largest scores
            `value_bias + value_router @ (directions @ input)`; of equal scores the first.
        value_bias: Biases of the scores, float32 [layers, head_dim].
        value_router: Weights of the scores, float32 [layers, head_dim, components].
        directions: Directions of the inputs that scores depend on, float32 [layers, components, hidden].
    """

    pairs: NDArray[np.bool_] = field(repr=False)
    active: NDArray[np.int64] = field(repr=False)
    value_bias: NDArray[np.float32] = field(repr=False)
    value_router: NDArray[np.float32] = field(repr=False)
    directions: NDArray[np.float32] = field(repr=False)

    def __post_init__(self) -> None:
        kinds: dict[str, type[np.generic]] = {"pairs": np.bool_, "active": np.int64}
        for name in ("pairs", "active", "value_bias", "value_router", "directions"):
            array = np.ascontiguousarray(getattr(self, name), dtype=kinds.get(name, np.float32))
            object.__setattr__(self, name, array)
        layers, head_dim, components = self.value_router.shape
        expected = {
            "pairs": (layers, head_dim // 2),
            "active": (layers,),
            "value_bias": (layers, head_dim),
            "directions": (layers, components, self.directions.shape[-1]),
        }
        for name, shape in expected.items():
            if getattr(self, name).shape != shape:
                raise UserError(f"head masks: {name} has shape {getattr(self, name).shape}, expected {shape}")
        if not self.pairs.any(axis=1).all() or (self.active < 1).any() or (self.active > head_dim).any():
            raise UserError(f"head masks: every layer must keep a pair of dimensions and 1 to {head_dim} values")

    @property
    def head_dim(self) -> int:
        return int(self.value_bias.shape[1])

    @property
    def static(self) -> NDArray[np.bool_]:
        """Layers in which all tokens keep the same value dimensions, as scores don't depend on them: bool [layers]."""
        return np.asarray(~self.value_router.any(axis=(1, 2)))

    @property
    def arrays(self) -> tuple[NDArray[np.generic], ...]:
        """All arrays, with packed masks, in the order in which they are hashed."""
        active = self.active.astype("<i8")
        return np.packbits(self.pairs, axis=1), active, self.value_bias, self.value_router, self.directions


@dataclass(frozen=True)
class ToMoeEdit:
    """Expert masks and a top-1 router for every dense feed-forward network.

    Attributes:
        kept: Neurons that each expert keeps, bool [layers, N, width]; the experts of a layer keep equally many.
        router: Weights of the router, float32 [layers, N, components]. A token's logits are
            `router @ (directions @ input)`, and it runs the expert with the largest one; of equal logits the first.
        directions: Directions of the inputs that logits depend on, float32 [layers, components, hidden].
        heads: Masks on attention heads, or None.

    Raises:
        UserError: The shapes disagree, or the experts of a layer keep no neuron or not equally many.
    """

    kept: NDArray[np.bool_] = field(repr=False)
    router: NDArray[np.float32] = field(repr=False)
    directions: NDArray[np.float32] = field(repr=False)
    heads: HeadMasks | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, dtype in (("kept", np.bool_), ("router", np.float32), ("directions", np.float32)):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), dtype=dtype))
        layers, experts, _ = self.kept.shape
        if self.router.shape[:2] != (layers, experts) or self.directions.shape[:2] != (layers, self.router.shape[2]):
            raise UserError(
                f"a ToMoE edit's arrays disagree: kept {self.kept.shape}, router {self.router.shape}, directions "
                f"{self.directions.shape}"
            )
        widths = self.kept.sum(axis=2)
        if (widths != widths[:, :1]).any() or (widths == 0).any():
            raise UserError("the experts of a ToMoE layer must keep equally many neurons, and one at least")
        if self.heads is not None and len(self.heads.active) != layers:
            raise UserError(f"a ToMoE edit of {layers} networks has head masks for {len(self.heads.active)} layers")

    @property
    def layers(self) -> int:
        return int(self.kept.shape[0])

    @property
    def experts(self) -> int:
        return int(self.kept.shape[1])

    @property
    def width(self) -> int:
        """Neurons of an unedited network."""
        return int(self.kept.shape[2])

    @property
    def hidden(self) -> int:
        return int(self.directions.shape[2])

    @cached_property
    def widths(self) -> NDArray[np.int64]:
        """Neurons that each expert of a layer keeps: int64 [layers]."""
        return self.kept[:, 0].sum(axis=1, dtype=np.int64)

    @cached_property
    def finite(self) -> bool:
        """Whether every entry is finite."""
        arrays = [self.router, self.directions]
        if self.heads is not None:
            arrays += [self.heads.value_bias, self.heads.value_router, self.heads.directions]
        return all(bool(np.isfinite(array).all()) for array in arrays)

    @cached_property
    def phenotype_hash(self) -> str:
        head = f"tomoe/1 {self.kept.shape} {self.router.shape[2]} {self.hidden}"
        digest = hashlib.sha256(head.encode())
        arrays: tuple[NDArray[Any], ...] = (np.packbits(self.kept, axis=2), self.router, self.directions)
        if self.heads is not None:
            digest.update(f" heads {self.heads.value_router.shape}".encode())
            arrays += self.heads.arrays
        for array in arrays:
            # Adding zero turns -0.0 into 0.0, so that equal arrays have equal bytes.
            digest.update(((array + np.float32(0)).astype("<f4") if array.dtype == np.float32 else array).tobytes())
        return digest.hexdigest()

    @cached_property
    def layer_hashes(self) -> tuple[str, ...]:
        arrays: tuple[NDArray[np.generic], ...] = (self.kept, self.router, self.directions)
        if self.heads is not None:
            arrays += self.heads.arrays
        head = f"tomoe/1 {[array.shape[1:] for array in arrays]}".encode()
        layers = zip(*arrays, strict=True)
        return tuple(hashlib.sha256(head + b"".join(part.tobytes() for part in layer)).hexdigest() for layer in layers)
