"""What published methods that prune single neurons of experts leave of the text model, beside README's first table.

    python tests/benchmarks/neuron_peers.py [--share 0.25]

A neuron is a row of an expert's gate and up projections and the column of its output projection. HEAPr (arXiv
2509.22299) and MoE-Slimming (arXiv 2606.18304, followed by its authors' code) measure on the tokens that `counts` is
repaired on, and leave experts of unequal widths, all routers and shared experts. Checkpoints keep their shape, with
zeros in the output columns of dropped neurons; parameters are counted without those neurons. HEAPr needs gradients of
the model's loss, so it is an anchor here and no method of the product. The third row ranks neurons by their energy, as
the product does within a layer. None is repaired, because the product's narrower experts are equally wide. Perplexities
on `test` are geometric means over three domains, on the rows of `configs/runs/text.yaml`; intervals are over examples.
All of it runs in one thread.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import bench
import torch
from distil import MODEL, scored, starts
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from transformers import AutoModelForCausalLM, PreTrainedModel

from moevolve.workers.contract.edits import Tokens

CALIBRATED = {"HOPE": {"baseline": "hope", "repair": {"tokens": 65_536}}}
"""The cheapest search that measures the tokens which `counts` is repaired on."""


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--share", type=float, default=0.25, help="of all experts' neurons that is kept")
    share = parser.parse_args().share
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="moevolve-neuron-peers-") as name:
        folder = Path(name)
        sequences, _ = starts(folder, CALIBRATED)
        score = partial(scored, folder, search="distil-HOPE.HOPE.s0")
        model, begun = loaded(), time.process_time()
        layers = observed(model, sequences)
        print(f"{time.process_time() - begun:.0f} s of processor for {sum(map(len, sequences)):,} tokens", flush=True)
        print("| method | parameters | widths of experts | perplexity |\n|---|---:|---:|---:|", flush=True)
        print(f"| full model | {model.num_parameters() / 1e6:.2f} M | | {score([])} |", flush=True)
        importance, energies = (torch.stack(list(map(of, layers))) for of in (heapr_importance, energy))
        total = round(share * importance.numel())
        masks = {"HEAPr": highest(importance, total), "MoE-Slimming": slimmed(layers, total)}
        for method, kept in (masks | {"energy": highest(energies, total)}).items():
            size, widths = write(kept, folder / method) / 1e6, kept.sum(dim=-1)
            found = score([folder / method])
            print(f"| {method} | {size:.2f} M | {widths.min()} to {widths.max()} | {found} |", flush=True)


def loaded() -> PreTrainedModel:
    """Return the full model in float32."""
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


class LayerSums:
    """The sums over tokens that both methods require of a decoder layer; they grow as the model runs.

    An expert's output is here the one before its routing weight, as in both methods.

    Attributes:
        tokens: How many tokens chose an expert, float64 [experts].
        gradients: Outer products of the loss's gradient for an expert's output, float64 [experts, hidden, hidden].
        squares: Squares of gate projections, up projections, their gated products, and these times the routing weight,
            float64 [4, experts, width].
        attributions: Products of an expert's weighted output and all experts' sum, relative to the squared norm of the
            layer's output, float64 [experts].
    """

    def __init__(self, layer: Any) -> None:
        self.experts = layer.mlp.experts
        experts, hidden, width = self.experts.down_proj.shape
        self.tokens, self.attributions = torch.zeros(2, experts, dtype=torch.float64)
        self.gradients = torch.zeros(experts, hidden, hidden, dtype=torch.float64)
        self.squares = torch.zeros(4, experts, width, dtype=torch.float64)
        self._total, self._parts = torch.empty(0), list[tuple[int, Tensor, Tensor]]()
        self.experts.forward = self._run
        layer.register_forward_hook(self._attribute)

    def _run(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the experts' weighted sum, [tokens, hidden], for the experts `chosen` per token, [tokens, active]."""
        self._total, self._parts = torch.zeros_like(hidden), []
        for expert in chosen.unique().tolist():
            token, slot = torch.where(chosen == expert)
            gate, up = linear(hidden[token], self.experts.gate_up_proj[expert]).chunk(2, dim=-1)
            inner = self.experts.act_fn(gate) * up
            found = linear(inner, self.experts.down_proj[expert])
            found.register_hook(partial(self._add_gradient, expert))
            self.tokens[expert] += len(token)
            scales = weights[token, slot, None]
            values = torch.stack([gate, up, inner, inner * scales])
            self.squares[:, expert] += values.detach().double().square().sum(dim=1)
            weighted = found * scales
            self._total = self._total.index_add(0, token, weighted)
            self._parts.append((expert, token, weighted.detach().double()))
        return self._total

    def _add_gradient(self, expert: int, gradient: Tensor) -> None:
        gradient = gradient.double()
        self.gradients[expert] += gradient.T @ gradient

    def _attribute(self, layer: object, arguments: object, output: Tensor) -> None:
        """Add to the attributions, now that also the layer's output, [1, tokens, hidden], is known.

        MoE-Slimming scales all experts' outputs by a factor a and multiplies each with the negative derivative of the
        layer's squared error, relative to its squared norm. The error is (1 - a) times the experts' weighted sum, so
        that what they do has a closed form: the attributions here, times 2 a (1 - a). The authors' answers to reviewers
        have a = 1, which leaves nothing, and their code 0.9; the allocation is the same for all others.
        """
        total = self._total.detach().double()
        relative = total / (output[0].detach().double().square().sum(dim=-1, keepdim=True) + 1e-6)
        for expert, token, weighted in self._parts:
            self.attributions[expert] += (relative[token] * weighted).sum()


