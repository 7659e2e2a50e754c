"""AWQ (arXiv 2306.00978) and GPTQ (arXiv 2210.17323): integers of a few bits, with a scale and a zero point per group.

Both store the transposed matrix, [inputs, outputs]. Their codes are unpacked by the library of compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from moevolve.evaluators.errors import UserError, opening
from moevolve.workers.checkpoints.formats.base import (
    Codec,
    PackedMatrix,
    packed_matrices,
)
from moevolve.workers.checkpoints.settings import Only, Settings, check_settings

# Settings of both formats; those that no reader needs say how the weights were chosen, or how to compute with them.
_BOTH: Settings = {
    "quant_method": "chooses the format",
    "method": Only(("gptq", "awq"), "another format"),
    "bits": "applied",
    "group_size": "applied",
    "sym": "applied where matrices are written anew, and by GPTQ where they are read",
    "zero_point": "applied where matrices are written anew; zero points are stored",
    "desc_act": "told by g_idx",
    "pack_dtype": Only(("int32",), "codes packed into other words"),
    "lm_head": "told by the tensors",
    "modules_to_not_convert": "told by the tensors",
    "modules_in_block_to_quantize": "told by the tensors",
    "inside_layer_modules": "told by the tensors",
    "outside_layer_modules": "told by the tensors",
    "block_name_to_quantize": "told by the tensors",
    "adapter": Only((), "an adapter is added to the weights"),
    "rotation": Only((), "the inputs of matrices are rotated"),
    "data_type": Only(("int",), "another kind of numbers"),
    "meta": "notes of the program that wrote it",
    **dict.fromkeys(
        (
            *("tokenizer", "dataset", "damp_percent", "damp_auto_increment", "act_group_aware", "static_groups"),
            *(
                "true_sequential",
                "mse",
                "model_name_or_path",
                "model_file_base_name",
                "module_name_preceding_first_block",
            ),
            *(
                "batch_size",
                "pad_token_id",
                "cache_block_outputs",
                "model_seqlen",
                "gptaq",
                "foem",
                "hessian",
                "fallback",
            ),
            *("nsamples", "seqlen", "iters", "lr", "minmax_lr", "enable_minmax_tuning", "enable_quanted_input"),
            *("autoround_version", "low_gpu_mem_usage", "scale_dtype", "train_bs", "amp", "seed"),
        ),
        "how the weights were chosen",
    ),
    **dict.fromkeys(
        (
            *("use_exllama", "disable_exllama", "exllama_config", "max_input_length", "use_cuda_fp16", "do_fuse"),
            *("fuse_max_seq_len", "modules_to_fuse", "device", "pack_impl"),
        ),
        "how to compute with them",
    ),
}
_LAYOUT = "another order of codes"
AWQ_SETTINGS: Settings = _BOTH | {
    "w_bit": Only((4,), "another number of bits"),
    "q_group_size": "applied",
    "backend": Only(("auto", "autoawq", "gemm"), _LAYOUT),
    **dict.fromkeys(("version", "format", "checkpoint_format"), Only(("gemm",), _LAYOUT)),
}
GPTQ_SETTINGS: Settings = _BOTH | {
    "dynamic": "applied: settings of modules, by regular expressions",
    "backend": "how to compute with them",
    "is_marlin_format": Only((), _LAYOUT),
    **dict.fromkeys(("format", "checkpoint_format"), Only(("gptq", "gptq_v2"), _LAYOUT)),
}
# Settings of the modules that an expression of `dynamic` names.
_DYNAMIC: Settings = {
    key: GPTQ_SETTINGS[key] for key in ("bits", "group_size", "sym", "desc_act", "adapter", "mse")
} | {key: GPTQ_SETTINGS[key] for key in ("damp_percent", "damp_auto_increment", "static_groups", "pack_dtype")}

# Which of eight neighbouring outputs each four bits of a word have, from the lowest ones.
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class Awq(Codec):
    """A matrix has `qweight`, `qzeros` and `scales`, in the order that AutoAWQ's GEMM reads."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        bits = settings.get("bits", settings.get("w_bit", 4))
        if bits != 4:
            raise UserError(f"awq weights of {bits} bits aren't supported; use 4 bits")
        check_settings(settings, AWQ_SETTINGS, "its quantization_config")
        self._group = settings.get("group_size", settings.get("q_group_size"))
        self._symmetric = not settings.get("zero_point", not settings.get("sym", False))

    def matrices(self, names: Collection[str]) -> Iterator[PackedMatrix]:
        return packed_matrices(self, names, "qweight", ("qzeros", "scales"))

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        codes, zeros, group_of = self._codes(parts)
        return ((codes - zeros[group_of]) * parts["scales"].float()[group_of]).T.to(dtype)

    def pack(self, values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        _, zeros, group_of = self._codes(like)
        codes, zeros, scales = _rounded(values, group_of, zeros, like["scales"], range(16), self._symmetric)
        return {**like, "qweight": _awq_words(codes), "qzeros": _awq_words(zeros), "scales": scales}

    def _codes(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [inputs, outputs] and zero points [groups, outputs], float32, and the group of every input."""
        from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

        codes, zeros = AutoAWQConverter.reverse_awq_order(
            *AutoAWQConverter.unpack_awq(parts["qweight"], parts["qzeros"], 4), 4
        )
        group_of = _in_order(len(codes), len(zeros), self._group)
        # Shifting a negative int32 fills its upper bits with ones.
        return (codes & 15).float(), (zeros & 15).float(), group_of


class Gptq(Awq):
    """A matrix has `qweight`, `qzeros`, `scales` and the group of every input, `g_idx`.

    Without `g_idx` the groups are in order. GPTQModel's `dynamic` gives modules their own settings by the first regular
    expression that matches the beginning of their names; with `-:` before it, they aren't quantised.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._bits = int(settings.get("bits", 4))
        if self._bits not in (2, 4, 8):
            raise UserError(f"gptq weights of {self._bits} bits aren't supported; use 2, 4 or 8 bits")
        check_settings(settings, GPTQ_SETTINGS, "its quantization_config")
        formats = {str(settings[key]).lower() for key in ("checkpoint_format", "format") if settings.get(key)}
        if len(formats) > 1:
            raise UserError(
                f"its quantization_config has format and checkpoint_format, which differ: {sorted(formats)}"
            )
        # The first version of the format stores zero points less one. GPTQModel subtracts words, so that a zero point
        # of 0 borrows from its neighbours.
        self._less = 0 if formats == {"gptq_v2"} else sum(1 << shift for shift in range(0, 32, self._bits))
        self._symmetric = bool(settings.get("sym", True))
        # GPTQModel has written zero points of the second version under the name of the first one. Symmetric ones are
        # known without it.
        self._centred = bool(settings.get("sym"))
        self._group, self._ordered = settings.get("group_size"), not settings.get("desc_act")
        self._dynamic: list[tuple[re.Pattern[str], Gptq | None]] = []
        for pattern, own in (settings.get("dynamic") or {}).items():
            where = f"its quantization_config.dynamic[{pattern!r}]"
            check_settings(own, _DYNAMIC, where)
            with opening(f"{where} isn't a regular expression"):
                expression = re.compile(pattern.removeprefix("+:").removeprefix("-:"))
            codec = None if pattern.startswith("-:") else Gptq({**settings, **own, "dynamic": None})
            self._dynamic.append((expression, codec))

    def matrices(self, names: Collection[str]) -> Iterator[PackedMatrix]:
        for matrix in packed_matrices(self, names, "qweight", ("qzeros", "scales"), ("g_idx",)):
            module = matrix.name.removesuffix(".weight")
            codec = next((own for expression, own in self._dynamic if expression.match(module)), self)
            if codec is None:
                raise UserError(f"tensor {module}.qweight is quantised, and quantization_config.dynamic says it isn't")
            if "g_idx" not in matrix.parts and not codec._ordered:  # noqa: SLF001 - of this class
                raise UserError(
                    f"tensor {module}.qweight is quantised, and {module}.g_idx is missing; fetch the files again"
                )
            yield replace(matrix, codec=codec)

    def pack(self, values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

        _, zeros, group_of = self._codes(like)
        allowed = range(
            min(self._less, 1), 2**self._bits
        )  # a zero point of 0 isn't the same to all kernels if stored as -1
        codes, zeros, scales = _rounded(values, group_of, zeros, like["scales"], allowed, self._symmetric)
        half = 2 ** (self._bits - 1)  # the library packs signed integers
        packed = pack_to_int32((codes - half).to(torch.int8), self._bits, packed_dim=0)
        points = pack_to_int32((zeros - half).to(torch.int8), self._bits, packed_dim=1) - self._less
        return {**like, "qweight": packed, "qzeros": like["qzeros"] if self._symmetric else points, "scales": scales}

    def _codes(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        scales, codes = parts["scales"], _numbers(parts["qweight"], self._bits)
        if "g_idx" in parts:
            group_of = parts["g_idx"].long()
        else:
            group_of = _in_order(len(codes), len(scales), self._group)
        less = 0 if self._centred else self._less
        zeros = _numbers((parts["qzeros"] + less).T, self._bits).T[:, : scales.shape[1]]
        if self._centred:
            middle = 2 ** (self._bits - 1)
            if not isinstance(zeros, FakeTensor) and ((zeros != middle) & (zeros != middle - 1)).any():
                raise ValueError(
                    "quantization_config has sym: true, and its zero points aren't in the middle; set it to false if "
                    "they count"
                )
            zeros = torch.full_like(zeros, middle)
        return codes.float(), zeros.float(), group_of


def _in_order(inputs: int, groups: int, size: int | None) -> Tensor:
    """Return the group of every input, int64 [inputs], where neighbours have one; sizes of -1 are all inputs."""
    size = inputs // groups if size is None else inputs if size < 0 else int(size)
    if -(-inputs // size) != groups:
        raise ValueError(f"there are {groups} groups, and {inputs} inputs in groups of {size} need another number")
    return torch.arange(inputs) // size


def _numbers(words: Tensor, bits: int) -> Tensor:
    """Unpack the codes of words, int32 [words, n], the first one in the lowest bits: [codes, n]."""
    shifts = torch.arange(0, 32, bits)[:, None]
    return (words[:, None] >> shifts & 2**bits - 1).flatten(0, 1)


def _rounded(
    values: Tensor, group_of: Tensor, zeros: Tensor, scales: Tensor, allowed: range, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Round a matrix to the nearest numbers of the format.

    A group keeps its former scale and zero point if its largest error is no larger with them. Otherwise its codes range
    from its smallest number, or 0, to its largest one. Codes go from 0 to the last `allowed` zero point. Returns codes
    [inputs, outputs], zero points [groups, outputs] and scales, for a matrix [outputs, inputs].
    """
    exact, last = values.float().T.contiguous(), allowed[-1]
    index = group_of[:, None].expand_as(exact)
    # Groups without inputs, and the side of 0 on which a group has no numbers, have the extreme 0.
    highest = torch.zeros(scales.shape).scatter_reduce(0, index, exact, "amax")
    lowest = torch.zeros(scales.shape).scatter_reduce(0, index, exact, "amin")
    if symmetric:
        steps = torch.maximum(highest / (last - zeros).clamp_min(1), -lowest / zeros.clamp_min(1))
    else:
        steps = (highest - lowest) / last
    steps = torch.where(steps > 0, steps, scales.float()).to(scales.dtype)
    points = zeros  # of symmetric formats kernels expect them in the middle
    if not symmetric:
        nearest = (-lowest / steps.float()).nan_to_num(0.0, 0.0, 0.0).round()
        points = nearest.clamp(allowed[0], last)

    def coded(scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
        steps = scales.float()[group_of]
        codes = ((exact / steps).nan_to_num(0.0, 0.0, 0.0).round() + zeros[group_of]).clamp(0, last)
        error = (exact - (codes - zeros[group_of]) * steps).abs()
        return codes, torch.zeros(scales.shape).scatter_reduce(0, index, error, "amax")

    before, error_before = coded(scales, zeros)
    after, error_after = coded(steps, points)
    kept = error_before <= error_after
    return (
        torch.where(kept[group_of], before, after),
        torch.where(kept, zeros, points),
        torch.where(kept, scales, steps),
    )


def _awq_words(codes: Tensor) -> Tensor:
    """Pack codes [rows, columns] into words of eight neighbours in a row, int32 [rows, columns / 8]."""
    grouped = codes.to(torch.int64).unflatten(1, (-1, 8))[..., _AWQ_ORDER]
    words = (grouped << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)
