"""The supported formats of quantised weights, and their checkpoints seen as unquantised ones.

A new format needs a file in this folder and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import EllipsisType

import torch
from pydantic import JsonValue
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moevolve.evaluators.errors import UserError, opening
from moevolve.workers.checkpoints.formats.base import Codec, PackedFormat, Plain
from moevolve.workers.checkpoints.formats.compressed import CompressedTensors
from moevolve.workers.checkpoints.formats.fp4 import MX_GROUP, GptOssMxfp4, ModelOptNvfp4
from moevolve.workers.checkpoints.formats.fp8 import Fp8, ModelOptFp8
from moevolve.workers.checkpoints.formats.groupwise import Awq, Gptq
from moevolve.workers.checkpoints.headers import StoredTensor
from moevolve.workers.checkpoints.shards import finite, read_tensor, torch_dtype


def _modelopt(settings: Mapping[str, JsonValue]) -> PackedFormat:
    return (ModelOptFp8 if str(settings.get("quant_algo")).lower().endswith("fp8") else ModelOptNvfp4)(settings)


# Formats by `quant_method` in the `quantization_config` of a checkpoint's config.json.
FORMATS: dict[str, Callable[[Mapping[str, JsonValue]], PackedFormat]] = {
    "fp8": Fp8,
    "fbgemm_fp8": lambda settings: Fp8({"weight_block_size": None, **settings}),
    "mxfp8": lambda settings: Fp8({"weight_block_size": [1, MX_GROUP], "scale_fmt": "ue8m0", **settings}),
    "mxfp4": GptOssMxfp4,
    "compressed-tensors": CompressedTensors,
    "modelopt": _modelopt,
    "awq": Awq,
    "gptq": Gptq,
}

_WITHOUT_LIBRARY = ("fp8", "fbgemm_fp8", "mxfp8", "mxfp4")


def packed_format(method: str | None, settings: Mapping[str, JsonValue], model: str) -> PackedFormat:
    """Return the format of a checkpoint's weights, by the `quant_method` and `quantization_config` of its config.json.

    Raises:
        UserError: The format, or this kind of it, can't be unpacked, or the library for it isn't installed. The message
            names `model` as the user gave it.
    """
    if method not in FORMATS:
        said = f"as {method!r}" if method else "in a format that quantization_config doesn't name, as MLX's are"
        raise UserError(
            f"model {model}: its weights are packed {said}, and only plain numbers can be pruned and merged; "
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


@dataclass(frozen=True, slots=True)
class UnpackedTensor:
    """A tensor that is read from its files, and unpacked, on `tensor[...]`, as a slice of the safetensors library is.

    Of fused experts, `tensor[first:last]` reads some. Quantised tensors are unpacked to `dtype`; plain ones keep their
    own. Raises a `UserError` if a number that is read isn't finite, or wouldn't be in `dtype`.
    """

    name: str
    parts: Mapping[str, StoredTensor]
    codec: Codec = field(repr=False)
    dtype: torch.dtype

    def __getitem__(self, which: EllipsisType | slice) -> Tensor:
        parts = {last: read_tensor(stored)[which] for last, stored in self.parts.items()}
        with self._unpacking():
            values = next(iter(parts.values())) if self.codec.plain else self.codec.unpack(parts, self.dtype)
        finite(values, self.name, self.file)
        if self.dtype == torch.float16 and values.is_floating_point() and not values.to(self.dtype).isfinite().all():
            raise UserError(
                f"{self.file}: tensor {self.name} has numbers beyond 65504, the largest of float16; set model.dtype to "
                "bfloat16"
            )
        return values

    def empty(self) -> Tensor:
        """Return a tensor of the same shape and dtype on the meta device, from the headers alone."""
        forms = tuple((last, stored.shape, torch_dtype(stored)) for last, stored in self.parts.items())
        if self.codec.plain:
            ((_, shape, dtype),) = forms
        elif "weight_shape" in self.parts:  # integers packed in words, whose number doesn't tell the shape
            shape, dtype = tuple(read_tensor(self.parts["weight_shape"]).tolist()), self.dtype
        else:
            with self._unpacking():
                shape, dtype = _unpacked_form(self.codec, forms, self.dtype), self.dtype
        return torch.empty(shape, dtype=dtype, device="meta")

    def check_beginning(self) -> None:
        """Raise a `UserError` if one of the first numbers of an unquantised tensor isn't finite."""
        (stored,) = self.parts.values()
        finite(read_tensor(stored).flatten()[:1024], self.name, self.file)

    @property
    def file(self) -> Path:
        """The file of the tensor, or of one of its parts."""
        return next(iter(self.parts.values())).file

    def _unpacking(self) -> AbstractContextManager[None]:
        advice = "fetch the file again, or correct quantization_config"
        return opening(f"{self.file}: tensor {self.name} can't be unpacked", advice)


@lru_cache(maxsize=1024)
def _unpacked_form(
    codec: Codec, forms: tuple[tuple[str, tuple[int, ...], torch.dtype], ...], dtype: torch.dtype
) -> tuple[int, ...]:
    """Shape of a matrix whose parts have these last names, shapes and dtypes."""
    # Following a computation without numbers takes a millisecond, and thousands of experts have the same shapes.
    with FakeTensorMode(allow_non_fake_inputs=True):
        return tuple(codec.unpack({last: torch.empty(shape, dtype=kind) for last, shape, kind in forms}, dtype).shape)


def unpacked_tensors(
    stored: Mapping[str, StoredTensor], packed: PackedFormat, dtype: torch.dtype
) -> dict[str, UnpackedTensor]:
    """Return a quantised checkpoint's tensors by the names that they have in an unquantised one."""
    found, used = {}, set()
    for matrix in packed.matrices(stored.keys()):
        parts = {last: stored[name] for last, name in matrix.parts.items()}
        found[matrix.name] = UnpackedTensor(matrix.name, parts, matrix.codec, dtype)
        used |= set(matrix.parts.values())
    plain = plain_tensors({name: tensor for name, tensor in stored.items() if name not in used}, dtype)
    return plain | found


def plain_tensors(stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> dict[str, UnpackedTensor]:
    """Return tensors that aren't quantised, and load to `dtype`, by name."""
    return {name: UnpackedTensor(name, {"": tensor}, Plain(), dtype) for name, tensor in stored.items()}
