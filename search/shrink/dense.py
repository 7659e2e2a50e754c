"""What is searched of a dense model: which neurons are active for a token, or which are kept."""

from __future__ import annotations

import math

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.eep.subsets import even_width
from moevolve.search.shrink.amounts import Chosen
from moevolve.search.shrink.goal import Goal
from moevolve.workers.contract.facts import DenseFacts

# Masks per network.
_EXPERTS = 8
# Sizes that are tried of a narrower model, at equal distances.
_SIZES = 32

Genome = dict[str, str | int | float]


def check_dense(goal: Goal) -> None:
    """Raise UserError if a request has an option for mixtures of experts only, or needs code that it doesn't allow."""
    amount = goal.amount
    if amount.kind in ("experts", "size"):
        raise UserError(
            f"{amount}: this model is dense, and --{amount.kind} is for mixtures of experts; give --neurons, such as "
            "--neurons 50%, for a smaller and faster model with that share of its neurons, or --active for a mixture "
            "of experts where a token uses that share"
        )
    if amount.kind == "active" and not goal.request.custom_code:
        raise UserError(
            f"{amount} makes a mixture of experts with its own code, which servers don't load; add --custom-code, or "
            "give --neurons"
        )


def dense_settings(goal: Goal, dense: DenseFacts) -> Chosen:
    """Choose what is searched of a dense model.

    Raises:
        UserError: See `check_dense`; or the networks can't be divided so.
    """
    check_dense(goal)
    amount = goal.amount
    if amount.kind == "keep_score":
        *_, largest = narrower_genomes(dense).values()  # until the number is found
        genome, preset, sentence = largest, "kept-neurons", "a dense model"
    elif amount.kind == "neurons":
        assert amount.share is not None
        kept = even_width(amount.share, dense.width)
        if not kept:
            raise UserError(f"{amount} keeps too little of {dense.width} neurons; give a larger share")
        genome, preset = _genome(kept, dense), "kept-neurons"
        sentence = f"{amount}: every feed-forward network keeps {kept} of {dense.width} neurons"
    else:
        assert amount.share is not None
        genome, preset = {"kind": "tomoe", "experts": _EXPERTS, "budget": amount.share}, "active-neurons"
        sentence = f"{amount}: {_EXPERTS} overlapping masks of neurons per network (tomoe), one per token"
    return Chosen(genome, preset, goal.request.repair != "none", sentence=sentence)


def _genome(kept: int, dense: DenseFacts) -> Genome:
    # The budget is exact as a decimal, and rounded down it would be that of fewer neurons.
    return {"kind": "tomoe", "budget": math.ceil(kept / dense.width * 1e9) / 1e9}


def narrower_genomes(dense: DenseFacts) -> dict[int, Genome]:
    """Return settings of genomes by the number of neurons that every network keeps, ascending."""
    sizes = {even_width(part / _SIZES, dense.width) for part in range(1, _SIZES)} - {0}
    return {kept: _genome(kept, dense) for kept in sorted(sizes)}
