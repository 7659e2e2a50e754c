"""What is searched of a dense model: which neurons are active for a token, or which are kept."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.eep.subsets import even_width
from moevolve.search.shrink.budget import kept_share
from moevolve.search.shrink.options import ShrinkOptions
from moevolve.workers.contract.facts import DenseFacts

# Experts per network. On the demo's dense model FactorLLM with half of 16 active is no better, of 4 worse.
_EXPERTS = 8
# Sizes that are tried of a narrower model, at equal distances.
_SIZES = 32


def dense_settings(request: ShrinkOptions, dense: DenseFacts) -> tuple[dict[str, Any], str]:
    """The genome and the preset of a dense model's search, and a sentence for people about what was chosen.

    Raises:
        UserError: The request asks for what only mixtures of experts have, or the networks can't be divided so.
    """
    given = {"experts": request.experts, "size": request.size}
    for name, value in given.items():
        if value is not None:
            raise UserError(
                f"--{name} {value}: this model is dense, and --{name} is for mixtures of experts; give --neurons, such "
                "as --neurons 50%, for a smaller and faster model with that share of its neurons, or --active for a "
                "mixture of experts of which a token uses that share"
            )
    if request.keep_score is not None:
        *_, largest = narrower_genomes(dense).values()  # until the number is found
        return {"genome": largest, "preset": "kept-neurons"}, ""
    if request.neurons is not None:
        return _narrower(request.neurons, dense)
    assert request.active is not None
    return _mixture(request, request.active)


def _narrower(wanted: str, dense: DenseFacts) -> tuple[dict[str, Any], str]:
    kept = even_width(kept_share(wanted), dense.width)
    if not kept:
        raise UserError(f"--neurons {wanted}: that is too little of {dense.width} neurons; give a larger share")
    text = f"--neurons {wanted}: every feed-forward network keeps {kept} of {dense.width} neurons"
    return {"genome": _genome(kept, dense), "preset": "kept-neurons"}, text


def _genome(kept: int, dense: DenseFacts) -> dict[str, Any]:
    # The budget is exact as a decimal, and rounded down it would be that of fewer neurons.
    return {"kind": "tomoe", "budget": math.ceil(kept / dense.width * 1e9) / 1e9}


def narrower_genomes(dense: DenseFacts) -> dict[int, dict[str, Any]]:
    """Settings of genomes by the number of neurons that every network keeps, ascending."""
    sizes = {even_width(part / _SIZES, dense.width) for part in range(1, _SIZES)} - {0}
    return {kept: _genome(kept, dense) for kept in sorted(sizes)}


def _mixture(request: ShrinkOptions, wanted: str) -> tuple[dict[str, Any], str]:
    share = kept_share(wanted, "--active")
    if not request.custom_code:
        raise UserError(
            f"--active {wanted} makes a mixture of experts with its own code, which servers don't load; add "
            "--custom-code, or give --neurons"
        )
    if request.kind != "factorllm":
        genome = {"kind": "tomoe", "experts": _EXPERTS, "budget": share}
        text = f"{_EXPERTS} overlapping masks of neurons per network (tomoe), one per token"
    else:
        active = Fraction(str(share)) * _EXPERTS
        if active.denominator != 1:
            raise UserError(
                f"--active {wanted}: factorllm makes {_EXPERTS} equal experts; give a multiple of "
                f"{1 / _EXPERTS:.1%}, or --kind tomoe"
            )
        genome = {"kind": "factorllm", "experts": _EXPERTS, "active": int(active)}
        text = f"{_EXPERTS} equal parts of the neurons of every network (factorllm), {active} per token"
    return {"genome": genome, "preset": "active-neurons"}, f"--active {wanted}: {text}"
