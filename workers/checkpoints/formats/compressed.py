"""The formats of compressed-tensors (llm-compressor): int4, NVFP4, MXFP4, FP8 and others, unpacked by its library."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError, first_line
from moevolve.workers.checkpoints.formats.base import (
    PackedMatrix,
    Rounding,
    blocks_largest,
    matrix_parts,
    spread_scales,
)
from moevolve.workers.checkpoints.formats.fp4 import fp4_bytes
from moevolve.workers.checkpoints.formats.mxfp4 import GROUP as MX_GROUP
from moevolve.workers.checkpoints.formats.mxfp4 import mx_scales
from moevolve.workers.checkpoints.formats.nvfp4 import GROUP, ROUNDING, nvfp4_scales


class CompressedTensors:
    """See `PackedFormat`. Every group of modules in the config has its own scheme."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from compressed_tensors.compressors.format import infer_module_format
        from compressed_tensors.quantization import QuantizationConfig

        try:
            config = QuantizationConfig.model_validate(dict(settings))
            for scheme in config.config_groups.values():
                scheme.format = scheme.format or infer_module_format(torch.nn.Linear, scheme)
        except (ValueError, KeyError, StopIteration) as error:
            raise UserError(f"its quantization_config isn't one of compressed-tensors: {first_line(error)}") from error
        self._schemes = list(config.config_groups.values())
        self._ignored = list(config.ignore or ())

    def matrices(self, names: Collection[str]) -> Iterator[PackedMatrix]:
        """See `PackedFormat`."""
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.utils.match import match_name

        for scheme in self._schemes:
            compressor = BaseCompressor.get_value_from_registry(scheme.format)
            root, *others = compressor.compression_param_names(scheme)
            required = [part for part in others if not part.startswith("input_")]
            # `weight_scale` tells quantised modules from others whose root is `weight` as well.
            for module, parts in matrix_parts(names, "weight_scale", {root, *required}, _UNUSED):
                targeted = "Linear" in scheme.targets or any(match_name(module, each) for each in scheme.targets)
                if targeted and not any(match_name(module, each) for each in self._ignored):
                    yield PackedMatrix(f"{module}.weight", parts, SchemeCodec(compressor, scheme))


_UNUSED = ("weight_g_idx", "weight_zero_point", "input_scale", "input_global_scale", "input_zero_point")
"""Tensors that matrices can have besides those that their scheme requires."""


@dataclass(frozen=True, slots=True)
class SchemeCodec:
    """See `Codec`: the matrices of one scheme.

    Attributes:
        compressor: The library's class for the scheme's format.
        scheme: The library's description of the scheme.
    """

    compressor: Any
    scheme: Any

    @property
    def plain(self) -> bool:
        """See `Codec`."""
        return False

    @property
    def rounding(self) -> Rounding:
        """See `Codec`."""
        if self.scheme.format == "nvfp4-pack-quantized":
            return ROUNDING
        if self.scheme.format == "mxfp4-pack-quantized":
            return Rounding(1 / 4, (1, MX_GROUP))
        # Half a step is scale / 2; 2^-7 more, because scales and unpacked numbers may be bfloat16.
        bits = self.scheme.weights.num_bits
        return Rounding(0.5 / (2 ** (bits - 1) - 1) + 2**-7, (1, self.scheme.weights.group_size or 1 << 30))

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """See `Codec`."""
        found: Tensor = self.compressor.decompress(dict(parts), self.scheme)["weight"]
        return found.to(dtype)

    def pack(self, values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Codec`. A group's largest integer is 2^(bits - 1) - 1."""
        weights, kept = self.scheme.weights, like["weight_scale"]
        if self.scheme.format == "nvfp4-pack-quantized":
            scales, inverse = nvfp4_scales(values, 1 / like["weight_global_scale"].float())
            codes = fp4_bytes(values.float() / spread_scales(scales.float() * inverse, GROUP))
            return {**like, "weight_packed": codes, "weight_scale": scales, "weight_global_scale": 1 / inverse}
        if self.scheme.format == "mxfp4-pack-quantized":
            scales = mx_scales(blocks_largest(values.float(), (1, MX_GROUP)))
            exponents = (torch.frexp(scales).exponent - 1 + 127).to(kept.dtype)
            codes = fp4_bytes(values.float() / spread_scales(scales, MX_GROUP))
            return {**like, "weight_packed": codes, "weight_scale": exponents}
        grouped = weights.strategy in ("group", "channel") and not weights.actorder
        if self.scheme.format != "pack-quantized" or not weights.symmetric or not grouped:
            kind = f"{self.scheme.format} by {weights.strategy}{'' if weights.symmetric else ', asymmetric'}"
            raise UserError(
                f"compressed-tensors weights {kind} can't be written anew; export the individual with --form stock"
            )
        group = weights.group_size if weights.strategy == "group" else values.shape[1]
        scales = blocks_largest(values.float(), (1, group)) / (2 ** (weights.num_bits - 1) - 1)
        state = {"weight": values.float(), "weight_scale": torch.where(scales > 0, scales, 1.0).to(kept.dtype)}
        packed = self.compressor.compress(state, self.scheme)
        return {**like, "weight_packed": packed["weight_packed"], "weight_scale": packed["weight_scale"]}

    def scaled(self, parts: Mapping[str, Tensor], factor: float) -> dict[str, Tensor] | None:
        """See `Codec`. NVFP4's global scale divides."""
        if "weight_global_scale" in parts:
            scale = parts["weight_global_scale"]
            return {**parts, "weight_global_scale": (scale.double() / factor).to(scale.dtype)}
        scale = parts["weight_scale"]
        if scale.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return None
        return {**parts, "weight_scale": (scale.double() * factor).to(scale.dtype)}
