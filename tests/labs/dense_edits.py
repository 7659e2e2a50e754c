"""Random edits of the tiny dense models: divided networks, masked ones, and masked heads; and what networks see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moevolve.workers.contract.edits import Tokens
from moevolve.workers.methods.factorllm.edit import FactorLlmEdit
from moevolve.workers.methods.tomoe.edit import HeadMasks, ToMoeEdit
from moevolve.workers.model.resident import ResidentModel

LAYERS, HIDDEN, WIDTH, HEAD_DIM = 3, 32, 48, 8
SEQUENCES: list[Tokens] = [
    tuple(int(token) for token in np.random.default_rng(row).integers(3, 97, 4 + row % 9)) for row in range(24)
]


def divided(active: int = 2, routers: int = 1, seed: int = 0, experts: int = 6, bias: float = 1.0) -> FactorLlmEdit:
    """Networks divided into experts, with biases times `bias`."""
    rng = np.random.default_rng(seed)
    order = [np.sort(rng.permutation(WIDTH).reshape(experts, -1), axis=1).ravel() for _ in range(LAYERS)]
    shape = (LAYERS, routers, experts)
    weight, biases = rng.standard_normal((*shape, HIDDEN)), bias * rng.standard_normal(shape)
    return FactorLlmEdit(np.stack(order), weight, biases, active)


def head_masks(pairs: Sequence[int] = (2, 1, 4), active: Sequence[int] = (5, 8, 1)) -> HeadMasks:
    """Masks of heads of which some pairs of dimensions are kept in each layer, and a token's value dimensions."""
    rng = np.random.default_rng(1)
    return HeadMasks(
        np.stack([rng.permutation(HEAD_DIM // 2) < count for count in pairs]),
        np.array(active),
        rng.standard_normal((LAYERS, HEAD_DIM)),
        rng.standard_normal((LAYERS, HEAD_DIM, 2)),
        rng.standard_normal((LAYERS, 2, HIDDEN)),
    )


def masked(
    widths: Sequence[int] = (20, 7, 33), heads: HeadMasks | None = None, seed: int = 0, experts: int = 4
) -> ToMoeEdit:
    """Networks of which every expert keeps as many neurons as `widths` says by layer."""
    rng = np.random.default_rng(seed)
    kept = np.stack([[rng.permutation(WIDTH) < width for _ in range(experts)] for width in widths])
    return ToMoeEdit(kept, rng.standard_normal((LAYERS, experts, 5)), rng.standard_normal((LAYERS, 5, HIDDEN)), heads)


def replace_network(layer: Any, make: Callable[..., nn.Module]) -> None:
    """Replace a decoder layer's network by what `make` gives for its up, gate and down projections and activation."""
    if hasattr(layer, "fc1"):
        layer.fc1 = make(layer.fc1, None, layer.fc2, layer.activation_fn)
        layer.activation_fn = layer.fc2 = nn.Identity()
        return
    parts, network = dict(layer.mlp.named_children()), layer.mlp
    activation = next(getattr(network, name) for name in ("act_fn", "activation_fn", "act") if hasattr(network, name))
    if "gate_up_proj" in parts:
        gate, up = (SimpleNamespace(weight=half, bias=None) for half in network.gate_up_proj.weight.chunk(2))
    else:
        up, gate = next(parts[name] for name in ("up_proj", "fc1", "c_fc") if name in parts), parts.get("gate_proj")
    down = next(parts[name] for name in ("down_proj", "fc2", "c_proj") if name in parts)
    layer.mlp = make(up, gate, down, activation)


@torch.inference_mode()
def seen_by_network(
    model: ResidentModel, layer: int, sequences: Sequence[Sequence[int]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Inputs and activations of one network over all sequences, [tokens, size] each."""
    network = model.dense_layers[layer]
    found: list[list[torch.Tensor]] = [[], []]
    handles = [
        each.register_forward_hook(lambda _, args, __, rows=rows: rows.append(args[0].flatten(0, -2)))
        for each, rows in zip((network.up, network.down), found, strict=True)
    ]
    for tokens in sequences:
        model.model(torch.tensor([tokens]))
    for handle in handles:
        handle.remove()
    inputs, activations = (torch.cat(each).double().numpy() for each in found)
    return inputs, activations
