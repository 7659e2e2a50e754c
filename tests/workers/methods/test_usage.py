"""Counts of routers' choices in dense models' experts against the same from plain definitions."""

from __future__ import annotations

import numpy as np
import pytest
from dense_edits import divided, masked
from edit_checks import Residents
from usage_checks import SEQUENCES, TOKENS, check_routed, inputs_of

from moevolve.workers.contract.usage import WORDS
from moevolve.workers.engine.measuring import analyse_usage


def test_experts_of_divided_networks_are_counted(resident: Residents) -> None:
    model, edit = resident("llama"), divided(experts=4)
    found = analyse_usage(model, edit, SEQUENCES)
    # The stand-in takes the network's place, so that its inputs are seen in front of it.
    for index, layer in enumerate(found.routed):
        rows = inputs_of(model, edit)[index].numpy()
        logits = rows @ edit.router_weight[index, 0].T.astype(np.float64) + edit.router_bias[index, 0]
        check_routed(layer, [dict.fromkeys(np.argsort(-token)[:2].tolist(), 1.0) for token in logits])
        assert layer.layer == index
    assert found.tokens == TOKENS


def test_experts_of_masked_networks_are_counted(resident: Residents) -> None:
    model, edit = resident("llama"), masked((10, 20, 48))
    for _ in range(2):  # a second analysis begins at zero again
        found = analyse_usage(model, edit, SEQUENCES)
    inputs = inputs_of(model, edit)
    seen = np.concatenate(SEQUENCES)
    words = sorted(set(seen.tolist()), key=lambda word: (-int((seen == word).sum()), word))[:WORDS]
    assert [layer.layer for layer in found.routed] == [0, 1], "a layer that keeps all isn't routed"
    for index, layer in enumerate(found.routed):
        logits = inputs[index].numpy() @ (edit.router[index].astype(np.float64) @ edit.directions[index]).T
        assert layer.counts.tolist() == np.bincount(logits.argmax(axis=1), minlength=4).tolist()
        softmax = np.exp(logits - logits.max(axis=1, keepdims=True))
        assert layer.weights == pytest.approx((softmax / softmax.sum(axis=1, keepdims=True)).sum(axis=0), rel=1e-4)
        assert layer.together.tolist() == np.diag(layer.counts).tolist()
        assert found.words == tuple(map(str, words))
        for word, counts in zip(words, layer.by_word, strict=True):
            own = logits[seen == word].argmax(axis=1)
            assert counts.tolist() == np.bincount(own, minlength=4).tolist() and counts.any()
