"""Quantised checkpoints as published: they are dequantised as their formats define, and score like plain numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from family_samples import make_family_edit
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
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
BLOCK = 5
"""Rows and columns of a block, so that none of the tiny model's sides (6 to 96) is a multiple of it."""


def scaled(values: Floats, scales: Floats, block: int) -> Floats:
    """Weight (i, j) times the scale of block (i // b, j // b)."""
    rows, columns = (np.arange(side) // block for side in values.shape)
    return values * scales[rows][:, columns]


def fp8_values(codes: NDArray[np.uint8]) -> Floats:
    """OCP 8-bit floating point, E4M3: a sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities."""
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = (codes >> 3 & 0xF).astype(np.int64), (codes & 7) / 8
    normal = np.ldexp(1 + mantissa, exponent - 7)
    return sign * np.where(exponent == 0, np.ldexp(mantissa, -6), normal)


def mxfp4_values(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> Floats:
    """OCP microscaling, MXFP4: blocks of 32 E2M1 numbers, two in a byte, the first one low, times 2^(scale - 127).

    Args:
        blocks: [..., blocks, 16].
        scales: [..., blocks].

    Returns:
        [..., 32 blocks].
    """
    codes = np.stack([blocks & 0xF, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    exponent, mantissa = (codes >> 1 & 3).astype(np.int64), (codes & 1) / 2
    size = np.where(exponent == 0, mantissa, np.ldexp(1 + mantissa, exponent - 1))
    values = np.where(codes & 8, -size, size) * np.ldexp(1.0, scales.astype(np.int64) - 127)[..., None]
    return values.reshape(*blocks.shape[:-2], -1)


def write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    packed: Mapping[str, Tensor],
    plain: Mapping[str, Floats],
    **settings: Any,
) -> tuple[ModelConfig, ModelConfig]:
    """Write a checkpoint twice: with some tensors quantised, and with the same numbers in float32.

    Args:
        model: Model, which provides the other tensors.
        tokenizer: Tokenizer of the model.
        folder: Folder for both checkpoints.
        packed: Tensors of the quantised checkpoint by name.
        plain: Values of the quantised tensors by name in the float32 checkpoint.
        settings: Further fields of the quantised checkpoint's config.
    """
    for name in ("packed", "plain"):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    state = load_file(folder / "plain" / "model.safetensors")
    whole = state | {name: torch.from_numpy(values).float().contiguous() for name, values in plain.items()}
    save_file(whole, folder / "plain" / "model.safetensors", {"format": "pt"})
    kept = {name: tensor for name, tensor in state.items() if name not in plain}
    save_file(kept | dict(packed), folder / "packed" / "model.safetensors", {"format": "pt"})
    file = folder / "packed" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    one, other = (ModelConfig(str(folder / name), device="cpu", dtype="float32") for name in ("packed", "plain"))
    return one, other


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
    model = tiny_model("deepseek_v3")
    model.save_pretrained(tmp_path / "names")
    numbers, packed, plain = np.random.default_rng(3), {}, {}
    for name, tensor in load_file(tmp_path / "names" / "model.safetensors").items():
        if not name.endswith(("proj.weight", "_mqa.weight")) or tensor.ndim != 2:
            continue
        codes = tensor.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        scales = numbers.uniform(0.4, 1.7, [-(-side // BLOCK) for side in codes.shape]).astype(np.float32)
        packed |= {
            name: torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn),
            f"{name}_scale_inv": torch.from_numpy(scales),
        }
        plain[name] = scaled(fp8_values(codes), scales.astype(np.float64), BLOCK)
    shapes = {values.shape for values in plain.values()}
    assert any(rows % -(-rows // BLOCK) for rows, _ in shapes), "rows that rows of scales don't divide"
    assert any(rows % BLOCK and not rows % -(-rows // BLOCK) for rows, _ in shapes), "and that they divide by chance"
    settings = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    configs = write(model, tiny_tokenizer, tmp_path, packed, plain, quantization_config=settings | {"fmt": "e4m3"})
    same_numbers(*configs)
    searched_alike(*configs, "deepseek_v3")


def test_mxfp4_as_published(tiny_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """GPT-OSS: `_blocks` [n, rows, blocks, 16] and `_scales` [n, rows, blocks] of transposed experts, with biases."""
    model = tiny_model("gpt_oss", intermediate_size=32, hidden_size=96, head_dim=24)
    numbers, packed, plain = np.random.default_rng(4), {}, {}
    for name, tensor in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = tensor.shape
        blocks = numbers.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = numbers.integers(119, 126, (experts, outputs, inputs // 32), dtype=np.uint8)
        packed |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
        plain[name] = mxfp4_values(blocks, scales).transpose(0, 2, 1)
    configs = write(
        model, tiny_tokenizer, tmp_path, packed, plain, quantization_config={"quant_method": "mxfp4"}, dtype=None
    )
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
