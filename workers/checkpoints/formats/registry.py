"""The supported formats of quantised weights. A new one needs a file in this folder and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.formats.base import PackedFormat
from moevolve.workers.checkpoints.formats.compressed import CompressedTensors
from moevolve.workers.checkpoints.formats.fp4 import GptOssMxfp4, ModelOptNvfp4
from moevolve.workers.checkpoints.formats.fp8 import Fp8Blocks
from moevolve.workers.checkpoints.formats.groupwise import Awq, Gptq

FORMATS: dict[str, Callable[[Mapping[str, Any]], PackedFormat]] = {
    "fp8": Fp8Blocks,
    "mxfp4": GptOssMxfp4,
    "compressed-tensors": CompressedTensors,
    "modelopt": ModelOptNvfp4,
    "awq": Awq,
    "gptq": Gptq,
}
"""Formats by `quant_method` in the `quantization_config` of a checkpoint's config.json."""

_WITHOUT_LIBRARY = ("fp8", "mxfp4")


def packed_format(method: str, settings: Mapping[str, Any], model: str) -> PackedFormat:
    """Return the format of a checkpoint's weights.

    Args:
        method: `quant_method` of `settings`.
        settings: `quantization_config` of the checkpoint.
        model: Name of the model as the user gave it, for messages.

    Raises:
        UserError: The format, or this kind of it, can't be unpacked, or the library for it isn't installed.
    """
    if method not in FORMATS:
        raise UserError(
            f"model {model}: its weights are packed as {method!r}, and only plain numbers can be pruned and merged; "
            f"use its bfloat16 checkpoint, or one packed as {', '.join(FORMATS)}, which are unpacked while they load"
        )
    if method not in _WITHOUT_LIBRARY:
        try:
            import compressed_tensors  # noqa: F401
        except ImportError as error:
            raise UserError(
                f"model {model}: its weights are packed as {method!r}, which the library compressed-tensors unpacks; "
                "install it with: pip install 'moevolve[quantised]'"
            ) from error
    try:
        return FORMATS[method](settings)
    except UserError as error:
        raise UserError(f"model {model}: {error}") from error
