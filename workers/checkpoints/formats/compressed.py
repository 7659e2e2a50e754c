"""The formats of compressed-tensors (llm-compressor): int4, NVFP4, MXFP4, FP8 and others, unpacked by its library."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from moevolve.evaluators.errors import UserError, opening
from moevolve.workers.checkpoints.formats.base import (
    Codec,
    PackedMatrix,
    blocks_largest,
    packed_matrix,
)
from moevolve.workers.checkpoints.formats.fp4 import NV_GROUP, fp4_bytes, mxfp4_parts, nvfp4_scales
from moevolve.workers.checkpoints.settings import Only, Settings, check_settings

# Settings that the library's own description of a scheme doesn't have, or that it would read as nothing.
COMPRESSED_SETTINGS: Settings = {
    "quant_method": "chooses this format",
    "config_groups": "applied; the library refuses settings in it that it doesn't know",
    "format": "applied to groups without one",
    "ignore": "applied",
    "quantization_status": "told by the dtypes of weights",
    "sparsity_config": "see below",
    "transform_config": Only((), "inputs and weights of matrices are rotated"),
    "moe_sparsity_config": Only((), "experts are left out or replaced by constants"),
    "kv_cache_scheme": "of the cache, which is kept as it is computed",
    **dict.fromkeys(
        ("global_compression_ratio", "version", "run_compressed", "dequantize"), "notes and how to compute"
    ),
    **dict.fromkeys(("use_optimized_inference", "is_checkpoint_sparse"), "notes and how to compute"),
}
_SPARSITY: Settings = {
    "format": Only(("dense",), "zeros of the weights aren't stored"),
    **dict.fromkeys(("sparsity_structure", "global_sparsity", "registry_requires_subclass"), "notes"),
    **dict.fromkeys(("ignore", "targets"), "of a format that leaves out zeros"),
}
# Tensors that matrices can have besides those that their scheme requires. Inputs are computed as they are.
_OPTIONAL = (
    *("weight_g_idx", "weight_zero_point", "input_scale", "input_global_scale", "input_zero_point", "output_scale"),
    *("output_zero_point", "output_global_scale"),
)
# Formats whose matrices are integers with scales by groups of columns, and the tensor of the integers.
_INTEGERS = {"pack-quantized": "weight_packed", "int-quantized": "weight", "naive-quantized": "weight"}


class CompressedTensors:
    """Every group of modules in the config has its own scheme, and a module that of the group that names it best."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from compressed_tensors.compressors.format import infer_module_format
        from compressed_tensors.quantization import QuantizationConfig

        where = "its quantization_config"
        check_settings(settings, COMPRESSED_SETTINGS, where)
        check_settings(settings.get("sparsity_config") or {}, _SPARSITY, f"{where}.sparsity_config")
        with opening(f"{where} isn't one of compressed-tensors"):
            content = copy.deepcopy(dict(settings))
            for group in content["config_groups"].values():
                if isinstance(group, dict) and group.get("weights"):
                    # The library refuses an order of activations; the tensor `weight_g_idx` tells it.
                    group["weights"]["actorder"] = None
            config = QuantizationConfig.model_validate(content)
            for scheme in config.config_groups.values():
                whole = None if config.format in ("mixed-precision", "fakequant", "dense") else config.format
                scheme.format = scheme.format or whole or infer_module_format(torch.nn.Linear, scheme)
            codecs = {name: SchemeCodec(scheme) for name, scheme in config.config_groups.items()}
        # Where groups have the same target, the last one's is the library's.
        self._codecs = {each: codecs[name] for name, scheme in config.config_groups.items() for each in scheme.targets}
        self._ignored = list(config.ignore or ())

    def matrices(self, names: Collection[str]) -> Iterator[PackedMatrix]:
        from compressed_tensors.utils.match import is_match, match_targets

        with torch.device("meta"):
            linear, embedding = torch.nn.Linear(1, 1), torch.nn.Embedding(1, 1)
        for name in names:
            module, _, last = name.rpartition(".")
            if last != "weight_scale":  # which tells quantised modules from others with a `weight`
                continue
            kind = embedding if module.rpartition(".")[2].startswith("embed") else linear
            targets = match_targets(module, kind, self._codecs)
            if targets and not is_match(module, kind, self._ignored):
                codec = self._codecs[targets[0]]  # the library's order: names, regular expressions, classes
                yield packed_matrix(codec, names, module, codec.required, _OPTIONAL)


