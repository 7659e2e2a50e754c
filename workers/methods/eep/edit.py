"""The EEP edit: a router mapping and an expert merging matrix per MoE layer.

Source: Efficient Expert Pruning (arXiv 2407.00945), Eq. 5 (router mapping) and Eq. 6 (expert merging).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.contract.edits import prefix_hashes
from moevolve.workers.contract.fitting import FitRows
from moevolve.workers.methods.eep.accuracy import expected_losses

# `usage`: how often and how strongly experts are chosen. `importance`: sums of powers of routing weights and output
# norms, the parts of REAP's scores and others. `pairs`: products of the norms of two experts' weighted outputs.
Statistic = Literal["usage", "importance", "pairs"]


@dataclass(frozen=True, slots=True)
class SubsetMeasurement:
    """Settings of comparing subsets of a layer's experts with all of them, on a sample of tokens.

    Attributes:
        retained: Experts n' of a subset.
        active: Experts per token k of a subset, at most n'.
        layer_groups: Group of every MoE layer; the layers of a group keep the same experts.
        logits_space: True if a subset's routing weights are a softmax of its own logits. False if they are taken from
            the softmax over all n experts, and rescaled to sum 1 if the family does so.
        limit: Largest number of subsets to try exhaustively. If there are more, experts are dropped one by one.
        sample: Largest number of tokens in the sample.
    """

    retained: int
    active: int
    layer_groups: tuple[int, ...]
    logits_space: bool
    limit: int
    sample: int


@dataclass(frozen=True, slots=True)
class Until:
    """When scores of experts are accurate enough, and how long they are measured at most.

    Attributes:
        retained: Number of experts n' that are kept by their scores.
        loss: Largest expected loss by errors of the scores; see `moevolve.workers.methods.eep.accuracy`.
        tokens: Largest number of calibration tokens.
    """

    retained: int
    loss: float
    tokens: int


@dataclass(frozen=True, slots=True)
class ExpertsMeasurement:
    """Settings of measuring a MoE model's experts.

    Attributes:
        statistics: Statistics to measure, sorted.
        subsets: Subsets of experts to compare, or None.
        tokens: Approximate limit on the number of calibration tokens.
        until: Measure on more tokens until scores are accurate; needs `importance`, and only statistics that are sums
            over tokens. None measures on `tokens` only.
    """

    statistics: tuple[Statistic, ...]
    subsets: SubsetMeasurement | None
    tokens: int
    until: Until | None = None

    @property
    def most(self) -> int:
        return self.tokens if self.until is None else max(self.tokens, self.until.tokens)

    def is_met(self, arrays: Mapping[str, NDArray[np.number]]) -> bool:
        """Return whether the expected loss of every layer is small enough."""
        return self.until is None or float(expected_losses(arrays, self.until.retained).max()) <= self.until.loss

    def note(self, arrays: Mapping[str, NDArray[np.number]]) -> str:
        """Say how many tokens chose an expert, and what errors of its scores are expected to cost."""
        assert self.until is not None, "the number of tokens is fixed"
        counts, tokens = arrays["importance_sums"][:, :, 0, 0], int(arrays["importance_tokens"][0])
        ended = ""
        if not self.is_met(arrays):
            at_most = "; genome.calibration_most allows no more"
            ended = at_most if tokens >= self.most else "; more `calibration` rows would help"
        loss = expected_losses(arrays, self.until.retained).max()
        return (
            f"expert scores come from {tokens:,} tokens (median {np.median(counts):,.0f} per expert, least "
            f"{counts.min():,.0f}); this may cost a layer up to {loss:.2%} of its kept experts' scores{ended}"
        )


RouterSpace = Literal["probs", "logits"]


def stock_space(rule: RoutingRule) -> RouterSpace:
    """Space of the router mapping in which a pruned model's router is a smaller one of the same family."""
    return "probs" if rule.one_hot_folds and rule.has_scores else "logits"


