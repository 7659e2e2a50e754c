"""The formats of compressed-tensors (llm-compressor): int4, NVFP4, MXFP4, FP8 and others, unpacked by its library."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError, opening
from moevolve.workers.checkpoints.formats.base import Codec, PackedMatrix, blocks_largest, packed_matrices
from moevolve.workers.checkpoints.formats.fp4 import NV_GROUP, fp4_bytes, mxfp4_parts, nvfp4_scales

# Tensors that matrices can have besides those that their scheme requires.
_UNUSED = ("weight_g_idx", "weight_zero_point", "input_scale", "input_global_scale", "input_zero_point")


class CompressedTensors:
    """Every group of modules in the config has its own scheme."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        from compressed_tensors.compressors.format import infer_module_format
        from compressed_tensors.quantization import QuantizationConfig

        with opening("its quantization_config isn't one of compressed-tensors"):
            config = QuantizationConfig.model_validate(dict(settings))
            for scheme in config.config_groups.values():
                scheme.format = scheme.format or infer_module_format(torch.nn.Linear, scheme)
        self._schemes = list(config.config_groups.values())
        self._ignored = list(config.ignore or ())

    def matrices(self, names: Collection[str]) -> Iterator[PackedMatrix]:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.utils.match import match_name

        for scheme in self._schemes:
            compressor = BaseCompressor.get_value_from_registry(scheme.format)
            codec = SchemeCodec(compressor, scheme)
            root, *others = compressor.compression_param_names(scheme)
            required = [part for part in others if not part.startswith("input_")]
            # `weight_scale` tells quantised modules from others whose root is `weight` as well.
            for matrix in packed_matrices(codec, names, "weight_scale", {root, *required}, _UNUSED):
                module = matrix.name.removesuffix(".weight")
                targeted = "Linear" in scheme.targets or any(match_name(module, each) for each in scheme.targets)
                if targeted and not any(match_name(module, each) for each in self._ignored):
                    yield matrix


class SchemeCodec(Codec):
    """The matrices of one scheme: the library's class for the scheme's format, and its description."""

    def __init__(self, compressor: Any, scheme: Any) -> None:
        self._compressor, self._scheme, self._weights = compressor, scheme, scheme.weights

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        found: Tensor = self._compressor.decompress(dict(parts), self._scheme)["weight"]
        return found.to(dtype)

    def pack(self, values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weights, kept = self._weights, like["weight_scale"]
        if self._scheme.format == "nvfp4-pack-quantized":
            scales, inverse = nvfp4_scales(values, 1 / like["weight_global_scale"].float())
            codes = fp4_bytes(values.float() / (scales.float() * inverse).repeat_interleave(NV_GROUP, -1))
            return {**like, "weight_packed": codes, "weight_scale": scales, "weight_global_scale": 1 / inverse}
        if self._scheme.format == "mxfp4-pack-quantized":
            codes, exponents = mxfp4_parts(values)
            return {**like, "weight_packed": codes, "weight_scale": exponents.to(kept.dtype)}
        grouped = weights.strategy in ("group", "channel") and not weights.actorder
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
