"""Residual streams computed layer by layer, against whole runs of one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from repair_samples import sequences_of
from torch import Tensor

from moevolve.workers.methods.repair.streams import ResidualStreams
from moevolve.workers.methods.shared import passes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTHS = (25, 3, 40, 11, 25, 1, 33, 18)
SEQUENCES = sequences_of(LENGTHS)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding": ("mixtral", {"sliding_window": 5}),
    "alternating": ("gpt_oss", {}),
    "first layer dense": ("deepseek_v3", {}),
    "shared expert": ("qwen2_moe", {}),
    "positions learnt": ("opt", {}),
    "parallel": ("phi", {}),
}


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_streams_are_those_of_whole_runs(
    name: str, tiny_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, settings = MODELS[name]
    monkeypatch.setattr(passes, "BATCH_COLUMNS", 60)
    model: Any = tiny_model(family, **settings)
    tower = model.model.decoder if family == "opt" else model.model
    expected: list[list[Tensor]] = [[] for _ in range(len(tower.layers) + 1)]
    handles = [
        tower.layers[0].register_forward_pre_hook(
            lambda _m, args, kwargs: expected[0].append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
    ]
    for i, layer in enumerate(tower.layers):
        handles.append(layer.register_forward_hook(lambda _m, _args, out, i=i: expected[i + 1].append(out)))
    for each in SEQUENCES:
        model(torch.tensor([each]))
    for handle in handles:
        handle.remove()
    whole = [torch.cat([part.reshape(-1, 32) for part in parts]) for parts in expected]
    found = ResidualStreams(model, SEQUENCES)
    assert (found.tokens, found.layers) == (sum(LENGTHS), 3)
    torch.testing.assert_close(found.embeddings(), whole[0])
    for i in range(3):
        out, seen = found.run_layer(i, whole[i])
        torch.testing.assert_close(out, whole[i + 1], rtol=2e-5, atol=2e-5)
        assert seen == ()
