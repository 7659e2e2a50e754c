"""Times how fast a mixture of experts generates with narrower experts, before it is known which neurons they keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import nn

from moevolve.evaluators.errors import UserError
from moevolve.workers.families.base import EXPERT_ALIGNMENT
from moevolve.workers.families.layers import MoELayer, find_moe_layers
from moevolve.workers.methods.eep.neurons import ExpertNeurons
from moevolve.workers.profiling.process import ProfiledProcess
from moevolve.workers.profiling.report import ProfiledModel, ProfileSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def time_widths(model: ProfiledModel, shares: Sequence[float], settings: ProfileSettings) -> list[float]:
    """Time the decoding of a model whose experts have only the first of their neurons, as plain `transformers` runs it.

    The settings have one batch size, and `shares` of each expert's neurons are in (0, 1].

    Returns:
        Seconds of all decoding steps by share, medians over the timed runs.

    Raises:
        UserError: The model can't be loaded, or memory is short.
    """
    (size,), threads = settings.batch_sizes, torch.get_num_threads()
    seconds: list[list[float]] = [[] for _ in shares]
    try:
        process = ProfiledProcess(model, settings)
        process.measure(size)  # the first run is slower
        for turns in settings.turns(len(shares)):
            for turn in turns:
                # Made anew for every run, so that memory holds one narrower copy at a time.
                with narrowed(process.model, model.label, shares[turn]):
                    seconds[turn].append(process.measure(size).decode_seconds)
    except torch.cuda.OutOfMemoryError as error:
        raise UserError(f"{model.label}: the GPU has no room for it and a narrower copy of its experts") from error
    finally:
        torch.set_num_threads(threads)  # the process goes on to evaluate candidates
    return [median(each) for each in seconds]


@contextmanager
def narrowed(model: PreTrainedModel, name: str, share: float) -> Iterator[None]:
    """Context manager in which every expert has only the first of its neurons, `share` of them in (0, 1].

    The number is rounded to what kernels can multiply. `name` is the model's name in messages.
    """
    with ExitStack() as stack:
        for layer in find_moe_layers(model, name):
            stack.enter_context(_narrowed_layer(layer, share))
        yield


@contextmanager
def _narrowed_layer(layer: MoELayer, share: float) -> Iterator[None]:
    originals = layer.expert_tensors()
    wide = ExpertNeurons(layer.experts, originals)
    width = min(wide.width, max(1, round(share * wide.width / EXPERT_ALIGNMENT)) * EXPERT_ALIGNMENT)
    if width == wide.width:
        yield
        return
    tensors = {key: originals[key].new_empty(shape) for key, shape in wide.shapes(wide.count, width).items()}
    tensors |= {key: originals[key] for key in wide.output_biases}
    first = torch.arange(wide.count)[:, None] * wide.width + torch.arange(width)
    ExpertNeurons(layer.experts, tensors).copy_from(wide, first)
    try:
        for key, tensor in tensors.items():
            setattr(layer.experts, key, nn.Parameter(tensor.data, requires_grad=False))
        yield
    finally:
        for key, tensor in originals.items():
            setattr(layer.experts, key, tensor)
