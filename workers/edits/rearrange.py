"""Moving the neurons of a layer's experts about, in place."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moevolve.workers.edits.alignment import sources
from moevolve.workers.layout import EXPERT_TENSORS

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as a float of so many bytes."""


@torch.inference_mode()
def rearrange(tensors: Mapping[str, Tensor], codes: NDArray[np.signedinteger]) -> None:
    """Let the neurons of fused experts change places and signs, bit for bit: what is undone is as it was.

    One expert's copy is made at a time; experts that stay as they are aren't touched.

    Args:
        tensors: `gate_up_proj` [n, 2I, H] and `down_proj` [n, H, I], changed in place.
        codes: see `Alignment`, [n, I].
    """
    gate_up, down = (tensors[name] for name in EXPERT_TENSORS)
    width = codes.shape[1]
    if (gate_up.shape[1], down.shape[2]) != (2 * width, width):
        raise ValueError(f"codes of {width} neurons for experts of {down.shape[2]}")
    still = np.arange(width)
    for expert, row in enumerate(codes):
        if (row == still).all():
            continue
        places = torch.from_numpy(sources(row).astype(np.int64)).to(down.device)
        flipped = torch.from_numpy(row < 0).to(down.device)
        gate, up = gate_up[expert, :width], gate_up[expert, width:]
        gate.copy_(gate.index_select(0, places))
        up.copy_(_flip(up.index_select(0, places), flipped[:, None]))
        # Ten times as fast as selecting columns.
        columns = down[expert].gather(1, places.expand(down.shape[1], -1))
        down[expert].copy_(_flip(columns, flipped))


def _flip(tensor: Tensor, flipped: Tensor) -> Tensor:
    """Change signs in place. On the bits: a product would lose denormals where the processor flushes them to zero."""
    bits = tensor.view(_BITS[tensor.element_size()])
    bits.bitwise_xor_(torch.where(flipped, torch.iinfo(bits.dtype).min, 0).to(bits.dtype))
    return tensor
