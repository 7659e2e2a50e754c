"""ToMoE edits on resident models against a pseudo-MoE made of slices, and against the unedited model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_edits import HEAD_DIM, HIDDEN, LAYERS, WIDTH, head_masks, masked, replace_network
from edit_checks import assert_close, logits
from families import DENSE, representatives
from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.methods.tomoe.edit import HeadMasks, ToMoeEdit

Configs = Callable[..., ModelConfig]
FAMILIES = ("llama", "opt")
EXPERTS = 4


class SlicedNetwork(nn.Module):
    """The pseudo-MoE of App. B.3: every expert is a small network cut out of the whole one, in float64."""

    def __init__(self, up: Any, gate: Any, down: Any, activation: Any, edit: ToMoeEdit, layer: int) -> None:
        super().__init__()
        self.router = torch.tensor(edit.router[layer]).double() @ torch.tensor(edit.directions[layer]).double()
        self.activation = activation
        self.experts = [
            (self.rows(up, mask), None if gate is None else self.rows(gate, mask), down.weight.double()[:, mask])
            for mask in torch.tensor(edit.kept[layer])
        ]
        self.bias = 0 if down.bias is None else down.bias.double()

    @staticmethod
    def rows(linear: Any, mask: Tensor) -> tuple[Tensor, Any]:
        return linear.weight.double()[mask], 0 if linear.bias is None else linear.bias.double()[mask]

    def token(self, x: Tensor) -> Tensor:
        (up, up_bias), gate, down = self.experts[int((self.router @ x).argmax())]
        inner = up @ x + up_bias
        inner = self.activation(inner) if gate is None else inner * self.activation(gate[0] @ x + gate[1])
        return down @ inner + self.bias

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        return torch.stack([self.token(row.double()) for row in flat]).to(flat.dtype).reshape(hidden_states.shape)


class SlicedAttention(nn.Module):
    """Causal attention with grouped key/value heads on smaller heads (Eq. 4), in float64: queries and keys have the
    kept dimensions only, their rotary embedding too; a token's values have its own dimensions, zero elsewhere."""

    def __init__(self, attention: Any, rotary: Any, heads: HeadMasks, layer: int) -> None:
        super().__init__()
        pairs = torch.tensor(heads.pairs[layer]).nonzero().squeeze(1)
        self.kept = torch.cat((pairs, pairs + HEAD_DIM // 2))
        self.rotary, self.scale = rotary, attention.scaling
        query, key, self.value = (self.heads(getattr(attention, f"{name}_proj")) for name in "qkv")
        self.query, self.key = query[:, self.kept], key[:, self.kept]
        self.output = attention.o_proj.weight.double()
        self.bias, self.router = torch.tensor(heads.value_bias[layer]).double(), torch.tensor(heads.value_router[layer])
        self.directions, self.active = torch.tensor(heads.directions[layer]), int(heads.active[layer])

    @staticmethod
    def heads(linear: Any) -> Tensor:
        """Weights and biases by head, [heads, head_dim, hidden + 1]."""
        bias = torch.zeros(linear.out_features) if linear.bias is None else linear.bias
        return torch.cat((linear.weight, bias[:, None]), dim=1).double().view(-1, HEAD_DIM, HIDDEN + 1)

    def turned(self, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = values.shape[-1] // 2
        return values * cos + torch.cat((-values[..., half:], values[..., :half]), dim=-1) * sin

    def sequence(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        scores = self.bias + x @ (self.router.double() @ self.directions.double()).t()
        masks = torch.zeros_like(scores)
        for row, score in zip(masks, scores, strict=True):
            row[torch.argsort(score, descending=True)[: self.active]] = 1
        outputs, x = [], torch.cat((x, torch.ones_like(x[:, :1])), dim=1)
        for head, query in enumerate(self.query):
            group = head * len(self.key) // len(self.query)
            products = self.turned(x @ query.t(), cos, sin) @ self.turned(x @ self.key[group].t(), cos, sin).t()
            future = torch.ones_like(products).triu(1).bool()
            shares = torch.softmax((products * self.scale).masked_fill(future, -torch.inf), dim=-1)
            outputs.append(shares @ (x @ self.value[group].t() * masks) * masks)
        return torch.cat(outputs, dim=-1) @ self.output.t()

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> tuple[Tensor, None]:
        cos, sin = (each.double()[..., self.kept] for each in position_embeddings)
        rows = [self.sequence(x, cos[i % len(cos)], sin[i % len(sin)]) for i, x in enumerate(hidden_states.double())]
        return torch.stack(rows).to(hidden_states.dtype), None


@torch.no_grad()
def sliced_logits(directory: Path, edit: ToMoeEdit, ids: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    for i, layer in enumerate(model.get_decoder().layers):
        if edit.heads is not None:
            layer.self_attn = SlicedAttention(layer.self_attn, model.model.rotary_emb, edit.heads, i)
        replace_network(layer, lambda *parts, i=i: SlicedNetwork(*parts, edit, i))
    return model(ids).logits


@pytest.mark.parametrize("family", representatives((*FAMILIES, "phi3"), DENSE))
def test_masked_networks_are_sliced_ones(family: str, resident: Any, checkpoint: Any, tokens: Tensor) -> None:
    model = resident(family)
    found = logits(model, masked(), tokens)
    assert_close(found, sliced_logits(checkpoint(family), masked(), tokens))
    assert float((found - logits(model, None, tokens)).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("family", "pairs", "active"),
    [("llama", (2, 1, 4), (5, 8, 1)), ("qwen2", (1, 3, 4), (8, 1, 3))],
)
def test_masked_heads_are_sliced_ones(
    family: str, pairs: tuple[int, ...], active: tuple[int, ...], resident: Any, checkpoint: Any, tokens: Tensor
) -> None:
    edit = masked(heads=head_masks(pairs, active))
    found = logits(resident(family), edit, tokens)
    assert_close(found, sliced_logits(checkpoint(family), edit, tokens))
    assert float((found - logits(resident(family), masked(), tokens)).abs().max()) > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_full_masks_are_the_unedited_model(family: str, resident: Any, tokens: Tensor) -> None:
    model = resident(family)
    heads = head_masks((4, 4, 4), (8, 8, 8)) if family == "llama" else None
    assert torch.equal(logits(model, masked((WIDTH,) * 3, heads), tokens), logits(model, None, tokens))


def test_cached_steps_are_one_pass(resident: Any, tokens: Tensor) -> None:
    model = resident("llama")
    with torch.inference_mode(), model.edited(masked(heads=head_masks())):
        whole = model.model(tokens).logits
        first = model.model(tokens[:, :7], use_cache=True)
        cache, parts = first.past_key_values, [first.logits]
        for token in tokens[:, 7:].split(1, dim=1):
            parts += [model.model(token, past_key_values=cache, use_cache=True).logits]
    assert_close(torch.cat(parts, dim=1), whole)


def test_edits_of_other_models_are_refused(resident: Any) -> None:
    edit = masked()
    with pytest.raises(UserError, match="3 networks of 24 neurons on 32 inputs, the model has 3 of 48 on 32"):
        resident("llama").apply(replace(edit, kept=np.ones((LAYERS, EXPERTS, 24), dtype=np.bool_)))
    with pytest.raises(UserError, match=r"'opt' can't be masked; set genome.attention: false"):
        resident("opt").apply(masked(heads=head_masks()))
    small = HeadMasks(np.ones((3, 2)), np.ones(3), np.ones((3, 4)), np.ones((3, 4, 1)), np.ones((3, 1, HIDDEN)))
    with pytest.raises(UserError, match="heads of 4 dimensions, the model's have 8"):
        resident("llama").apply(masked(heads=small))
    with pytest.raises(UserError, match="need dense feed-forward networks"):
        resident("mixtral").apply(edit)


def test_arrays_that_disagree_are_refused() -> None:
    edit, heads = masked(), head_masks()
    uneven = edit.kept.copy()
    uneven[0, 0] = True
    for change, message in (({"kept": uneven}, "equally many"), ({"router": edit.router[:, :2]}, "disagree")):
        with pytest.raises(UserError, match=message):
            replace(edit, **change)
    for change, message in (
        ({"pairs": heads.pairs[:, :2]}, "pairs has shape"),
        ({"active": np.array([0, 8, 8])}, "1 to 8 values"),
    ):
        with pytest.raises(UserError, match=message):
            replace(heads, **change)


def test_the_hash_is_of_all_that_matters() -> None:
    edit, heads = masked(heads=head_masks()), head_masks()
    others = (
        replace(edit, heads=None),
        replace(edit, kept=edit.kept[:, ::-1]),
        *(replace(edit, **{name: getattr(edit, name)[::-1]}) for name in ("router", "directions")),
        *(
            replace(edit, heads=replace(heads, **{name: getattr(heads, name)[::-1]}))
            for name in ("pairs", "active", "value_bias", "value_router", "directions")
        ),
    )
    assert masked(heads=head_masks()).phenotype_hash == edit.phenotype_hash
    assert len({each.phenotype_hash for each in (edit, *others)}) == 10
