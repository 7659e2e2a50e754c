"""Choosing the neurons of kept experts jointly, by pruning a larger pool of candidates.

The neurons that are most important one by one aren't the best set, since neurons of different experts often do the
same. So all candidates of a kept expert are fitted together, and those whose loss the others compensate best are
pruned. With the ridge solution `w` and the regularised Gram matrix `H` of the features, removing feature j and
refitting the others raises the error by `|w_j|^2 / (H^-1)_jj` (Optimal Brain Surgeon, Hassibi and Stork, 1993, Eq. 5).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from moevolve.workers.contract.fitting import NeuronSettings
from moevolve.workers.methods.eep.neurons import ExpertNeurons, TopK

# Share of the remaining features pruned before the costs of all are computed again.
_STEP_SHARE = 0.25
# Each step considers this many times the features that it prunes, the cheapest ones.
_POOL = 2
# Rows of a float32 product that are added to a float64 sum at once.
_ROWS = 1024


def prune_features(gram: Tensor, right: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    """Remove features from a regression until `count` remain.

    `gram` is the Gram matrix of the features plus the ridge term, float64, and `right` the products of features and
    targets, float64 [features, outputs]. Returns the remaining features in ascending order, and their solution, float64
    [count, outputs]; None if `gram` isn't positive definite.
    """
    factor, failed = torch.linalg.cholesky_ex(gram)
    if int(failed):
        return None
    inverse = torch.cholesky_inverse(factor)
    solution, left = inverse @ right, torch.arange(len(gram), device=gram.device)
    while len(left) > count:
        pruned = _cheapest(inverse, solution, min(max(1, int(_STEP_SHARE * len(left))), len(left) - count))
        stay = torch.ones_like(left, dtype=torch.bool).index_fill_(0, pruned, False).nonzero()[:, 0]
        # Inverse and solution of the smaller system by the Schur complement.
        across = inverse[stay][:, pruned]
        taken = torch.linalg.solve(inverse[pruned][:, pruned], torch.cat((across.mT, solution[pruned]), dim=1))
        inverse = inverse[stay][:, stay] - across @ taken[:, : len(stay)]
        solution = solution[stay] - across @ taken[:, len(stay) :]
        left = left[stay]
    return left, solution


def _cheapest(inverse: Tensor, solution: Tensor, count: int) -> Tensor:
    """The features to prune next, chosen one by one: of two that do the same, losing the second would cost a lot."""
    pool = (solution.square().sum(dim=1) / inverse.diagonal()).argsort(stable=True)[: _POOL * count]
    # Inverse and solution side by side, since both lose the same multiple of a pruned feature's row. Each feature is
    # some operations on little data, which numpy starts in a fraction of torch's time.
    left = torch.cat((inverse[pool][:, pool], solution[pool]), dim=1).cpu().numpy()
    diagonal, part = left.diagonal(), left[:, len(pool) :]
    pruned: list[int] = []
    for _ in range(count):
        cost = np.einsum("ij,ij->i", part, part) / diagonal
        cost[pruned] = np.inf
        one = int(cost.argmin())
        pruned.append(one)
        left -= np.outer(left[:, one] / left[one, one], left[one])
        left[one, one] = 1.0  # where zero is left, and nothing could be divided by it
    return pool[torch.tensor(sorted(pruned), device=pool.device)]


def prune_neurons(
    source: ExpertNeurons,
    current: ExpertNeurons,
    ids: Tensor,
    hidden: Tensor,
    edited: TopK,
    scale: Tensor,
    residual: Tensor,
    ridge_lambda: float,
    settings: NeuronSettings,
    memory: int,
) -> Tensor:
    """Choose the neurons of every kept expert again, one expert after the other, with the others' outputs fixed.

    A kept expert's candidates are its present neurons and those with the largest mean square of `w h |down|` over its
    tokens: routing weight times activation times the norm of the neuron's output weights.

    Args:
        source: Neurons of all n experts.
        current: Neurons of the kept experts, with fitted output projections.
        ids: Present neurons of each kept expert; see `NeuronSelection.neurons`, also for what is returned.
        hidden: Inputs of the layer's experts, [tokens, hidden].
        edited: Routing of these tokens by the edited router, to kept experts.
        scale: Factors of the tokens on both sides of the regression, float32 [tokens, 1].
        residual: Target minus output of the layer times these factors, float32 [tokens, hidden].
        ridge_lambda: Ridge strength as a multiple of the features' mean square, summed over tokens.
        settings: The number of candidates.
        memory: Bytes that may be allocated; it limits the number of candidates.
    """
    ids, residual, width = ids.clone(), residual.clone(), ids.shape[1]
    every, importance = torch.arange(width), _importance(source, hidden, edited, scale, len(ids), memory)
    for kept in range(len(ids)):
        tokens, place = (edited[1] == kept).nonzero(as_tuple=True)
        count = candidate_count(width, settings, len(tokens), hidden.shape[1], memory)
        if count <= width:
            continue
        inputs, weights, factors = hidden[tokens], edited[0][tokens, place].float()[:, None], scale[tokens]
        target = residual[tokens]
        target += (current.features(kept, every, inputs, weights) * factors) @ current.down(kept).float()
        own = importance[kept]
        own[torch.cat((ids[:kept], ids[kept + 1 :])).flatten()] = -1.0  # no neuron is in two kept experts
        own[ids[kept]] = math.inf
        candidates = own.argsort(descending=True, stable=True)[:count]
        candidates = candidates[own[candidates] > 0].sort().values
        features = source.picked(candidates).features(0, torch.arange(len(candidates)), inputs, weights) * factors
        found = _prune_candidates(features, target, width, ridge_lambda)
        if found is not None:
            stay, residual[tokens] = found
            ids[kept] = candidates[stay]
    return ids


def candidate_count(width: int, settings: NeuronSettings, tokens: int, hidden: int, memory: int) -> int:
    """Number of candidates for a kept expert of `width` neurons; nothing is pruned unless there are more than those.

    It is limited to the largest one for which `pruning_bytes` stays within `memory`.
    """
    linear = 4 * tokens + 3 * 8 * hidden
    most = int((math.sqrt(linear**2 + 4 * 4 * 8 * memory) - linear) / (2 * 4 * 8))
    return min(int(settings.candidates * width), most)


def pruning_bytes(count: int, tokens: int, hidden: int) -> int:
    """Bytes to prune `count` candidates of a kept expert: features, four Gram matrices and three solutions."""
    return 4 * tokens * count + 4 * 8 * count**2 + 3 * 8 * count * hidden


def _importance(
    source: ExpertNeurons, hidden: Tensor, edited: TopK, scale: Tensor, retained: int, memory: int
) -> Tensor:
    """Importance of every neuron for every kept expert, float64 [n', n I]."""
    weights, chosen = edited[0].float(), edited[1]
    if source.scales_inputs:  # the activations of a token differ between the kept experts that it chooses
        hidden, chosen = (hidden[:, None] * weights[..., None].to(hidden.dtype)).flatten(0, 1), chosen.reshape(-1, 1)
        scale, weights = scale.repeat_interleave(weights.shape[1], dim=0), torch.ones_like(weights).view(-1, 1)
    shares = (
        hidden.new_zeros(len(hidden), retained, dtype=torch.float32).scatter_(1, chosen, weights) * scale
    ).square()
    importance = shares.new_zeros(retained, source.count * source.width, dtype=torch.float64)
    step = max(1, memory // (20 * sum(hidden.shape)))
    for expert in range(source.count):
        for part in torch.arange(source.width).split(step):
            squares = source.activations(expert, part, hidden).float().square()
            norms = source.down(expert)[part].to(hidden.device).float().square().sum(dim=1)
            importance[:, expert * source.width + part.to(hidden.device)] = ((shares.t() @ squares) * norms).double()
    return importance


def _prune_candidates(
    features: Tensor, target: Tensor, width: int, ridge_lambda: float
) -> tuple[Tensor, Tensor] | None:
    """The remaining candidates, [width], and the residual of their fit, [tokens, hidden]."""
    count = features.shape[1]
    gram = features.new_zeros(count, count, dtype=torch.float64)
    right = features.new_zeros(count, target.shape[1], dtype=torch.float64)
    for feature_rows, target_rows in zip(features.split(_ROWS), target.split(_ROWS), strict=True):
        gram += feature_rows.t() @ feature_rows
        right += feature_rows.t() @ target_rows
    gram.diagonal().add_(ridge_lambda * gram.diagonal().mean())
    found = prune_features(gram, right, width)
    if found is None:
        return None
    stay, solution = found
    return stay, target - features[:, stay] @ solution.float()
