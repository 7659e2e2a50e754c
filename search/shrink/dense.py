"""What is searched of a dense model: which neurons are active for a token."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from moevolve.evaluators.errors import UserError
from moevolve.search.shrink.budget import kept_share
from moevolve.search.shrink.options import ShrinkOptions
from moevolve.workers.contract.facts import DenseFacts

_EXPERTS = 8
"""Experts per network. With half of them active, 8 and 16 have measured alike, and better than 4."""


def dense_genome(request: ShrinkOptions, dense: DenseFacts | None) -> tuple[dict[str, Any], str]:
    """The section `genome` of a dense model's search, and a sentence for people about what was chosen.

    Raises:
        UserError: The request asks for what only mixtures of experts have, or the networks can't be divided so.
    """
    given = {"experts": request.experts, "neurons": request.neurons, "size": request.size, "speed": request.speed}
    for name, value in given.items():
        if value is not None:
            raise UserError(
                f"--{name} {value}: this model is dense, it has no experts; give --active, such as --active 50%, for a "
                "mixture of experts of which a token uses that share of the neurons"
            )
    if dense is None:
        raise UserError(f"--active {request.active}: the feed-forward networks of this model's family can't be divided")
    assert request.active is not None
    share = kept_share(request.active, "--active")
    if request.stock:
        raise UserError(
            f"--stock: --active {request.active} makes a mixture of experts with its own code; leave --stock out. Of a "
            "Llama or Mistral, `moevolve export SEARCH --form stock --dtype float32` makes a larger Mixtral afterwards"
        )
    if request.kind != "factorllm":
        text = f"{_EXPERTS} overlapping masks of neurons per network (tomoe), one per token"
        return {"kind": "tomoe", "experts": _EXPERTS, "budget": share}, f"--active {request.active}: {text}"
    active = Fraction(str(share)) * _EXPERTS
    if active.denominator != 1:
        raise UserError(
            f"--active {request.active}: factorllm makes {_EXPERTS} equal experts; give a multiple of "
            f"{1 / _EXPERTS:.1%}, or --kind tomoe"
        )
    text = f"{_EXPERTS} equal parts of the neurons of every network (factorllm), {active} per token"
    return {"kind": "factorllm", "experts": _EXPERTS, "active": int(active)}, f"--active {request.active}: {text}"
