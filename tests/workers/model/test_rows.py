"""Sequences that share a row do not attend to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from families import representatives
from torch import Tensor

from moevolve.workers.families.decoder import decoder_layers
from moevolve.workers.families.registry import FAMILIES
from moevolve.workers.model.resident import ResidentModel

SEQUENCES = [tuple(np.random.default_rng(i).integers(3, 60, 3 + 5 * i).tolist()) for i in range(3)]


PACKED = ("mixtral", "gemma4_text", "deepseek_v3", "glm_moe_dsa", "hy_v4", "mistral_large4_text", "muse_spark_text")
PACKED += ("granitemoe_swa", "mimo_v2_flash", "llama", "opt", "phi", "gemma2", "cohere2")
"""A family of each way to tell sequences of a row apart: windows, indexers, eager attention, and numbers of its own."""
ALONE = "qwen3_next"
"""One of those that have every sequence in a row of its own."""


@pytest.mark.parametrize("family", representatives((*PACKED, ALONE), FAMILIES))
def test_every_layer_sees_what_it_sees_of_a_sequence_alone(
    resident: Callable[[str], ResidentModel], family: str
) -> None:
    model = resident(family)
    rows = model.rows(SEQUENCES)
    assert len(rows) == (1 if FAMILIES[family].packs else len(SEQUENCES))
    by_row = [_seen(model, lambda row=row: model.run([row])) for row in rows]
    found = [torch.cat(each, dim=1) for each in zip(*by_row, strict=True)]
    decoder = model.model.get_decoder()
    for sequence, columns in zip(SEQUENCES, np.split(np.arange(sum(map(len, SEQUENCES))), _ends()), strict=True):
        alone = _seen(model, lambda tokens=sequence: decoder(torch.tensor([tokens])))
        for together, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(together[:, columns], expected, rtol=1e-4, atol=1e-4)


def test_rows_keep_the_order_and_hold_no_more_than_they_may(resident: Callable[[str], ResidentModel]) -> None:
    model = resident("mixtral")
    sequences = [(i,) * length for i, length in enumerate((600, 424, 1, 2000, 3, 1021))]
    rows = model.rows(sequences)
    assert [token for row in rows for sequence in row for token in sequence] == [
        token for sequence in sequences for token in sequence
    ]
    assert [[len(sequence) for sequence in row] for row in rows] == [[600, 424], [1], [2000], [3, 1021]]


def _ends() -> list[int]:
    return np.cumsum([len(sequence) for sequence in SEQUENCES])[:-1].tolist()


@torch.inference_mode()
def _seen(model: ResidentModel, run: Callable[[], Any]) -> list[Tensor]:
    """Outputs of all decoder layers, [1, tokens, hidden] each."""
    seen: list[Tensor] = []
    layers = decoder_layers(model.model)
    handles = [layer.register_forward_hook(lambda _m, _a, out: seen.append(_first(out))) for layer in layers]
    run()
    for handle in handles:
        handle.remove()
    return seen


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]
