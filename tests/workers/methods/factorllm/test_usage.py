"""Counts of routers' choices in divided networks, against counts from plain definitions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from usage_checks import SEQUENCES, TOKENS, check_routed, inputs_of

from moevolve.workers.engine.measuring import analyse_usage
from moevolve.workers.methods.factorllm.edit import FactorLlmEdit
from moevolve.workers.model.resident import ResidentModel


def test_experts_of_divided_networks_are_counted(resident: Callable[[str], ResidentModel]) -> None:
    rng, model = np.random.default_rng(1), resident("llama")
    order = np.stack([rng.permutation(48) for _ in range(3)])
    weight, bias = rng.standard_normal((3, 1, 4, 32)), rng.standard_normal((3, 1, 4))
    edit = FactorLlmEdit(order, weight, bias, 2, output_scale=2.0)
    found = analyse_usage(model, edit, SEQUENCES)
    # The stand-in takes the network's place, so that its inputs are seen in front of it.
    for index, layer in enumerate(found.routed):
        rows = inputs_of(model, edit)[index].numpy()
        logits = rows @ edit.router_weight[index, 0].T.astype(np.float64) + edit.router_bias[index, 0]
        check_routed(layer, [dict.fromkeys(np.argsort(-token)[:2].tolist(), 2.0) for token in logits])
        assert layer.neurons == (12, 48, 48) and layer.layer == index
    assert found.tokens == TOKENS
