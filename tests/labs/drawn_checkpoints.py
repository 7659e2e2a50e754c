"""Valid quantised checkpoints, drawn with a seed: the settings that a format's own library knows, and their numbers.

A case is a small Qwen3-MoE with some quantised matrices. Its numbers are plain float64 from the codes that were
drawn, or the library's own. Some cases have one setting more, which must be applied, change nothing, or be refused by
name; see `FORMATS`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from packed_checkpoints import Drawn, fp8_values, modelopt, scaled
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.formats.registry import UnpackedTensor
from moevolve.workers.checkpoints.loading import check_weights, load_config, packing
from moevolve.workers.checkpoints.shards import read_tensor
from moevolve.workers.contract.settings import ModelConfig

# Settings of a case, its tensors by name, and numbers by the names of matrices.
Case = tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]


def write_plain(folder: Path) -> None:
    """Write the model that is quantised: one layer of three experts, with sides of 32 and 64."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 32, "head_dim": 16}
    more = {"num_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 1, "tie_word_embeddings": False}
    words = [f"w{i}" for i in range(4, 40)]
    save_tiny_model(folder, "qwen3_moe", words, 3, num_attention_heads=2, num_key_value_heads=2, **sizes, **more)


def _some(rng: Generator, items: Any) -> Any:
    items = list(items)
    return items[int(rng.integers(len(items)))]


def _words(codes: Any, bits: int, less: int = 0) -> Tensor:
    """Codes of a row in int32 words, the first one in the lowest bits, less a number."""
    grouped = np.asarray(codes, np.int64).reshape(len(codes), -1, 32 // bits)
    packed = sum(grouped[:, :, place] << bits * place for place in range(32 // bits))
    return torch.from_numpy((np.asarray(packed) - less).astype(np.uint32).view(np.int32))


def gptq(rng: Generator, matrices: Mapping[str, Tensor]) -> Case:
    """GPTQ: bits, groups in any order, zero points of both versions, and settings of modules by expressions."""
    settings: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": _some(rng, (2, 4, 8)),
        "group_size": _some(rng, (-1, 16, 32)),
        "desc_act": bool(rng.random() < 0.5),
        "sym": bool(rng.random() < 0.5),
        **_some(rng, ({}, {"checkpoint_format": "gptq"}, {"format": "gptq_v2"}, {"checkpoint_format": "gptq_v2"})),
    }
    own = [
        (r"+:.*\.down_proj$", {"bits": 8}),
        (r".*experts\.[02]\.", {"bits": 2, "group_size": 16}),
        (r"-:.*v_proj", {}),
        (r"+:.*self_attn\.(q|k)_proj", {"bits": 4, "sym": False}),
    ]
    if rng.random() < 0.6:
        settings["dynamic"] = dict(own[i] for i in rng.permutation(len(own))[: 1 + int(rng.integers(4))])
    newer = "gptq_v2" in settings.values()
    packed, plain = {}, {}
    for name, tensor in matrices.items():
        stem, (rows, columns) = name.removesuffix("weight"), tensor.shape
        mine = dict(settings)
        for pattern, changes in settings.get("dynamic", {}).items():
            if re.match(pattern.removeprefix("+:").removeprefix("-:"), stem.removesuffix(".")):
                mine = {} if pattern.startswith("-:") else mine | changes
                break
        if not mine:
            continue
        bits, group = mine["bits"], columns if mine["group_size"] < 0 else mine["group_size"]
        group_of = np.arange(columns) // group
        if mine["desc_act"]:
            group_of = rng.permutation(group_of)
        zeros = rng.integers(0, 2**bits, (columns // group, rows))
        if mine["sym"]:
            zeros[:] = 2 ** (bits - 1)
        # As GPTQModel writes the first version: ones are subtracted from words, and a zero borrows from its neighbours.
        # Symmetric ones it has written without that, too, under the name of the first version.
        ones = 0 if newer or (mine["sym"] and rng.random() < 0.5) else (2**32 - 1) // (2**bits - 1)
        scales = rng.integers(8, 16, zeros.shape) / 256.0
        codes = rng.integers(0, 2**bits, (columns, rows))
        packed |= {
            f"{stem}qweight": _words(codes.T, bits).T.contiguous(),
            f"{stem}qzeros": _words(zeros, bits, ones),
            f"{stem}scales": torch.from_numpy(scales).half(),
        }
        if mine["desc_act"] or rng.random() < 0.7:
            packed[f"{stem}g_idx"] = torch.from_numpy(group_of.astype(np.int32))
        plain[name] = ((codes - zeros[group_of]) * scales[group_of]).T
    return settings, packed, plain


def awq(rng: Generator, matrices: Mapping[str, Tensor]) -> Case:
    """AWQ as AutoAWQ's GEMM has it, with the names that programs have for its settings."""
    group = _some(rng, (-1, 16, 32))
    settings = {"quant_method": "awq", _some(rng, ("bits", "w_bit")): 4, "zero_point": bool(rng.random() < 0.5)}
    settings |= {_some(rng, ("group_size", "q_group_size")): group}
    settings |= _some(rng, ({}, {"version": "gemm"}, {"version": "GEMM"}, {"checkpoint_format": "gemm"}))
    order, packed, plain = [0, 2, 4, 6, 1, 3, 5, 7], {}, {}
    for name, tensor in matrices.items():
        stem, (rows, columns) = name.removesuffix("weight"), tensor.shape
        size = columns if group < 0 else group
        codes, zeros = rng.integers(0, 16, (columns, rows)), rng.integers(0, 16, (columns // size, rows))
        scales = rng.integers(8, 16, zeros.shape) / 256.0
        ordered = [each.reshape(len(each), -1, 8)[..., order].reshape(each.shape) for each in (codes, zeros)]
        packed |= {
            f"{stem}qweight": _words(ordered[0], 4),
            f"{stem}qzeros": _words(ordered[1], 4),
            f"{stem}scales": torch.from_numpy(scales).half(),
        }
        plain[name] = ((codes - zeros.repeat(size, 0)) * scales.repeat(size, 0)).T
    return settings, packed, plain


def fp8(rng: Generator, matrices: Mapping[str, Tensor]) -> Case:
    """FP8 by block, row or matrix, with the names that programs have for the scales."""
    kind = _some(rng, ("block", "row", "matrix"))
    settings: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": _some(rng, ("dynamic", "static"))}
    block = _some(rng, (8, 24))
    settings |= (
        {"weight_block_size": [block, block]} if kind == "block" else _some(rng, ({}, {"weight_block_size": None}))
    )
    scale, packed, plain = _some(rng, ("weight_scale", "weight_scale_inv")), {}, {}
    for name, tensor in matrices.items():
        stem, (rows, columns) = name.removesuffix("weight"), tensor.shape
        codes = (0.3 * tensor).to(torch.float8_e4m3fn).view(torch.uint8).numpy().copy()
        shape = {"block": (-(-rows // block), -(-columns // block)), "row": (rows, 1), "matrix": ()}[kind]
        scales = rng.uniform(0.4, 1.7, shape).astype(np.float32)
        packed |= {name: torch.from_numpy(codes).view(torch.float8_e4m3fn), f"{stem}{scale}": torch.tensor(scales)}
        if settings["activation_scheme"] == "static":
            packed[f"{stem}input_scale"] = torch.tensor(0.02)
        values, exact = fp8_values(codes), scales.astype(np.float64)
        plain[name] = scaled(values, exact, block) if kind == "block" else values * exact
    return settings, packed, plain


def nvfp4(rng: Generator, matrices: Mapping[str, Tensor]) -> Case:
    """ModelOpt's NVFP4, in the older and the newer spelling of its settings."""
    newer = {
        "config_groups": {
            "group_0": {
                "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                "targets": ["Linear"],
            }
        },
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.29.0"},
    }
    older = {"exclude_modules": ["lm_head"], "group_size": 16, "kv_cache_quant_algo": "FP8"}
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4"} | _some(rng, (newer, older))
    packed, plain = {}, {}
    for name, tensor in matrices.items():
        parts, plain[name] = modelopt(Drawn(rng, (tensor.shape[0], tensor.shape[1]), 16))
        packed |= {f"{name.removesuffix('weight')}{part}": each.contiguous() for part, each in parts.items()}
    return settings, packed, plain


def compressed(rng: Generator, matrices: Mapping[str, Tensor]) -> Case:
    """compressed-tensors, packed and rounded by the library itself, in two groups whose targets overlap."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.utils.match import match_targets

    def weights() -> tuple[str, dict[str, Any]]:
        form = _some(rng, ("pack-quantized", "pack-quantized", "int-quantized", "float-quantized"))
        if form == "float-quantized":
            by = _some(rng, ({"strategy": "tensor"}, {"strategy": "channel"}))
            return form, {"num_bits": 8, "type": "float", "symmetric": True, **by}
        bits = int(rng.integers(2, 9)) if form == "pack-quantized" else 8
        by = _some(rng, ({"strategy": "channel"}, {"strategy": "group", "group_size": 16}))
        return form, {"num_bits": bits, "type": "int", "symmetric": bool(rng.random() < 0.5), **by}

    targets = [
        ["Linear"],
        _some(rng, ([r"re:.*down_proj$"], ["model.layers.0.mlp.experts.1.up_proj"], ["re:.*experts.*"])),
    ]
    groups, schemes = {}, {}
    for index in rng.permutation(2):
        form, args = weights()
        group = {"targets": targets[index], "weights": args}
        groups[f"group_{len(groups)}"] = group | ({"format": form} if index or rng.random() < 0.5 else {})
        scheme = QuantizationScheme(targets=targets[index], weights=args, format=form)
        schemes |= dict.fromkeys(targets[index], scheme)
    ignored = _some(rng, (["lm_head"], ["lm_head", "re:.*v_proj"]))
    kinds = {str(scheme.format) for scheme in schemes.values()}
    whole = {"format": kinds.pop() if len(kinds) == 1 else "mixed-precision"}
    settings = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ignored, **whole}
    if whole["format"] == "mixed-precision":
        for group in groups.values():
            group["format"] = str(schemes[group["targets"][0]].format)
    packed, plain, linear = {}, {}, torch.nn.Linear(1, 1)
    for name, tensor in matrices.items():
        module = name.removesuffix(".weight")
        if module.endswith("v_proj") and len(ignored) > 1:
            continue
        scheme = schemes[match_targets(module, linear, schemes)[0]]
        args = scheme.weights
        columns = 1 if args.strategy in ("tensor", "channel") else tensor.shape[1] // args.group_size
        shape = (1,) if args.strategy == "tensor" else (tensor.shape[0], columns)
        half = 2 ** (args.num_bits - 1)
        scale = torch.from_numpy(rng.integers(8, 16, shape) / (256.0 if args.type == "int" else 2048.0)).float()
        zero = None if args.symmetric else torch.from_numpy(rng.integers(-half, half, shape)).to(torch.int8)
        state = {"weight": tensor.float(), "weight_scale": scale} | (
            {} if zero is None else {"weight_zero_point": zero}
        )
        parts = BaseCompressor.get_value_from_registry(scheme.format).compress(state, scheme)
        packed |= {f"{module}.{part}": each.contiguous() for part, each in parts.items()}
        plain[name] = fake_quantize(tensor.float(), scale, zero, args).double().numpy()
    return settings, packed, plain


def by_activations(rng: Generator, matrices: Mapping[str, Tensor]) -> Case:
    """compressed-tensors in four bits, whose groups of columns are stored or said to be unknown (-1)."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    symmetric, order = bool(rng.random() < 0.5), _some(rng, ("group", "weight", "static", None, False))
    args = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": 16,
        "actorder": order,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": args}}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    packed, plain = {}, {}
    for name, tensor in matrices.items():
        stem, (rows, columns) = name.removesuffix("weight"), tensor.shape
        known = rng.random() < 0.8
        group_of = rng.permutation(np.arange(columns) // 16) if known else np.arange(columns) // 16
        codes, zeros = rng.integers(-8, 8, (rows, columns)), rng.integers(-8, 8, (rows, columns // 16))
        scales = rng.integers(8, 16, zeros.shape) / 256.0
        packed |= {
            f"{stem}weight_packed": pack_to_int32(torch.from_numpy(codes).to(torch.int8), 4),
            f"{stem}weight_scale": torch.from_numpy(scales).float(),
            f"{stem}weight_shape": torch.tensor([rows, columns]),
            f"{stem}weight_g_idx": torch.from_numpy((group_of if known else np.full(columns, -1)).astype(np.int32)),
        }
        if not symmetric:
            packed[f"{stem}weight_zero_point"] = pack_to_int32(torch.from_numpy(zeros).to(torch.int8), 4, packed_dim=0)
        plain[name] = (codes - (0 if symmetric else zeros[:, group_of])) * scales[:, group_of]
    return settings, packed, plain


# How a format is drawn, settings that change none of its numbers, and some that would change them.
FORMATS: dict[str, tuple[Callable[[Generator, Mapping[str, Tensor]], Case], dict[str, Any], dict[str, Any]]] = {
    "gptq": (
        gptq,
        {"damp_percent": 0.1, "static_groups": True, "meta": {"quantizer": ["gptqmodel:5.0"]}, "lm_head": False},
        {"rotation": "hadamard", "adapter": {"rank": 8}, "pack_dtype": "int64", "is_marlin_format": True, "unheard": 1},
    ),
    "awq": (
        awq,
        {
            "do_fuse": True,
            "modules_to_not_convert": ["lm_head"],
            "exllama_config": {"version": 2},
            "backend": "autoawq",
        },
        {"format": "gemv", "backend": "llm-awq", "pack_dtype": "int16", "unheard": [2]},
    ),
    "fp8": (
        fp8,
        {"ignored_layers": ["lm_head"], "scale_fmt": "float", "fmt": "e4m3", "kv_cache_scheme": "static"},
        {"fmt": "e3m4", "expert_dtype": "int8", "scale_fmt": "q8", "unheard": "x"},
    ),
    "nvfp4": (nvfp4, {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, {"group_size": 32, "has_zero_point": True}),
    "compressed": (
        compressed,
        {"version": "0.1", "quantization_status": "compressed", "sparsity_config": {"format": "dense"}},
        {"transform_config": {"config_groups": {"R1": {}}}, "sparsity_config": {"format": "sparse-24-bitmask"}, "u": 1},
    ),
    "by_activations": (by_activations, {"kv_cache_scheme": None}, {"moe_sparsity_config": {"method": "prune"}}),
}


def outcome(source: Path, folder: Path, case: int) -> str:
    """Write a case, and read it; returns `right`, or the line that refuses the setting that it has beside valid ones.

    Raises:
        AssertionError: It is read as other numbers, or refused without reason, or not by name.
    """
    rng = np.random.default_rng(case)
    draw, harmless, harmful = list(FORMATS.values())[case % len(FORMATS)]
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    matrices = {name: tensor for name, tensor in tensors.items() if name.endswith("_proj.weight")}
    settings, packed, plain = draw(rng, matrices)
    refused, chance = "", rng.random()
    if chance < 0.3:
        refused = _some(rng, harmful)
        settings[refused] = harmful[refused]
    elif chance < 0.6:
        key = _some(rng, harmless)
        settings = {key: harmless[key]} | settings
    elif chance < 0.7:
        refused = f"{next(iter(plain)).removesuffix('weight')}residual"  # a tensor that no reader of the format knows
        packed[refused] = torch.ones(3)
    kept = {name: tensor for name, tensor in tensors.items() if name not in plain}
    save_file(kept | packed, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))
    config = ModelConfig(str(folder), device="cpu", dtype="float32")
    try:
        check_weights(config)
    except UserError as error:
        if not refused or refused not in str(error) or "\n" in str(error):
            raise AssertionError(f"not refused by name for {refused!r}: {settings}") from error
        return str(error)
    assert not refused, f"{refused} isn't refused: {settings}"
    found = packing(config, load_config(config))
    assert found is not None
    read = found.tensors(torch.float32)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        expected = torch.from_numpy(np.asarray(plain[name])).float() if name in plain else tensor
        assert torch.allclose(read[name][...], expected, rtol=1e-5, atol=1e-7), f"{name}: {settings}"
    if draw in (gptq, awq):  # which write anew the numbers that they have
        one = read[next(iter(plain))]
        assert isinstance(one, UnpackedTensor)
        parts = {last: read_tensor(stored) for last, stored in one.parts.items()}
        again = one.codec.unpack(one.codec.pack(one[...], parts), torch.float32)
        assert torch.allclose(again, one[...], rtol=1e-5, atol=1e-7), f"written anew: {settings}"
    return "right"