def observed(model: PreTrainedModel, sequences: Sequence[Tokens]) -> list[LayerSums]:
    """Return the sums of every layer, after one forward and one backward pass over token sequences."""
    model.requires_grad_(False)
    layers = [LayerSums(layer) for layer in model.model.layers]
    for sequence in sequences:
        tokens = torch.tensor(sequence)
        states = model.get_input_embeddings()(tokens[None]).requires_grad_()
        # Not the mean over a sequence: sequences are of unequal lengths here, and of equal ones in HEAPr's paper.
        cross_entropy(model(inputs_embeds=states).logits[0, :-1], tokens[1:], reduction="sum").backward()
    return layers


def heapr_importance(layer: LayerSums) -> Tensor:
    """Return HEAPr's importance of a layer's neurons, float64 [experts, width].

    For a neuron with output e(x) that is the mean of e(x)' G e(x) / 2 over the tokens that chose its expert, with G the
    mean of outer products of the gradient for the expert's output over the same tokens. As e(x) is the neuron's output
    column times a number, that number's mean square is enough, and the paper's second forward pass, which waits for G,
    isn't needed. The authors' code leaves out the half and ranks unused experts below all others.
    """
    tokens, columns = layer.tokens.clamp_min(1), layer.experts.down_proj.double()
    curvature = torch.einsum("ehw,ehg,egw->ew", columns, layer.gradients / tokens[:, None, None], columns)
    return layer.squares[2] / tokens[:, None] * curvature / 2


def energy(layer: LayerSums) -> Tensor:
    """Return the energy of a layer's neurons, float64 [experts, width]: squares of its output norm."""
    return layer.squares[3] * layer.experts.down_proj.double().square().sum(dim=1)


def highest(scores: Tensor, total: int) -> Tensor:
    """Return the mask of the `total` highest scores of all layers together, as HEAPr keeps neurons."""
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept.view(-1)[scores.flatten().topk(total).indices] = True
    return kept


def slimmed(layers: Sequence[LayerSums], total: int) -> Tensor:
    """Return the mask of the `total` neurons that MoE-Slimming keeps, bool [layers, experts, width].

    A neuron's score is the mean of the norms of its gate, up and gated values. Layers cover a share of the sum of their
    scores in proportion to the smoothed loss of scaled experts, and experts in proportion to the root of attributions:
    the defaults of the authors' code (`loss_coverage`, `attr_coverage`, `activation`). Not done are that code's running
    means over batches, its clipping of the largest hundredth of the products that attributions are sums of, and its
    least and rounded widths, which serve hardware.
    """
    scores = torch.stack([layer.squares.sqrt().mean(dim=0) for layer in layers])
    attributions = torch.stack([layer.attributions for layer in layers])
    # Experts' weighted outputs add up to their sum, so their attributions add up to the layer's loss.
    losses = attributions.sum(dim=1)
    for _ in range(4):
        losses = losses.sqrt()
        losses = losses.clamp(losses.mean() - losses.std(), losses.mean() + losses.std())
    attributions = attributions.clamp_min(0)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    for layer, size in enumerate(covering(scores.flatten(1), losses, total).tolist()):
        weighted = scores[layer] * attributions[layer, :, None]
        for expert, width in enumerate(covering(weighted, attributions[layer].sqrt(), size).tolist()):
            kept[layer, expert, scores[layer, expert].topk(width).indices] = True
    return kept


def covering(scores: Tensor, weights: Tensor, total: int) -> Tensor:
    """Return how many of its highest scores each group keeps, int64 [groups], to cover shares in proportion to weights.

    Args:
        scores: Not negative, [groups, scores].
        weights: Not negative, [groups]: a group covers a common level times its weight of its scores' sum, at most all.
        total: How many all groups keep. What no level meets goes to the highest scores that are left.
    """
    ordered = scores.sort(dim=1, descending=True).values
    shares = ordered.cumsum(dim=1) / ordered.sum(dim=1, keepdim=True).clamp_min(1e-30)

    def needed(level: float) -> Tensor:
        aims = (level * weights).clamp(max=1)[:, None]
        return torch.where(aims > 0, torch.searchsorted(shares, aims) + 1, 0)[:, 0].clamp(max=scores.shape[1])

    low, high = 0.0, 1 / weights[weights > 0].min().item()
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if needed(middle).sum() <= total else (low, middle)
    counts = needed(low)
    following = torch.cat([ordered, torch.full_like(ordered[:, :1], -1)], dim=1)
    while counts.sum() < total:
        counts[following.gather(1, counts[:, None])[:, 0].argmax()] += 1
    return counts


def write(kept: Tensor, folder: Path) -> int:
    """Write the model with zeros for all other neurons, bool [layers, experts, width]; its parameters without those."""
    model = loaded()
    for layer, mask in zip(model.model.layers, kept, strict=True):
        layer.mlp.experts.down_proj.data *= mask[:, None, :]
    model.save_pretrained(folder)
    for file in MODEL.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return model.num_parameters() - 3 * model.config.hidden_size * int((~kept).sum())


if __name__ == "__main__":
    main()
