"""Models with narrower experts, which are timed before it is known what they keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moevolve.workers.profiling.report import ProfiledModel, ProfileSettings
from moevolve.workers.profiling.widths import narrowed, time_widths

TOKENS = torch.tensor([[5, 6, 7, 9, 8, 4]])


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
@torch.inference_mode()
def test_a_narrowed_model_is_one_whose_other_neurons_give_nothing(
    checkpoint: Callable[[str], Path], family: str
) -> None:
    """The oracle zeroes the output projections of the neurons that are left out."""
    model, oracle = loaded(checkpoint(family)), loaded(checkpoint(family))
    transposed = family == "gpt_oss"  # its output projections are [n, I, H], others' [n, H, I]
    width = 8  # of 24
    for name, tensor in oracle.named_parameters():
        if name.endswith("experts.down_proj"):
            down = tensor if transposed else tensor.mT
            assert down.shape[1] == 24
            down[:, width:] = 0
    before = model(TOKENS).logits
    with narrowed(model, family, 1 / 3):
        narrow = [tensor for name, tensor in model.named_parameters() if name.endswith("experts.down_proj")]
        assert narrow and all(tensor.shape[1 if transposed else 2] == width for tensor in narrow)
        torch.testing.assert_close(model(TOKENS).logits, oracle(TOKENS).logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(model(TOKENS).logits, before)
    with narrowed(model, family, 1.0):
        assert torch.equal(model(TOKENS).logits, before)


def test_every_width_is_timed(checkpoint: Callable[[str], Path]) -> None:
    settings = ProfileSettings((2,), 6, 1, 1, "cpu", "float32", threads=1)
    seconds = time_widths(ProfiledModel("mixtral", str(checkpoint("mixtral"))), (1.0, 0.5), settings)
    assert len(seconds) == 2 and all(0 < each < 60 for each in seconds)
