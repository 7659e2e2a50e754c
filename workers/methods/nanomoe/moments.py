"""What linear layers get to see on rows of tokens: by these an error of their weight is measured as their outputs'."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from moevolve.workers.contract.fitting import FitRows
from moevolve.workers.methods.shared.input_statistics import MEMORY, InputMoments


def input_moments(decoder: nn.Module, linears: Mapping[str, nn.Linear], rows: FitRows) -> Iterator[tuple[str, Tensor]]:
    """Mean products of layers' inputs over all tokens, by name, as soon as they are known.

    Args:
        decoder: unedited.
        linears: layers of it.
        rows: the tokens; no sequence attends to another.

    Yields:
        A layer's name and float32 [d1, d1] on its device.
    """
    for batch in _batches(linears):
        sums = _measured(decoder, batch, rows)
        for name in batch:
            yield name, sums.pop(name).moment.float()


@torch.inference_mode()
def _measured(decoder: nn.Module, linears: Mapping[str, nn.Linear], rows: FitRows) -> dict[str, InputMoments]:
    device = next(decoder.parameters()).device
    sums = {name: InputMoments(linear.in_features, linear.weight.device) for name, linear in linears.items()}
    with ExitStack() as stack:
        for name, linear in linears.items():
            stack.callback(linear.register_forward_pre_hook(_adding(sums[name])).remove)
        for tokens in rows.first(int(rows.lengths.sum())):
            decoder(input_ids=torch.tensor([tokens], device=device), use_cache=False)
    return sums


def _adding(moments: InputMoments) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        moments.add(args[0].flatten(0, -2))

    return hook


def _batches(linears: Mapping[str, nn.Linear]) -> Iterator[dict[str, nn.Linear]]:
    batch: dict[str, nn.Linear] = {}
    room = MEMORY
    for name, linear in linears.items():
        size = 8 * linear.in_features**2
        if batch and size > room:
            yield batch
            batch, room = {}, MEMORY
        batch[name] = linear
        room -= size
    if batch:
        yield batch
