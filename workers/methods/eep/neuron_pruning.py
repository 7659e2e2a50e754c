"""Choosing the neurons of kept experts jointly, by pruning a larger pool of candidates.

The neurons that are most important one by one aren't the best set, since neurons of different experts often do the
same. So all candidates of a kept expert are fitted together, and those whose loss the others compensate best are
pruned. With the ridge solution `w` and the regularised Gram matrix `H` of the features, removing feature j and
refitting the others raises the error by `|w_j|^2 / (H^-1)_jj` (Optimal Brain Surgeon, Hassibi and Stork, 1993, Eq. 5).
"""

from __future__ import annotations

import math

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
    inverse, solution = inverse[pool][:, pool], solution[pool]
    remaining = torch.ones(len(pool), dtype=torch.bool, device=pool.device)
    for _ in range(count):
        cost = torch.where(remaining, solution.square().sum(dim=1) / inverse.diagonal(), math.inf)
        one = int(cost.argmin())
        share = inverse[:, one] / inverse[one, one]
        solution -= share[:, None] * solution[one]
        inverse -= share[:, None] * inverse[one]
        remaining[one] = False
    return pool[~remaining]


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
        settings: The number of candidates, and whether kept experts may share neurons.
        memory: Bytes that may be allocated; it limits the number of candidates.
    """
    ids, residual, width = ids.clone(), residual.clone(), ids.shape[1]
    every = torch.arange(width)
    for kept in range(len(ids)):
        tokens, place = (edited[1] == kept).nonzero(as_tuple=True)
        count = candidate_count(width, settings, len(tokens), hidden.shape[1], memory)
        if count <= width:
            continue
        inputs, weights = hidden[tokens], edited[0][tokens, place].float()[:, None]
        factors = scale[tokens]
        present = (current.features(kept, every, inputs, weights) * factors) @ current.down(kept).float()
        target = residual[tokens] + present
        importance = _importance(source, inputs, weights, factors, memory)
        if not settings.shared:
            importance[torch.cat((ids[:kept], ids[kept + 1 :])).flatten()] = -1.0
        importance[ids[kept]] = math.inf
        candidates = importance.argsort(descending=True, stable=True)[:count]
        candidates = candidates[importance[candidates] > 0].sort().values
        found = _prune_candidates(source, candidates, width, inputs, weights, factors, target, ridge_lambda)
        if found is not None:
            ids[kept], residual[tokens] = found
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


def _importance(source: ExpertNeurons, inputs: Tensor, weights: Tensor, factors: Tensor, memory: int) -> Tensor:
    """Importance of every neuron for one kept expert, float64 [n I]."""
    importance = torch.zeros(source.count * source.width, dtype=torch.float64, device=inputs.device)
    step = max(1, memory // (20 * (len(inputs) + inputs.shape[1])))
    for expert in range(source.count):
        for part in torch.arange(source.width).split(step):
            squares = (source.features(expert, part, inputs, weights) * factors).square().sum(dim=0)
            norms = source.down(expert)[part].to(inputs.device).float().square().sum(dim=1)
            importance[expert * source.width + part.to(inputs.device)] = (squares * norms).double()
    return importance


def _prune_candidates(
    source: ExpertNeurons,
    candidates: Tensor,
    width: int,
    inputs: Tensor,
    weights: Tensor,
    factors: Tensor,
    target: Tensor,
    ridge_lambda: float,
) -> tuple[Tensor, Tensor] | None:
    """The remaining candidates, [width], and the residual of their fit, [tokens, hidden]."""
    features = inputs.new_empty(len(inputs), len(candidates), dtype=torch.float32)
    for expert in (candidates // source.width).unique().tolist():
        columns = (candidates // source.width == expert).nonzero()[:, 0]
        values = source.features(expert, (candidates[columns] % source.width).cpu(), inputs, weights)
        features[:, columns] = values * factors
    gram = inputs.new_zeros(len(candidates), len(candidates), dtype=torch.float64)
    right = inputs.new_zeros(len(candidates), target.shape[1], dtype=torch.float64)
    for feature_rows, target_rows in zip(features.split(_ROWS), target.split(_ROWS), strict=True):
        gram += feature_rows.t() @ feature_rows
        right += feature_rows.t() @ target_rows
    gram.diagonal().add_(ridge_lambda * gram.diagonal().mean())
    found = prune_features(gram, right, width)
    if found is None:
        return None
    stay, solution = found
    return candidates[stay], target - features[:, stay] @ solution.float()
