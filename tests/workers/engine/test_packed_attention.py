"""Packed columns against plain passes of `transformers`, one sequence at a time.

That every layer of every family sees what it should is compared in `tests/workers/model/test_rows.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from moevolve.workers.engine.columns import lay_out
from moevolve.workers.engine.forward import Forward
from moevolve.workers.engine.packed_attention import packed, packs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MakeModel = Callable[..., "PreTrainedModel"]
SEQUENCES = [
    (1, 5, 6, 7, 8, 9, 10, 11),
    (1, 5, 6, 20),
    (1, 5, 6, 7, 8, 30, 31),
    (40, 41),
    (1, 5),
    (40, 41, 42, 43, 44, 45),
]
VARIANTS: dict[str, dict[str, Any]] = {
    "mixtral-window": {"sliding_window": 3},
    "mixtral-eager": {"attn_implementation": "eager"},
    "opt": {},
}


@pytest.fixture(params=list(VARIANTS))
def model(request: pytest.FixtureRequest, tiny_model: MakeModel) -> PreTrainedModel:
    settings = dict(VARIANTS[request.param])
    attention = settings.pop("attn_implementation", None)
    made = tiny_model(request.param.split("-")[0], **settings)
    if attention is not None:
        made.set_attn_implementation(attention)
    return made


@torch.no_grad()
def test_logits_are_those_of_plain_passes(model: PreTrainedModel) -> None:
    forward = Forward(model, 64)
    assert forward.batcher.layout == "packed"
    columns = lay_out(SEQUENCES, "packed", 64, forward.device)
    assert columns.ids.numel() == 8 + 1 + 2 + 6
    kind = model.config._attn_implementation
    for tokens, path in zip(SEQUENCES, columns.places, strict=True):
        found = forward.logits(columns, path[: len(tokens)])
        expected = model(torch.tensor([tokens])).logits[0]
        np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=2e-5)
    assert model.config._attn_implementation == kind


def test_a_pass_that_fails_leaves_the_model_as_it_was(tiny_model: MakeModel) -> None:
    model = tiny_model("mixtral")
    columns = lay_out(SEQUENCES, "packed", 64, torch.device("cpu"))

    def fail() -> None:
        assert model.config._attn_implementation == model.model.layers[0].self_attn.config._attn_implementation
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"), packed(model, columns.attention):
        fail()
    assert model.config._attn_implementation == "sdpa"
    assert torch.isfinite(model(columns.ids).logits).all()


def test_what_cannot_be_packed_is_padded(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mixtral")
    layers = DynamicCache(config=model.config).layers
    assert packs(model, layers)
    assert not packs(model, [*layers, object()]), "a state of its own kind"
    monkeypatch.setattr(model.config, "_attn_implementation", "flash_attention_2")
    assert not packs(model, layers)
    monkeypatch.undo()
    monkeypatch.setattr(type(model), "_supports_attention_backend", False)
    assert not packs(model, layers)
    assert Forward(model, 64).batcher.layout == "padded"
