"""Hashes of a checkpoint's tensors, by which another copy of it is recognised, whatever files they are divided into."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.files import gguf_file
from moevolve.workers.checkpoints.formats.gguf import open_parts, stored_gguf
from moevolve.workers.checkpoints.headers import StoredTensor, stored_tensors
from moevolve.workers.checkpoints.loading import checkpoint_folder
from moevolve.workers.contract.settings import ModelConfig


def tensor_digests(model: ModelConfig) -> dict[str, str]:
    """Hash every tensor of a checkpoint with its dtype and shape; all of its bytes are read.

    Returns:
        The first 32 hex digits of SHA-256 by name, in the order of the files.
    """
    return {name: _digest(tensor) for name, tensor in _stored(model).items()}


def check_digests(model: ModelConfig, wanted: Mapping[str, str]) -> None:
    """Raise a `UserError` that names the first tensor in which a checkpoint differs from the hashes `wanted`."""
    stored = _stored(model)
    for name in wanted:
        if name not in stored:
            raise UserError(f"{model.path}: not the recipe's model: it has no tensor {name}")
    for name, tensor in stored.items():
        if name not in wanted:
            raise UserError(f"{model.path}: not the recipe's model, which has no tensor {name}")
        if _digest(tensor) != wanted[name]:
            raise UserError(
                f"{model.path}: not the recipe's model: the first tensor that differs is {name}, here {tensor.dtype} "
                f"{list(tensor.shape)}, in {tensor.file.name}"
            )


def _stored(model: ModelConfig) -> dict[str, StoredTensor]:
    file = gguf_file(model)
    return stored_tensors(checkpoint_folder(model)) if file is None else stored_gguf(open_parts(file))


def _digest(tensor: StoredTensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    for chunk in tensor.chunks():
        digest.update(chunk)
    return digest.hexdigest()[:32]  # 128 bits tell tensors apart, and a recipe names tens of thousands
