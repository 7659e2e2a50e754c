"""Running token sequences through a model and looking at what its feed-forward networks see and do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from moevolve.workers.dense_layout import DenseLayer
from moevolve.workers.resident import ResidentModel
from moevolve.workers.tokenizing import Tokens

Watcher = Callable[[Tensor, Tensor], None]
"""Told a network's inputs [tokens, hidden] and its neurons' activations [tokens, width], sequence by sequence."""


@torch.inference_mode()
def watch_networks(
    resident: ResidentModel, sequences: Sequence[Tokens], watchers: Sequence[tuple[DenseLayer, Watcher]]
) -> None:
    """Run every sequence by itself through the unedited model and tell each watched network's watcher.

    Args:
        resident: unedited.
        sequences: token ids.
        watchers: which networks, and whom to tell.
    """
    with ExitStack() as stack:
        for layer, watcher in watchers:
            seen: list[Tensor] = []
            stack.callback(layer.up.register_forward_pre_hook(_keep_input(seen)).remove)
            stack.callback(layer.down.register_forward_pre_hook(_tell(seen, watcher)).remove)
        for tokens in sequences:
            resident.run(tokens)


def _keep_input(seen: list[Tensor]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args[0].flatten(0, -2))

    return hook


def _tell(seen: list[Tensor], watcher: Watcher) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        watcher(seen.pop(), args[0].flatten(0, -2))

    return hook
