"""What tests of watched models share: prompts, what goes into layers, and counts from plain definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moevolve.workers.contract.usage import RoutedLayer
from moevolve.workers.model.resident import ResidentModel

SEQUENCES = [tuple(np.random.default_rng(i).integers(3, 97, 4 + 3 * i).tolist()) for i in range(6)]
TOKENS = sum(map(len, SEQUENCES))


def inputs_of(model: ResidentModel, edit: Any) -> dict[int, torch.Tensor]:
    """What goes into every layer's feed-forward block, float64 [tokens, hidden]."""
    seen: dict[int, list[torch.Tensor]] = {}
    with model.edited(edit), torch.inference_mode():
        handles = []
        for index, layer in enumerate(model.model.get_decoder().layers):

            def keep(_: Any, args: Any, index: int = index) -> None:
                seen.setdefault(index, []).append(args[0].flatten(0, -2).double())

            handles.append(layer.mlp.register_forward_pre_hook(keep))
        for sequence in SEQUENCES:
            model.model.model(torch.tensor([sequence]), use_cache=False)
        for handle in handles:
            handle.remove()
    return {index: torch.cat(rows) for index, rows in seen.items()}


def check_routed(layer: RoutedLayer, choices: list[dict[int, float]]) -> None:
    """Compare a layer with per-token choices {expert: weight}."""
    counts = [sum(expert in choice for choice in choices) for expert in range(layer.experts)]
    weights = [sum(choice.get(expert, 0.0) for choice in choices) for expert in range(layer.experts)]
    assert layer.counts.tolist() == counts
    assert layer.weights == pytest.approx(np.array(weights), rel=1e-4)
