"""NeuronSelection slots with the neurons whose fit leaves least undone, by leaving the others out.

What is worth most one by one is not the best together: neurons of different experts often do the same. So a slot's
candidates are fitted all at once, and those go whose loss the others make up for best. A feature j that leaves a ridge
regression costs `|w_j|^2 / (H^-1)_jj` once the others are fitted anew, with `w` the solution and `H` the features' Gram
matrix, ridge included (Optimal Brain Surgeon, Hassibi and Stork, 1993, Eq. 5).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moevolve.workers.contract.fitting import NeuronRecipe
from moevolve.workers.methods.eep.neurons import Chosen, ExpertNeurons

_AT_ONCE = 0.25
"""Share of the features that are left out before the costs of all are counted anew."""
_POOL = 2
"""So many times as many are looked at, one after the other."""
_ROWS = 1024
"""Rows of a product that are added to float64 at once."""


def eliminate(gram: Tensor, right: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    """Leave features out of a regression until `count` are left.

    Args:
        gram: of the features, ridge included, float64 [features, features].
        right: features times target, float64 [features, outputs].
        count: how many stay.

    Returns:
        Those that stay, int64 [count], ascending, and their solution, float64 [count, outputs]; None where `gram` is
        not positive definite.
    """
    factor, failed = torch.linalg.cholesky_ex(gram)
    if int(failed):
        return None
    inverse = torch.cholesky_inverse(factor)
    solution, left = inverse @ right, torch.arange(len(gram), device=gram.device)
    while len(left) > count:
        gone = _cheapest(inverse, solution, _left_out(len(left), count))
        stay = torch.ones_like(left, dtype=torch.bool).index_fill_(0, gone, False).nonzero()[:, 0]
        # The inverse without them, and the solution, by the Schur complement.
        across = inverse[stay][:, gone]
        taken = torch.linalg.solve(inverse[gone][:, gone], torch.cat((across.mT, solution[gone]), dim=1))
        inverse = inverse[stay][:, stay] - across @ taken[:, : len(stay)]
        solution = solution[stay] - across @ taken[:, len(stay) :]
        left = left[stay]
    return left, solution


def _cheapest(inverse: Tensor, solution: Tensor, out: int) -> Tensor:
    """The features that go next, one after the other: of two that do the same the second to go would cost a lot."""
    pool = (solution.square().sum(dim=1) / inverse.diagonal()).argsort(stable=True)[: _POOL * out]
    inverse, solution = inverse[pool][:, pool], solution[pool]
    there = torch.ones(len(pool), dtype=torch.bool, device=pool.device)
    for _ in range(out):
        cost = torch.where(there, solution.square().sum(dim=1) / inverse.diagonal(), math.inf)
        one = int(cost.argmin())
        share = inverse[:, one] / inverse[one, one]
        solution -= share[:, None] * solution[one]
        inverse -= share[:, None] * inverse[one]
        there[one] = False
    return pool[~there]


def _left_out(left: int, count: int) -> int:
    """How many go at once, of those that are left."""
    return min(max(1, int(_AT_ONCE * left)), left - count)


def eliminate_neurons(
    source: ExpertNeurons,
    now: ExpertNeurons,
    ids: Tensor,
    hidden: Tensor,
    edited: Chosen,
    missing: Tensor,
    ridge_lambda: float,
    recipe: NeuronRecipe,
    memory: int,
) -> Tensor:
    """Choose every slot's neurons, one slot after the other, while the others do what they do.

    Candidates are those whose activation on the slot's tokens, times its routing weight and the length of the neuron's
    output, has the largest mean square, and those that the slot has.

    Args:
        source: the neurons of all n experts.
        now: those in the slots, fitted.
        ids: which they are, int64 [n', width], neuron j of expert e as `e * I + j`.
        hidden: what goes into the layer's experts, [tokens, hidden].
        edited: how the edited router routes it, by slot.
        missing: what the slots leave undone, float32 [tokens, hidden].
        ridge_lambda: of the ridge, as a multiple of the features' mean square summed over tokens.
        recipe: how many candidates there are, and whether slots may share neurons.
        memory: bytes that may be taken; there are fewer candidates where it holds no more.

    Returns:
        As `ids`, each row ascending.
    """
    ids, missing, width = ids.clone(), missing.clone(), ids.shape[1]
    every = torch.arange(width)
    for slot in range(len(ids)):
        tokens, place = (edited[1] == slot).nonzero(as_tuple=True)
        count = candidates_of(width, recipe, len(tokens), hidden.shape[1], memory)
        if count <= width:
            continue
        into, share = hidden[tokens], edited[0][tokens, place].float()[:, None]
        wanted = missing[tokens] + (now.activations(slot, every, into).float() * share) @ now.down(slot).float()
        worth = _worth(source, into, share, memory)
        if not recipe.shared:
            worth[torch.cat((ids[:slot], ids[slot + 1 :])).flatten()] = -1.0
        worth[ids[slot]] = math.inf
        candidates = worth.argsort(descending=True, stable=True)[:count]
        candidates = candidates[worth[candidates] > 0].sort().values
        found = _fitted(source, candidates, width, into, share, wanted, ridge_lambda)
        if found is not None:
            ids[slot], missing[tokens] = found
    return ids


def candidates_of(width: int, recipe: NeuronRecipe, tokens: int, hidden: int, memory: int) -> int:
    """How many candidates a slot of `width` neurons has; not more than it there's nothing to choose."""
    return min(int(recipe.candidates * width), _most(tokens, hidden, memory))


def elimination_bytes(count: int, tokens: int, hidden: int) -> int:
    """What a slot takes with so many candidates: features, four Gram matrices, and three solutions."""
    return 4 * tokens * count + 4 * 8 * count**2 + 3 * 8 * count * hidden


def _most(tokens: int, hidden: int, memory: int) -> int:
    """The largest `count` for which `elimination_bytes` stays within the memory."""
    linear = 4 * tokens + 3 * 8 * hidden
    return int((math.sqrt(linear**2 + 4 * 4 * 8 * memory) - linear) / (2 * 4 * 8))


def _worth(source: ExpertNeurons, into: Tensor, share: Tensor, memory: int) -> Tensor:
    """Of every neuron to a slot, float64 [n I]."""
    worth = torch.zeros(source.count * source.width, dtype=torch.float64, device=into.device)
    step = max(1, memory // (20 * (len(into) + into.shape[1])))
    for expert in range(source.count):
        for part in torch.arange(source.width).split(step):
            squares = (source.activations(expert, part, into).float() * share).square().sum(dim=0)
            lengths = source.down(expert)[part].to(into.device).float().square().sum(dim=1)
            worth[expert * source.width + part.to(into.device)] = (squares * lengths).double()
    return worth


def _fitted(
    source: ExpertNeurons,
    candidates: Tensor,
    width: int,
    into: Tensor,
    share: Tensor,
    wanted: Tensor,
    ridge_lambda: float,
) -> tuple[Tensor, Tensor] | None:
    """The candidates that stay, [width], and what they leave undone, [tokens, hidden]."""
    features = into.new_empty(len(into), len(candidates), dtype=torch.float32)
    for expert in (candidates // source.width).unique().tolist():
        here = (candidates // source.width == expert).nonzero()[:, 0]
        values = source.activations(expert, (candidates[here] % source.width).cpu(), into)
        features[:, here] = values.float() * share
    gram = into.new_zeros(len(candidates), len(candidates), dtype=torch.float64)
    right = into.new_zeros(len(candidates), wanted.shape[1], dtype=torch.float64)
    for some, target in zip(features.split(_ROWS), wanted.split(_ROWS), strict=True):
        gram += some.t() @ some
        right += some.t() @ target
    gram.diagonal().add_(ridge_lambda * gram.diagonal().mean())
    found = eliminate(gram, right, width)
    if found is None:
        return None
    stay, solution = found
    return candidates[stay], wanted - features[:, stay] @ solution.float()
