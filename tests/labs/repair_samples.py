"""Rows to repair on, and a repair of pruned Mixtrals from the equations: plain models, features made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moevolve.workers.contract.fitting import FitRows

Floats = NDArray[np.float64]


BLOCKS = ("mlp", "block_sparse_moe", "feed_forward")
"""Names that families give the feed-forward block of a decoder layer."""


def sequences_of(lengths: Sequence[int], seed: int = 0, vocabulary: int = 97) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(3, vocabulary, length).tolist()) for length in lengths]


def rows_of(sequences: Sequence[Sequence[int]], answer: int = 0) -> FitRows:
    """Rows whose last `answer` tokens are the answer."""
    tokens = np.array([token for each in sequences for token in each], dtype=np.int32)
    lengths = np.array([*map(len, sequences)], dtype=np.int32)
    return FitRows(tokens, lengths, lengths - answer)


@torch.no_grad()
def seen_at(model: Any, sequences: Sequence[Sequence[int]]) -> list[dict[str, Floats]]:
    """Of every decoder layer, what goes `into` its experts, what the experts give, and the stream `behind` the layer.

    Sequences are run one by one: [tokens of all, hidden].
    """
    found: list[dict[str, list[Tensor]]] = [{} for _ in model.model.layers]

    def note(layer: int, name: str, value: Tensor) -> None:
        found[layer].setdefault(name, []).append(value.reshape(-1, value.shape[-1]).double())

    with ExitStack() as stack:
        for i, layer in enumerate(model.model.layers):

            def at_experts(module: nn.Module, args: tuple[Any, ...], output: Any, i: int = i) -> None:
                note(i, "into", args[0])
                note(i, "experts", output[0] if isinstance(output, tuple) else output)

            def behind(module: nn.Module, args: tuple[Any, ...], output: Any, i: int = i) -> None:
                note(i, "behind", output[0] if isinstance(output, tuple) else output)

            for block in (getattr(layer, name) for name in BLOCKS if hasattr(layer, name)):
                stack.callback(block.register_forward_hook(at_experts).remove)
            stack.callback(layer.register_forward_hook(behind).remove)
        for each in sequences:
            model(torch.tensor([each]))
    return [{name: torch.cat(values).numpy() for name, values in layer.items()} for layer in found]


def weighted_activations(block: Any, kept: Sequence[int], hidden: Floats, active: int = 2) -> Floats:
    """A pruned Mixtral block's features, token by token and expert by expert: [tokens, n' x I]."""
    gate = block.gate.weight.double().numpy()
    fused = block.experts.gate_up_proj.double().numpy()
    width = fused.shape[1] // 2
    phi = np.zeros((len(hidden), len(kept) * width))
    for token, state in enumerate(hidden):
        scores = np.exp(gate[list(kept)] @ state)
        chosen = np.argsort(-scores)[:active]
        for new in chosen:
            inner = fused[kept[new]] @ state
            activation = inner[:width] / (1 + np.exp(-inner[:width])) * inner[width:]
            phi[token, new * width : (new + 1) * width] = scores[new] / scores[chosen].sum() * activation
    return phi


@torch.no_grad()
def repaired_by_hand(
    directory: Path,
    kept: Sequence[Sequence[int]],
    sequences: Sequence[Sequence[int]],
    checked: NDArray[np.bool_],
    ridge_lambda: float,
    answering: NDArray[np.bool_],
) -> tuple[Any, list[bool]]:
    """A Mixtral checkpoint pruned to `kept` experts per layer, every layer fitted in float64.

    Tokens that are `answering` count 8 times.

    Returns:
        The full-size model, in which all experts that aren't kept are never chosen, and which layers were changed.
    """
    from transformers import AutoModelForCausalLM

    full, model = (AutoModelForCausalLM.from_pretrained(directory).eval() for _ in range(2))
    reference, changed = seen_at(full, sequences), []
    for layer, experts in enumerate(kept):
        block = model.model.layers[layer].mlp
        block.gate = _OnlyKept(block.gate, experts)
    for layer, experts in enumerate(kept):
        block = model.model.layers[layer].mlp
        now = seen_at(model, sequences)[layer]
        phi = weighted_activations(block, experts, now["into"])
        down = block.experts.down_proj.double().numpy()
        weights = np.concatenate([down[expert].T for expert in experts])
        wanted = reference[layer]["behind"] - (now["behind"] - now["experts"])
        roots = np.sqrt(np.where(answering, 8.0, 1.0))[:, None]
        residual, phi = roots * (wanted - phi @ weights), roots * phi
        fitted = phi[~checked]
        ridge = ridge_lambda * np.mean(np.sum(fitted**2, axis=0)) * np.eye(phi.shape[1])
        change = np.linalg.solve(fitted.T @ fitted + ridge, fitted.T @ residual[~checked])
        left = residual[checked] - phi[checked] @ change
        changed.append(bool((left**2).sum() < (residual[checked] ** 2).sum()))
        if changed[-1]:
            new = (weights + change).reshape(len(experts), -1, weights.shape[1])
            for place, expert in enumerate(experts):
                block.experts.down_proj[expert] = torch.tensor(new[place].T, dtype=torch.float32)
    return model, changed


class _OnlyKept(nn.Module):
    """A Mixtral's router whose other experts' logits are minus infinity."""

    def __init__(self, inner: Any, kept: Sequence[int]) -> None:
        super().__init__()
        self.inner, self.weight, self.top_k = inner, inner.weight, inner.top_k
        self.out = torch.full((len(inner.weight),), -torch.inf)
        self.out[list(kept)] = 0

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T + self.out
        weights, chosen = torch.softmax(logits, dim=-1).topk(self.top_k)
        return logits, weights / weights.sum(dim=-1, keepdim=True), chosen