class SchemeCodec(Codec):
    """The matrices of one scheme, unpacked by the library's class for its format.

    Attributes:
        required: Last names of the tensors that every matrix has.
    """

    def __init__(self, scheme: Any) -> None:
        from compressed_tensors.compressors import BaseCompressor

        self._compressor = BaseCompressor.get_value_from_registry(scheme.format)
        self._scheme, self._weights = scheme, scheme.weights
        parts = self._compressor.compression_param_names(scheme)
        self.required = [part for part in parts if not part.startswith("input_")]

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        self._check(parts)
        scales = parts["weight_scale"]
        # A scale per row may be stored in one dimension, which the library would take as a row.
        if self._weights.strategy == "channel" and scales.ndim == 1:
            parts = {**parts, "weight_scale": scales[:, None]}
        if "weight_g_idx" in parts and not isinstance(parts["weight_g_idx"], FakeTensor):
            groups = parts["weight_g_idx"].long()
            if not (groups < 0).any():  # programs that know the order, and don't use it, store -1
                return self._by_groups(parts, groups).to(dtype)
        found: Tensor = self._compressor.decompress(dict(parts), self._scheme)["weight"]
        return found.to(dtype)

    def _by_groups(self, parts: Mapping[str, Tensor], group_of: Tensor) -> Tensor:
        """Unpack a matrix [rows, columns] whose columns' groups are stored, as GPTQ chooses them by activations."""
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

        scales, bits = parts["weight_scale"].float(), self._weights.num_bits
        if self._scheme.format not in _INTEGERS or self._weights.strategy != "group":
            raise ValueError(f"it has weight_g_idx, the groups of its columns, which {self._scheme.format} hasn't")
        codes, zeros = parts[_INTEGERS[self._scheme.format]], parts.get("weight_zero_point")
        if codes.dtype == torch.int32:
            codes = unpack_from_int32(codes, bits, torch.Size(parts["weight_shape"].tolist()))
        if zeros is None or self._weights.symmetric:
            zeros = torch.zeros_like(scales)
        elif zeros.dtype == torch.int32:
            zeros = unpack_from_int32(zeros, bits, scales.shape, packed_dim=0)
        return (codes.float() - zeros.float()[:, group_of]) * scales[:, group_of]

    def _check(self, parts: Mapping[str, Tensor]) -> None:
        """Raise a `ValueError` if the numbers aren't stored as the scheme says, which the library takes for granted."""
        scheme, weights = self._scheme, self._weights
        if scheme.format == "pack-quantized" and "weight_shape" in parts:
            columns = parts["weight_shape"][-1]
            if not isinstance(columns, FakeTensor) and parts["weight_packed"].shape[-1] != -(
                -int(columns) * weights.num_bits // 32
            ):
                raise ValueError(
                    f"{int(columns)} numbers of {weights.num_bits} bits aren't {parts['weight_packed'].shape[-1]} "
                    "words, so that its group of config_groups isn't the one that it was written by"
                )
        if "weight" in parts and parts["weight"].dtype != weights.pytorch_dtype():
            raise ValueError(
                f"it has scales, and its numbers are {parts['weight'].dtype} instead of {weights.pytorch_dtype()}"
            )

    def pack(self, values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weights, kept = self._weights, like["weight_scale"]
        if self._scheme.format == "nvfp4-pack-quantized":
            scales, inverse = nvfp4_scales(values, 1 / like["weight_global_scale"].float())
            codes = fp4_bytes(values.float() / (scales.float() * inverse).repeat_interleave(NV_GROUP, -1))
            return {**like, "weight_packed": codes, "weight_scale": scales, "weight_global_scale": 1 / inverse}
        if self._scheme.format == "mxfp4-pack-quantized":
            codes, exponents = mxfp4_parts(values)
            return {**like, "weight_packed": codes, "weight_scale": exponents.to(kept.dtype)}
        grouped = weights.strategy in ("group", "channel") and "weight_g_idx" not in like
        if self._scheme.format != "pack-quantized" or not weights.symmetric or not grouped:
            kind = f"{self._scheme.format} by {weights.strategy}{'' if weights.symmetric else ', asymmetric'}"
            raise UserError(
                f"compressed-tensors weights {kind} can't be written anew; export the individual with --form stock"
            )
        # A group's largest integer is 2^(bits - 1) - 1.
        group = weights.group_size if weights.strategy == "group" else values.shape[1]
        scales = blocks_largest(values.float(), (1, group)) / (2 ** (weights.num_bits - 1) - 1)
        state = {"weight": values.float(), "weight_scale": torch.where(scales > 0, scales, 1.0).to(kept.dtype)}
        packed = self._compressor.compress(state, self._scheme)
        return {**like, "weight_packed": packed["weight_packed"], "weight_scale": packed["weight_scale"]}
