"""Quantised checkpoints as published: they are dequantised as their formats define, and score like plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from family_samples import make_family_edit
from numpy.typing import NDArray
from packed_checkpoints import fp8_checkpoint, mxfp4_checkpoint, scaled
from torch import Tensor

from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.checkpoints.loading import load_model
from moevolve.workers.checkpoints.unpacking import equal_blocks, exact_unpacking
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.worker import EvaluationWorker

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

MakeModel = Callable[..., "PreTrainedModel"]
Floats = NDArray[np.float64]

SPLIT = PreparedSplit(
    *("words", "search", "rank", "accuracy", Matching(), 1, " "),
    tuple(Example(f"w{i} w{i + 7} w{2 * i}", (f"w{i + 4}",), (f"w{i + 4}", f"w{i + 5} w9")) for i in range(6, 30)),
)


def same_numbers(packed: ModelConfig, plain: ModelConfig) -> None:
    """Both checkpoints load equal tensors, in float32 and in the default bfloat16."""
    for dtype in ("float32", "bfloat16"):
        found = load_model(replace(packed, dtype="auto" if dtype == "bfloat16" else "float32"))[0].state_dict()
        expected = load_model(replace(plain, dtype=dtype))[0].state_dict()  # type: ignore[arg-type]
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name


def searched_alike(packed: ModelConfig, plain: ModelConfig, family: str) -> None:
    """The full model and a pruned one have the same scores from both checkpoints."""

    def replies(config: ModelConfig) -> list[EvaluationReply]:
        worker = EvaluationWorker(config, EngineConfig())
        edits = IdentityEdit(), make_family_edit(family, "prune")
        return [worker.evaluate(EvaluationRequest(edit, (SPLIT.ref,)), (SPLIT,)) for edit in edits]

    scores = []
    for one, other in zip(replies(packed), replies(plain), strict=True):
        assert one.failure is None
        (result,), (expected,) = one.results.values(), other.results.values()
        assert np.array_equal(result.outcomes, expected.outcomes)
        assert result.gold_logprob == expected.gold_logprob
        scores.append(result.gold_logprob)
    assert scores[0] != scores[1]


def test_fp8_blocks_that_do_not_divide_a_weight(
    tiny_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """As DeepSeek-V3's `kv_a_proj_with_mqa` is published: ceil(rows / block) rows of scales, the last block cut."""
    configs = fp8_checkpoint(tiny_model("deepseek_v3"), tiny_tokenizer, tmp_path)
    same_numbers(*configs)
    searched_alike(*configs, "deepseek_v3")


def test_mxfp4_as_published(tiny_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """GPT-OSS: `_blocks` [n, rows, blocks, 16] and `_scales` [n, rows, blocks] of transposed experts, with biases."""
    model = tiny_model("gpt_oss", intermediate_size=32, hidden_size=96, head_dim=24)
    configs = mxfp4_checkpoint(model, tiny_tokenizer, tmp_path)
    same_numbers(*configs)
    searched_alike(*configs, "gpt_oss")


@pytest.mark.parametrize("shape", [(576, 7168), (144, 130), (128, 256), (7, 129)])
def test_scales_of_equal_blocks_say_the_same_of_every_weight(shape: tuple[int, int]) -> None:
    scales = torch.rand([-(-side // 128) for side in shape], generator=torch.Generator().manual_seed(1))
    equal = equal_blocks(scales, shape, (128, 128))
    assert all(side % count == 0 for side, count in zip(shape, equal.shape, strict=True))
    whole = equal
    for dim, side in enumerate(shape):
        whole = whole.repeat_interleave(side // equal.shape[dim], dim)
    assert np.array_equal(whole.numpy(), scaled(np.ones(shape), scales.numpy(), 128))
    per_row = torch.ones(shape[0], 1)
    assert equal_blocks(per_row, shape, (128, 128)) is per_row or shape == (7, 129)


def test_four_bit_experts_are_unpacked_one_after_the_other_to_the_same_numbers() -> None:
    from transformers.integrations import mxfp4

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (8, 128, 16, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 130, (8, 128, 16), dtype=torch.uint8, generator=generator)
    at_once = mxfp4.dequantize_convertops(blocks, scales, torch.bfloat16)
    theirs, most = mxfp4.convert_moe_packed_tensors, 0

    def seen(blocks: Tensor, scales: Tensor, **settings: Any) -> Tensor:
        nonlocal most
        most = max(most, len(blocks))
        return theirs(blocks, scales, **settings)

    with pytest.MonkeyPatch.context() as patch, exact_unpacking():
        patch.setattr(mxfp4, "convert_moe_packed_tensors", seen)
        found = mxfp4.dequantize_convertops(blocks, scales, torch.bfloat16)
    assert torch.equal(found, at_once) and most == 1
