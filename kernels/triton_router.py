"""The router of EEP (arXiv 2407.00945, Eq. 5) in one Triton kernel: scores, a token's own mapping, top-k, rescaling.

Semantics are those of `moevolve.kernels.routing`, sums in float32 in another order. Weights agree with the torch path
to about 1e-5; where two experts' ranks are nearer than that (or equal: here the lower index goes first), the
two may choose differently. That is why this is a named option and no default: see `moevolve.kernels.fused_router`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moevolve.kernels.routing import POSITIVE_EPS, SUM_EPS
from moevolve.kernels.routing_rule import RoutingRule

_SUM_EPS = tl.constexpr(SUM_EPS)
_POSITIVE_EPS = tl.constexpr(POSITIVE_EPS)


def route(
    logits: Tensor,
    owner: Tensor,
    mapping: Tensor,
    biases: Tensor | None,
    active: int,
    rule: RoutingRule,
    selected_alone: bool,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel, a program per token. All tensors are contiguous and on one device.

    Args:
        logits: [tokens, n], any floating dtype.
        owner: int64 [tokens].
        mapping: float32 [P, n', n], or one-hot as int64 [P, n'].
        biases: correction biases of the new experts, float32 [P, n'], or None.
        active: experts per token k <= n'.
        rule: softmax or sigmoid, without groups.
        selected_alone: with a one-hot mapping, take the softmax of the selected logits only.

    Returns:
        Weights float32 [tokens, k] and indices int64 [tokens, k].
    """
    tokens, count = logits.shape
    weights = torch.empty((tokens, active), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((tokens, active), dtype=torch.int64, device=logits.device)
    if tokens == 0:
        return weights, chosen
    retained, one_hot = mapping.shape[1], mapping.dim() == 2
    with torch.cuda.device_of(logits):
        _route[(tokens,)](
            logits,
            owner,
            mapping,
            mapping if biases is None else biases,
            weights,
            chosen,
            rule.scale,
            COUNT=count,
            RETAINED=retained,
            ACTIVE=active,
            WIDE=triton.next_power_of_2(count),
            NEW=triton.next_power_of_2(retained),
            PICKS=triton.next_power_of_2(active),
            SIGMOID=rule.scores == "sigmoid",
            ONE_HOT=one_hot,
            ALONE=one_hot and selected_alone,
            BIASED=biases is not None,
            RESCALE=rule.renormalise,
            num_warps=1 if one_hot or count * retained <= 1024 else 4,
        )
    return weights, chosen


@triton.jit
def _softmax(logits):  # type: ignore[no-untyped-def]
    grown = tl.exp(logits - tl.max(logits, axis=0))
    return grown / tl.sum(grown, axis=0)


@triton.jit
def _route(  # type: ignore[no-untyped-def]
    logits_at,
    owner_at,
    mapping_at,
    biases_at,
    weights_at,
    chosen_at,
    scale,
    COUNT: tl.constexpr,
    RETAINED: tl.constexpr,
    ACTIVE: tl.constexpr,
    WIDE: tl.constexpr,
    NEW: tl.constexpr,
    PICKS: tl.constexpr,
    SIGMOID: tl.constexpr,
    ONE_HOT: tl.constexpr,
    ALONE: tl.constexpr,
    BIASED: tl.constexpr,
    RESCALE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    candidate = tl.load(owner_at + token)
    old, new = tl.arange(0, WIDE), tl.arange(0, NEW)
    real = new < RETAINED
    all_logits = tl.load(logits_at + token * COUNT + old, mask=old < COUNT, other=float("-inf")).to(tl.float32)
    if ONE_HOT:
        picked = tl.load(mapping_at + candidate * RETAINED + new, mask=real, other=0)
        own = tl.load(logits_at + token * COUNT + picked, mask=real, other=float("-inf")).to(tl.float32)
        if SIGMOID:
            mapped = tl.sigmoid(own)
        elif ALONE:
            mapped = _softmax(own)
        else:
            top = tl.max(all_logits, axis=0)
            mapped = tl.exp(own - top) / tl.sum(tl.exp(all_logits - top), axis=0)
    else:
        scores = tl.sigmoid(all_logits) if SIGMOID else _softmax(all_logits)
        at = mapping_at + (candidate * RETAINED + new)[:, None] * COUNT + old[None, :]
        rows = tl.load(at, mask=real[:, None] & (old < COUNT)[None, :], other=0.0)
        mapped = tl.sum(rows * scores[None, :], axis=1)
    ranks = mapped
    if BIASED:
        ranks += tl.load(biases_at + candidate * RETAINED + new, mask=real, other=0.0)
    ranks = tl.where(real, ranks, float("-inf"))
    slot = tl.arange(0, PICKS)
    weights = tl.zeros((PICKS,), tl.float32)
    chosen = tl.zeros((PICKS,), tl.int32)
    left = real
    for pick in tl.static_range(ACTIVE):
        # Experts already chosen rank below all others, whatever the ranks are.
        best = tl.argmax(tl.where(left, ranks, float("-inf")), axis=0)
        best = tl.minimum(best, RETAINED - 1)  # with ranks that are not numbers it could be anything
        weight = tl.sum(tl.where(new == best, mapped, 0.0), axis=0)
        weights = tl.where(slot == pick, weight, weights)
        chosen = tl.where(slot == pick, best, chosen)
        left = left & (new != best)
    if RESCALE:
        total = tl.sum(weights, axis=0)
        if ONE_HOT:
            weights = weights / (total + _POSITIVE_EPS)
        else:
            weights = tl.where(total > _SUM_EPS, weights / tl.maximum(total, _SUM_EPS), 1.0 / ACTIVE)
    here = token * ACTIVE + slot
    tl.store(weights_at + here, weights * scale, mask=slot < ACTIVE)
    tl.store(chosen_at + here, chosen.to(tl.int64), mask=slot < ACTIVE)