def one_hot_layers(matrices: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Tell which of `matrices` [layers, n', n] have only one-hot rows: bool [layers]."""
    ones = matrices == 1
    binary = (ones | (matrices == 0)).all(axis=(1, 2))
    return binary & (ones.sum(axis=2) == 1).all(axis=1)


@dataclass(frozen=True)
class EepEdit:
    """Router mapping `W_RM` and expert merging `W_EM` of every MoE layer.

    Attributes:
        router_mapping: `W_RM`, float32 [layers, n', n], one matrix per MoE layer in order of depth.
        expert_merging: `W_EM`, float32 [layers, n', n].
        active: Experts per token k after the edit, 1 to n'.
        router_space: `probs` maps the scores of all n experts: the softmax as in the paper, or the family's own scores.
            `logits` maps the router's logits, so that the mapping folds into a smaller router. See
            `moevolve.kernels.routing`.
        skip_rows: Tokens to measure thresholds of dynamic skipping on, after the rest of the edit is applied; None
            skips nothing. With k = 2, the second expert is skipped if its weight is below the layer's threshold times
            the first's (`moevolve.workers.methods.eep.router`).
        width: Neurons of a kept expert; None keeps the original experts' width. It takes effect in a repair that
            chooses neurons.

    Raises:
        UserError: The shapes disagree, k is out of range, or experts are skipped and k isn't 2.
    """

    router_mapping: NDArray[np.float32] = field(repr=False)
    expert_merging: NDArray[np.float32] = field(repr=False)
    active: int
    router_space: RouterSpace = "probs"
    skip_rows: FitRows | None = field(default=None, repr=False)
    width: int | None = None

    def __post_init__(self) -> None:
        for name in ("router_mapping", "expert_merging"):
            # Torch takes contiguous float32 arrays over without a copy.
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), dtype=np.float32))
        shape = self.router_mapping.shape
        if len(shape) != 3 or shape != self.expert_merging.shape or 0 in shape:
            raise UserError(
                f"an EEP edit needs two matrices of one shape [layers, n', n], got router_mapping {shape} and "
                f"expert_merging {self.expert_merging.shape}"
            )
        if not 1 <= self.active <= self.retained:
            raise UserError(
                f"an EEP edit of {self.retained} experts can't have {self.active} active; use 1 to {self.retained}"
            )
        if self.skip_rows is not None and self.active != 2:
            raise UserError(f"dynamic skipping is defined for 2 active experts, this EEP edit has {self.active}")

    @property
    def layers(self) -> int:
        return int(self.router_mapping.shape[0])

    @property
    def retained(self) -> int:
        return int(self.router_mapping.shape[1])

    @property
    def experts(self) -> int:
        return int(self.router_mapping.shape[2])

    @cached_property
    def one_hot_mapping(self) -> NDArray[np.bool_]:
        """Layers whose `W_RM` is one-hot, bool [layers]."""
        return one_hot_layers(self.router_mapping)

    @cached_property
    def one_hot_merging(self) -> NDArray[np.bool_]:
        """Layers whose `W_EM` is one-hot, so that they need no merged weights, bool [layers]."""
        return one_hot_layers(self.expert_merging)

    def router_folds(self, rule: RoutingRule) -> bool:
        """Return whether a smaller router of the family's own kind computes the same routing as this edit.

        A mapping of logits always folds into one. A one-hot mapping of softmax scores does if the family rescales the
        top-k, since the softmax's scale cancels; a one-hot mapping of sigmoid scores always does.
        """
        return self.router_space == "logits" or (rule.one_hot_folds and bool(self.one_hot_mapping.all()))

    @cached_property
    def finite(self) -> bool:
        return bool(np.isfinite(self.router_mapping).all() and np.isfinite(self.expert_merging).all())

    @cached_property
    def phenotype_hash(self) -> str:
        head = f"eep/1 {self.router_mapping.shape} k={self.active} {self.router_space}".encode()
        digest = hashlib.sha256(head)
        for matrices in (self.router_mapping, self.expert_merging):
            digest.update(np.ascontiguousarray(matrices, dtype="<f4").tobytes())
        if self.skip_rows is not None:
            digest.update(b"skip" + self.skip_rows.fingerprint.encode())
        if self.width is not None:
            digest.update(f"widths {(self.width,) * self.layers}".encode())
        return digest.hexdigest()

    @cached_property
    def layer_hashes(self) -> tuple[str, ...]:
        head = f"eep/1 {self.router_mapping.shape[1:]} k={self.active} {self.router_space} ".encode()
        width = b"" if self.width is None else f"width {self.width}".encode()
        hashes = tuple(
            hashlib.sha256(head + mapping.tobytes() + merging.tobytes() + width).hexdigest()
            for mapping, merging in zip(self.router_mapping, self.expert_merging, strict=True)
        )
        if self.skip_rows is None:
            return hashes
        # A layer's threshold is measured on the outputs of all layers before it.
        return prefix_hashes(b"skip" + self.skip_rows.fingerprint.encode(), hashes)
