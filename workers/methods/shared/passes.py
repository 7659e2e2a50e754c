"""Passes over calibration tokens: recording what modules compute, and padding sequences to batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from moevolve.workers.contract.edits import Tokens
from moevolve.workers.contract.methods import Resident
from moevolve.workers.families.decoder import state_of
from moevolve.workers.families.layers import DenseLayer


class Watch(NamedTuple):
    """A module to observe during a pass.

    Attributes:
        callback: Called in every forward pass with the module's first input, [tokens, size], or with its `output`, the
            first of several.
    """

    module: nn.Module
    callback: Callable[[Tensor], None]
    output: bool = False


# Called with a feed-forward network's inputs [tokens, hidden] and its neurons' activations [tokens, width].
NetworkCallback = Callable[[Tensor, Tensor], None]


@torch.inference_mode()
def run_watched(resident: Resident, sequences: Sequence[Tokens], watches: Sequence[Watch]) -> None:
    """Run sequences through the unedited model and call back with what its modules compute."""
    with ExitStack() as stack:
        for module, callback, output in watches:
            if output:
                handle = module.register_forward_hook(
                    lambda _m, _args, out, call=callback: call(state_of(out).flatten(0, -2))
                )
            else:
                handle = module.register_forward_pre_hook(lambda _m, args, call=callback: call(args[0].flatten(0, -2)))
            stack.callback(handle.remove)
        resident.run(resident.rows(sequences))


def watch_networks(
    resident: Resident, sequences: Sequence[Tokens], watchers: Sequence[tuple[DenseLayer, NetworkCallback]]
) -> None:
    """Run sequences through the unedited model and call back with its feed-forward networks' activations."""
    watches: list[Watch] = []
    for layer, callback in watchers:
        inputs: list[Tensor] = []
        watches += [
            Watch(layer.inner[-1], inputs.append),
            Watch(layer.down, partial(_call_with_input, inputs, callback)),
        ]
    run_watched(resident, sequences, watches)


def _call_with_input(inputs: list[Tensor], callback: NetworkCallback, activations: Tensor) -> None:
    callback(inputs.pop(), activations)


# Limit on rows times columns of a batch of more than one sequence.
BATCH_COLUMNS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBatch:
    """Sequences of similar length, padded at their ends. Padding changes nothing for the tokens in front of it.

    Attributes:
        ids: Token ids, int64 [rows, columns].
        real: Indices of tokens that aren't padding in `ids.flatten()`, int64 [tokens].
        places: Indices of these tokens among those of all sequences one after the other, int64 [tokens].
    """

    ids: Tensor
    real: Tensor
    places: Tensor


def padded_batches(sequences: Sequence[Tokens], device: torch.device) -> Iterator[PaddedBatch]:
    """Batch sequences of similar length. The batches depend on the sequences alone."""
    lengths = torch.tensor([*map(len, sequences)])
    starts = lengths.cumsum(0) - lengths
    order = sorted(range(len(sequences)), key=lambda each: (len(sequences[each]), each))
    while order:
        rows = len(order)
        while rows > 1 and rows * len(sequences[order[rows - 1]]) > BATCH_COLUMNS:
            rows -= 1
        chosen, order = order[:rows], order[rows:]
        ids = pad_sequence([torch.tensor(sequences[each]) for each in chosen], batch_first=True)
        columns = torch.arange(ids.shape[1])
        inside = columns < lengths[chosen, None]
        real, places = inside.flatten().nonzero()[:, 0], (starts[chosen, None] + columns)[inside]
        yield PaddedBatch(ids.to(device), real.to(device), places.to(device))
