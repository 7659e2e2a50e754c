"""The FactorLLM edit: every dense feed-forward network is divided into equal experts with linear routers.

Source: FactorLLM (arXiv 2408.11855), Eq. 4 and 5 (permutation of neurons), Eq. 2 (linear router with bias).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError

Partition = Literal["start", "kmeans"]


@dataclass(frozen=True, slots=True)
class FactorLlmMeasurement:
    """Settings of the measurement of a partition with closed-form routers, and of the inputs' principal directions.

    Attributes:
        experts: Experts N per network.
        active: Experts K per token.
        routers: Routers R per network: 1, or one for each of its linear layers.
        partition: Partition of the neurons: `start`, equal slices in order, or balanced k-means on their input weights.
        components: Number of principal directions of every network's inputs.
        ridge: Ridge strength of the routers as a share of the inputs' mean variance.
        tokens: See `Measurement`.
    """

    experts: int
    active: int
    routers: int
    partition: Partition
    router_bias: bool
    components: int
    ridge: float
    tokens: int


@dataclass(frozen=True, slots=True)
class MoeficationMeasurement:
    """Settings of MoEfication's partition and routers; the tokens only determine the scale of the logits."""

    experts: int
    tokens: int


@dataclass(frozen=True, slots=True)
class CmoeMeasurement:
    """Settings of CMoE's partition and routers, beside those that `FactorLlmMeasurement` has too.

    Attributes:
        shared: Experts, of all N, that every token runs; fewer than N.
        firing: Neurons that a token activates, those with the largest activations.
    """

    experts: int
    shared: int
    firing: int
    ridge: float
    tokens: int


@dataclass(frozen=True)
class FactorLlmEdit:
    """A permutation of neurons, and routers, for every network.

    Attributes:
        order: Neurons of each network ordered by expert, int32 [layers, width]. Expert i has the i-th of N equal
            sections, in ascending order.
        router_weight: Weights of the routers, float32 [layers, routers, N, hidden].
        router_bias: Biases of the routers, float32 [layers, routers, N].
        active: Experts K that each router chooses for a token. An expert runs if all routers choose it.

    Raises:
        UserError: The shapes disagree, K is out of range, or a row of `order` is not a permutation.
    """

    order: NDArray[np.int32] = field(repr=False)
    router_weight: NDArray[np.float32] = field(repr=False)
    router_bias: NDArray[np.float32] = field(repr=False)
    active: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", np.ascontiguousarray(self.order, dtype=np.int32))
        for name in ("router_weight", "router_bias"):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), dtype=np.float32))
        shapes = self.order.shape, self.router_weight.shape, self.router_bias.shape
        if (
            [len(shape) for shape in shapes] != [2, 4, 3]
            or shapes[1][:3] != shapes[2]
            or shapes[0][0] != shapes[1][0]
            or 0 in (*shapes[0], *shapes[1])
        ):
            raise UserError(
                "a FactorLLM edit needs order [layers, width], router_weight [layers, routers, N, hidden] and "
                f"router_bias [layers, routers, N], got {shapes[0]}, {shapes[1]} and {shapes[2]}"
            )
        if self.width % self.experts:
            raise UserError(f"a FactorLLM edit can't divide {self.width} neurons among {self.experts} experts equally")
        if not 1 <= self.active <= self.experts:
            raise UserError(
                f"a FactorLLM edit of {self.experts} experts can't have {self.active} active; use 1 to {self.experts}"
            )
        if not (np.sort(self.order, axis=1) == np.arange(self.width)).all():
            raise UserError(f"a FactorLLM edit's order must hold each of {self.width} neurons once in every layer")

    @property
    def layers(self) -> int:
        return int(self.order.shape[0])

    @property
    def width(self) -> int:
        return int(self.order.shape[1])

    @property
    def routers(self) -> int:
        return int(self.router_weight.shape[1])

    @property
    def experts(self) -> int:
        return int(self.router_weight.shape[2])

    @property
    def hidden(self) -> int:
        return int(self.router_weight.shape[3])

    @cached_property
    def finite(self) -> bool:
        """Whether every router entry is finite."""
        return bool(np.isfinite(self.router_weight).all() and np.isfinite(self.router_bias).all())

    @cached_property
    def phenotype_hash(self) -> str:
        head = f"factorllm/1 {self.router_weight.shape} {self.width} k={self.active}"
        digest = hashlib.sha256(head.encode())
        digest.update(self.order.astype("<i4").tobytes())
        for matrices in (self.router_weight, self.router_bias):
            # Adding zero turns -0.0 into 0.0, so that equal routers have equal bytes.
            digest.update((matrices + np.float32(0)).astype("<f4").tobytes())
        return digest.hexdigest()

    @cached_property
    def layer_hashes(self) -> tuple[str, ...]:
        head = f"factorllm/1 {self.router_weight.shape[1:]} k={self.active}".encode()
        layers = zip(self.order, self.router_weight, self.router_bias, strict=True)
        return tuple(hashlib.sha256(head + b"".join(part.tobytes() for part in layer)).hexdigest() for layer in layers)
