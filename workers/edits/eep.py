"""The EEP edit: a router mapping and an expert merging matrix per MoE layer.

Source: Efficient Expert Pruning (arXiv 2407.00945), Eq. 5 (router mapping) and Eq. 6 (expert merging).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

RouterSpace = Literal["probs", "logits"]


def is_one_hot(matrix: NDArray[np.float32]) -> bool:
    """Whether every row of `matrix` [n', n] is one-hot."""
    return bool(np.all((matrix == 0) | (matrix == 1)) and np.all(matrix.sum(axis=1) == 1))


@dataclass(frozen=True)
class EepEdit:
    """Router mapping `W_RM` and expert merging `W_EM` of every MoE layer.

    Attributes:
        router_mapping: float32 [layers, n', n], one matrix per MoE layer in order of depth.
        expert_merging: float32 [layers, n', n].
        active: experts per token k after the edit.
        router_space: `probs` maps the softmax over all n experts (the paper); `logits` maps the router's logits, so the
            mapping folds into a smaller gate.
    """

    router_mapping: NDArray[np.float32] = field(repr=False)
    expert_merging: NDArray[np.float32] = field(repr=False)
    active: int
    router_space: RouterSpace = "probs"

    @property
    def layers(self) -> int:
        return int(self.router_mapping.shape[0])

    @property
    def retained(self) -> int:
        return int(self.router_mapping.shape[1])

    @property
    def experts(self) -> int:
        return int(self.router_mapping.shape[2])

    def prunes_only(self, layer: int) -> bool:
        """Whether MoE layer `layer` needs no merged weights: every new expert is one of the originals."""
        return is_one_hot(self.expert_merging[layer])

    @cached_property
    def phenotype_hash(self) -> str:
        head = f"eep/1 {self.router_mapping.shape} k={self.active} {self.router_space}".encode()
        digest = hashlib.sha256(head)
        for matrices in (self.router_mapping, self.expert_merging):
            digest.update(np.ascontiguousarray(matrices, dtype="<f4").tobytes())
        return digest.hexdigest()
