"""The formats of compressed-tensors (llm-compressor): int4, NVFP4, MXFP4, FP8 and others, unpacked by its library."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError, first_line
from moevolve.workers.checkpoints.formats.base import PackedMatrix, matrix_parts


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
                    yield PackedMatrix(f"{module}.weight", parts, partial(_unpack, compressor, scheme))


_UNUSED = ("weight_g_idx", "weight_zero_point", "input_scale", "input_global_scale", "input_zero_point")
"""Tensors that matrices can have besides those that their scheme requires."""


def _unpack(compressor: Any, scheme: Any, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    found: Tensor = compressor.decompress(dict(parts), scheme)["weight"]
    return found.to(dtype)
