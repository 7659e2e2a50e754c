"""The EEP authors' coefficient files: reading matrices in their format.

Format (as released with arXiv 2407.00945): a dict of float32 tensors [n', n]. `layers.[a-b]` or `layers.l` is `W_EM` of
those layers, `transfer.[a-b]` or `transfer.l` their `W_RM`; `others` and `others_transfer` apply to all other layers.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError

_KEY = re.compile(r"(layers|transfer)\.(?:(\d+)|\[(\d+)-(\d+)\])")
_OTHERS = {"layers": "others", "transfer": "others_transfer"}

Matrices = NDArray[np.float32]


def read_coefficients(path: Path, layers: int, experts: int) -> tuple[Matrices, Matrices]:
    """Read one file for a model with so many MoE layers of n experts; nothing but tensors is unpickled.

    Returns:
        `W_RM` and `W_EM` of every layer, each float32 [layers, n', n].

    Raises:
        UserError: The file can't be read, or doesn't fit the model; the message names file and key.
    """
    tensors = _load(path)
    merging = _per_layer(path, tensors, "layers", layers)
    mapping = _per_layer(path, tensors, "transfer", layers)
    shapes = {matrix.shape for matrix in (*merging, *mapping)}
    if len(shapes) != 1:
        raise UserError(f"{path}: matrices of different shapes: {', '.join(map(str, sorted(shapes)))}")
    _, columns = next(iter(shapes))
    if columns != experts:
        raise UserError(f"{path}: matrices have {columns} columns, the model has {experts} experts")
    return np.stack(mapping), np.stack(merging)


def group_layers(mapping: Matrices, merging: Matrices) -> int:
    """Return the smallest number of equal contiguous groups whose layers share their matrices; `layers` if none do."""
    layers = mapping.shape[0]
    for groups in range(1, layers):
        owners = np.arange(layers) * groups // layers
        firsts = np.array([np.flatnonzero(owners == group)[0] for group in range(groups)])
        same = (mapping == mapping[firsts[owners]]).all() and (merging == merging[firsts[owners]]).all()
        if same:
            return groups
    return layers


def _load(path: Path) -> dict[str, NDArray[np.float32]]:
    import torch

    if not path.is_file():
        raise UserError(f"{path}: no such coefficient file")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - bytes of other files can fail in any way Python can
        # torch's own message advises weights_only=False, which runs code in the file.
        raise UserError(f"{path}: not a file of tensors that torch.save wrote, or it holds more than tensors") from None
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise UserError(f"{path}: expected a dict of tensors")
    for key, value in content.items():
        if value.ndim != 2 or not bool(torch.isfinite(value).all()):
            raise UserError(f"{path}: {key} is not a finite matrix")
    return {str(key): value.float().numpy() for key, value in content.items()}


def _per_layer(path: Path, tensors: dict[str, Matrices], kind: str, layers: int) -> list[Matrices]:
    found: dict[int, Matrices] = {}
    for key, matrix in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            if key not in _OTHERS.values():
                raise UserError(f"{path}: unknown key {key!r}; expected layers.*, transfer.*, others, others_transfer")
            continue
        if match[1] != kind:
            continue
        first, last = (int(match[2]),) * 2 if match[2] else (int(match[3]), int(match[4]))
        if last >= layers:
            raise UserError(f"{path}: {key} names layer {last}, the model has {layers} MoE layers")
        if first > last:
            raise UserError(f"{path}: {key} names no layer")
        for layer in range(first, last + 1):
            if layer in found:
                raise UserError(f"{path}: {key} names layer {layer} again")
            found[layer] = matrix
    others = tensors.get(_OTHERS[kind])
    missing = [layer for layer in range(layers) if layer not in found]
    if missing and others is None:
        raise UserError(f"{path}: no {kind} matrix for layer {missing[0]}, and no {_OTHERS[kind]!r}")
    return [found.get(layer, others) for layer in range(layers)]  # type: ignore[misc]
