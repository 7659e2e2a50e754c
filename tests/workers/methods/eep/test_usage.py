"""Counts of routers' choices in MoE layers, against counts from the paper's definitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from family_samples import sample_rows
from numpy.typing import NDArray
from usage_checks import SEQUENCES, TOKENS, check_routed, inputs_of

from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.engine.measuring import analyse_usage
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.router import EditableRouter
from moevolve.workers.model.resident import ResidentModel


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
    ("family", "kind", "space"),
    [
        ("mixtral", "full", "probs"),
        ("qwen2_moe", "crossed", "probs"),
        ("mixtral", "both", "probs"),
        ("qwen2_moe", "both", "logits"),
    ],
)
def test_experts_of_moe_layers_are_counted(
    resident: Callable[[str], ResidentModel], make_edit: Callable[..., EepEdit], family: str, kind: str, space: str
) -> None:
    model = resident(family)
    edit = None if kind == "full" else make_edit(family, kind, 4, 2, space)
    found = analyse_usage(model, edit or IdentityEdit(), SEQUENCES)
    assert found.tokens == TOKENS and not found.mixed
    inputs = inputs_of(model, edit or IdentityEdit())
    assert [layer.layer for layer in found.routed] == [layer.index for layer in model.layers]
    for position, (handle, layer) in enumerate(zip(model.layers, found.routed, strict=True)):
        route = plain_routing(edit, handle.router_weight.double().numpy(), position, handle.renormalise)
        check_routed(layer, [route(token) for token in inputs[handle.index].numpy()])
        assert layer.experts == (6 if edit is None else 4)
        expected = () if edit is None else tuple(np.abs(edit.expert_merging[position]).argmax(axis=1))
        assert layer.origins == expected
    assert isinstance(model.applied, IdentityEdit)


def test_a_skipped_second_expert_is_not_counted(
    resident: Callable[[str], ResidentModel], make_edit: Callable[..., EepEdit]
) -> None:
    model = resident("mixtral")
    edit = replace(make_edit("mixtral", "mapped", 4, 2, "logits"), skip_rows=sample_rows())
    with model.edited(edit):
        plans = [router.plan for layer in model.layers if isinstance(router := layer.gate, EditableRouter)]
        thresholds = [plan.skip_below for plan in plans if plan is not None and plan.skip_below is not None]
    found = analyse_usage(model, edit, SEQUENCES)
    inputs = inputs_of(model, edit)
    for position, (handle, layer) in enumerate(zip(model.layers, found.routed, strict=True)):
        route = plain_routing(edit, handle.router_weight.double().numpy(), position, True)
        choices = []
        for token in inputs[handle.index].numpy():
            (first, large), (second, small) = route(token).items()
            kept = small >= thresholds[position] * large
            choices.append({first: large, second: small} if kept else {first: 1.0})
        check_routed(layer, choices)
    counted = [int(layer.counts.sum()) for layer in found.routed]
    assert all(TOKENS < each < 2 * TOKENS for each in counted)
    assert found.active == sum(counted) / (3 * TOKENS)
