"""What tests of watched models share: prompts, what goes into layers, and counts from plain definitions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

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


def counted(choices: list[dict[int, float]], experts: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Counts, weights and pairs of per-token choices {expert: weight}."""
    pairs = Counter((one, two) for choice in choices for one in choice for two in choice)
    together = np.array([[pairs[i, j] for j in range(experts)] for i in range(experts)])
    weights = np.array([sum(choice.get(i, 0.0) for choice in choices) for i in range(experts)])
    return np.diag(together), weights, together


def check_routed(layer: RoutedLayer, choices: list[dict[int, float]]) -> None:
    counts, weights, together = counted(choices, layer.experts)
    assert layer.counts.tolist() == counts.tolist()
    assert layer.together.tolist() == together.tolist()
    assert layer.weights == pytest.approx(weights, rel=1e-4)
