"""Counts of routers' choices in MoE layers, against counts from the paper's definitions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from edit_checks import Residents
from families import family_edit, sample_rows
from numpy.typing import NDArray
from usage_checks import SEQUENCES, TOKENS, check_routed, inputs_of

from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.engine.measuring import analyse_usage
from moevolve.workers.methods.eep.edit import EepEdit


def plain_routing(edit: EepEdit | None, gate: NDArray[np.float64], layer: int, rescale: bool) -> Any:
    """The paper's routing of one token, Eq. 5: {kept expert: weight}."""

    def route(hidden: NDArray[np.float64]) -> dict[int, float]:
        logits = gate @ hidden
        if edit is not None and edit.router_space == "logits":
            logits = edit.router_mapping[layer] @ logits
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
        if edit is not None and edit.router_space == "probs":
            scores = edit.router_mapping[layer] @ scores
        chosen = np.argsort(-scores)[: edit.active if edit else 2]
        total = scores[chosen].sum() if rescale else 1.0
        return {int(i): float(scores[i] / total) for i in chosen}

    return route


@pytest.mark.parametrize(
    ("family", "kind", "space", "skips"),
    [
        ("mixtral", "full", "probs", False),
        ("mixtral", "both", "probs", False),
        ("qwen2_moe", "both", "logits", False),
        ("mixtral", "mapped", "logits", True),
    ],
)
def test_experts_of_moe_layers_are_counted(
    resident: Residents, family: str, kind: str, space: str, skips: bool
) -> None:
    """A second expert that dynamic skipping leaves out isn't counted."""
    model = resident(family)
    edit = None if kind == "full" else family_edit(family, kind, 4, 2, space)
    if edit is not None and skips:
        edit = replace(edit, skip_rows=sample_rows())
    found = analyse_usage(model, edit or IdentityEdit(), SEQUENCES)
    assert isinstance(model.applied, IdentityEdit) and found.tokens == TOKENS
    inputs = inputs_of(model, edit or IdentityEdit())
    with model.edited(edit or IdentityEdit()):
        plans: list[Any] = [layer.gate.plan for layer in model.layers]
    for place, (handle, layer, plan) in enumerate(zip(model.layers, found.routed, plans, strict=True)):
        route = plain_routing(edit, handle.router_weight.double().numpy(), place, handle.renormalise)
        choices = [route(token) for token in inputs[handle.index].numpy()]
        if skips:
            choices = [without_second(choice, plan.skip_below) for choice in choices]
        check_routed(layer, choices)
        assert (layer.layer, layer.experts) == (handle.index, 6 if edit is None else 4)
        assert layer.origins == (() if edit is None else tuple(np.abs(edit.expert_merging[place]).argmax(axis=1)))
    counted = [int(layer.counts.sum()) for layer in found.routed]
    assert all(TOKENS < each < 2 * TOKENS if skips else each == 2 * TOKENS for each in counted)
    assert found.active == sum(counted) / (len(counted) * TOKENS)


def without_second(choice: dict[int, float], threshold: float) -> dict[int, float]:
    (first, large), (_, small) = choice.items()
    return choice if small >= threshold * large else {first: 1.0}
