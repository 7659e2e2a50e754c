"""FactorLLM edits on resident models against the equations, the dense model, and each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_edits import LAYERS, divided, replace_network
from edit_checks import assert_close, logits
from families import DENSE, representatives
from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.methods.factorllm.edit import FactorLlmEdit
from moevolve.workers.model.resident import ResidentModel

Configs = Callable[..., ModelConfig]
FAMILIES = ("llama", "opt")


class PlainFactored(nn.Module):
    """A divided network from Eq. 7, one token and one expert at a time, in float64, on copies of the weights."""

    def __init__(self, up: Any, gate: Any, down: Any, activation: Any, edit: FactorLlmEdit, layer: int) -> None:
        super().__init__()
        self.up, self.gate, self.down, self.activation = up, gate, down, activation
        self.edit, self.layer = edit, layer

    def token(self, x: Tensor) -> Tensor:
        edit = self.edit
        weight, bias = torch.tensor(edit.router_weight[self.layer]), torch.tensor(edit.router_bias[self.layer])
        chosen = set(range(edit.experts))
        for router in range(edit.routers):
            logits = weight[router].double() @ x + bias[router].double()
            chosen &= set(torch.argsort(logits, descending=True)[: edit.active].tolist())
        inner = self.activation(self.linear(self.up if self.gate is None else self.gate, x))
        inner = inner if self.gate is None else inner * self.linear(self.up, x)
        total = torch.zeros_like(x)
        for expert in sorted(chosen):
            size = edit.width // edit.experts
            neurons = torch.from_numpy(edit.order[self.layer][expert * size : (expert + 1) * size]).long()
            total += self.down.weight.double()[:, neurons] @ inner[neurons]
        bias_out = 0 if self.down.bias is None else self.down.bias.double()
        return total + bias_out

    @staticmethod
    def linear(module: Any, x: Tensor) -> Tensor:
        return module.weight.double() @ x + (0 if module.bias is None else module.bias.double())

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        return torch.stack([self.token(row.double()) for row in flat]).to(flat.dtype).reshape(hidden_states.shape)


@torch.no_grad()
def plain_logits(directory: Path, edit: FactorLlmEdit, ids: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    for i, layer in enumerate(model.get_decoder().layers):
        replace_network(layer, lambda *parts, i=i: PlainFactored(*parts, edit, i))
    return model(ids).logits


@pytest.mark.parametrize("family", representatives((*FAMILIES, "phi3"), DENSE))
@pytest.mark.parametrize(("active", "routers"), [(2, 1), (4, 3)])
def test_an_edit_is_the_equation(
    family: str, active: int, routers: int, resident: Any, checkpoint: Any, tokens: Tensor
) -> None:
    edit = divided(active, routers)
    model = resident(family)
    found = logits(model, edit, tokens)
    assert_close(found, plain_logits(checkpoint(family), edit, tokens))
    assert float((found - logits(model, None, tokens)).abs().max()) > 0.1


@pytest.mark.parametrize(("family", "experts", "routers"), [("llama", 48, 1), ("opt", 6, 3)])
def test_all_experts_active_are_the_dense_model(
    family: str, experts: int, routers: int, resident: Any, tokens: Tensor
) -> None:
    model = resident(family)
    edit = divided(active=experts, routers=routers, experts=experts)
    assert_close(logits(model, edit, tokens), logits(model, None, tokens))


def test_weights_are_permuted_within_their_own_memory(resident: Any) -> None:
    model = resident("llama")
    layer = model.dense_layers[1]
    pointers = [each.weight.data_ptr() for each in (layer.up, layer.down)]
    original = layer.up.weight.clone(), layer.down.weight.clone()
    edit = divided(seed=8)
    with model.edited(edit):
        assert [each.weight.data_ptr() for each in (layer.up, layer.down)] == pointers
        order = torch.from_numpy(edit.order[1]).long()
        assert torch.equal(layer.up.weight, original[0][order])
        assert torch.equal(layer.down.weight, original[1][:, order])


def test_misfits_are_named(resident: Any, model_config: Configs) -> None:
    good = divided()
    for wrong in (
        FactorLlmEdit(good.order[:2], good.router_weight[:2], good.router_bias[:2], 2),
        FactorLlmEdit(good.order, good.router_weight[..., :16], good.router_bias, 2),
        FactorLlmEdit(np.tile(np.arange(24), (LAYERS, 1)), good.router_weight, good.router_bias, 2),
    ):
        with pytest.raises(UserError, match="the model has 3 of 48 on 32"):
            resident("llama").apply(wrong)
    with pytest.raises(UserError, match="dense feed-forward networks"):
        ResidentModel.load(model_config("mixtral")).apply(good)


def test_senseless_edits_are_refused() -> None:
    good = divided()
    twice = good.order.copy()
    twice[0, 0] = twice[0, 1]
    for order, bias, active, message in (
        (good.order, good.router_bias[:, :, :5], 2, "needs order"),
        (good.order[:2], good.router_bias, 2, "needs order"),
        (good.order, good.router_bias, 0, "use 1 to 6"),
        (good.order, good.router_bias, 7, "use 1 to 6"),
        (good.order[:, :47], good.router_bias, 2, "can't divide 47 neurons"),
        (twice, good.router_bias, 2, "each of 48 neurons once"),
    ):
        with pytest.raises(UserError, match=message):
            FactorLlmEdit(order, good.router_weight, bias, active)


def test_the_hash_tells_edits_apart() -> None:
    edits = [divided(), divided(seed=1), divided(active=3), divided(routers=3)]
    assert len({edit.phenotype_hash for edit in edits}) == len(edits)
    assert divided().phenotype_hash == edits[0].phenotype_hash
