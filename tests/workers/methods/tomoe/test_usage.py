"""Counts of routers' choices in masked networks, against counts from plain definitions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from usage_checks import SEQUENCES, inputs_of

from moevolve.workers.contract.usage import WORDS
from moevolve.workers.engine.measuring import analyse_usage
from moevolve.workers.methods.tomoe.edit import ToMoeEdit
from moevolve.workers.model.resident import ResidentModel


def test_experts_of_masked_networks_are_counted(resident: Callable[[str], ResidentModel]) -> None:
    rng, model = np.random.default_rng(2), resident("llama")
    kept = np.zeros((3, 4, 48), dtype=bool)
    for layer, width in enumerate((10, 20, 48)):
        for expert in range(4):
            kept[layer, expert, rng.permutation(48)[:width]] = True
    directions = rng.standard_normal((3, 3, 32))
    edit = ToMoeEdit(kept, rng.standard_normal((3, 4, 3)), directions)
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
        assert layer.neurons == ((10, 20)[index], int(kept[index].any(axis=0).sum()), 48)
