"""What the experts of a model do on tokens, one at a time in float64, straight from the papers' definitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Token:
    """One token in one layer.

    Attributes:
        probabilities: softmax over all experts, [n].
        gates: routing weights as the family applies them, [n], zero where an expert isn't chosen.
        chosen: the chosen experts, best first.
        outputs: every expert's own output, [n, hidden].
    """

    probabilities: Tensor
    gates: Tensor
    chosen: list[int]
    outputs: Tensor


@torch.inference_mode()
def plain_tokens(resident: Any, layer: Any, sequences: Sequence[Sequence[int]]) -> list[Token]:
    """All tokens of all sequences, in order, as a layer of an unedited resident model sees them."""
    seen: list[Tensor] = []
    handle = layer.block.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    for sequence in sequences:
        resident.model(torch.tensor([sequence]))
    handle.remove()
    active = int(resident.model.config.num_experts_per_tok)
    gate_up, down = layer.experts.gate_up_proj.double(), layer.experts.down_proj.double()
    tokens = []
    for hidden in torch.cat(seen).double():
        probabilities = torch.softmax(layer.router.weight.double() @ hidden, dim=0)
        chosen = sorted(range(layer.count), key=lambda e: -float(probabilities[e]))[:active]
        gates = torch.zeros(layer.count, dtype=torch.float64)
        gates[chosen] = probabilities[chosen]
        if layer.renormalise:
            gates /= gates.sum()
        outputs = []
        for expert in range(layer.count):
            gate, up = (gate_up[expert] @ hidden).chunk(2)
            outputs.append(down[expert] @ (torch.nn.functional.silu(gate) * up))
        tokens.append(Token(probabilities, gates, chosen, torch.stack(outputs)))
    return tokens


def change(tokens: Sequence[Token], kept: Sequence[int], active: int, renormalise: bool, logits_space: bool) -> float:
    """NAEE's discrepancy of keeping some experts.

    The squared Frobenius norm of the outputs' difference to the whole layer's, as a share of that of the whole layer's.
    """
    total = whole = 0.0
    for token in tokens:
        gates = _gates(token, kept, active, renormalise, logits_space)
        output = (token.gates[:, None] * token.outputs).sum(dim=0)
        total += float((output - (gates[:, None] * token.outputs).sum(dim=0)).square().sum())
        whole += float(output.square().sum())
    return total / whole


def _gates(token: Token, kept: Sequence[int], active: int, renormalise: bool, logits_space: bool) -> Tensor:
    """Routing weights where only some experts are left, [n]."""
    scores = torch.zeros_like(token.probabilities)
    scores[list(kept)] = token.probabilities[list(kept)]
    if logits_space:
        scores /= scores.sum()
    order = sorted(kept, key=lambda e: -float(scores[e]))[:active]
    gates = torch.zeros_like(scores)
    gates[order] = scores[order]
    if renormalise:
        gates /= gates.sum()
    return gates
