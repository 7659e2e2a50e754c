"""New model families work like the others once they are registered with one line each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from edit_checks import assert_close, logits
from family_samples import edit_of_kind
from torch import Tensor, nn
from toy_moe import SCALE, ToyConfig, ToyForCausalLM
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.contract.card import ExportCard
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.families.base import DenseFamily, ExpertFamily
from moevolve.workers.families.registry import FAMILIES
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.tomoe.edit import HeadMasks, ToMoeEdit
from moevolve.workers.model.describe import describe_model
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

HIDDEN, WIDTH, LAYERS, EXPERTS, HEADS, VOCABULARY = 32, 24, 3, 6, 4, 97
CARD = ExportCard("A toy", "someone/base", "f00d", "trial", "42", "trial#17", (), ())
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class ToyDenseConfig(LlamaConfig):
    model_type = "toy_dense"


class ToyDenseForCausalLM(LlamaForCausalLM):
    config_class = ToyDenseConfig


AutoConfig.register("toy_moe", ToyConfig)
AutoConfig.register("toy_dense", ToyDenseConfig)
AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM)
AutoModelForCausalLM.register(ToyDenseConfig, ToyDenseForCausalLM)


def resize_extras(config: Any, rule: RoutingRule, active: int) -> None:
    config.chosen = f"{active} of {config.num_local_experts}"


TOY_MOE = ExpertFamily(
    "toy_moe",
    "Toy-MoE",
    casts_weights=False,
    rule=lambda router, config: RoutingRule(renormalise=False, scale=SCALE),
    router="chooser",
    sdpa=False,
    resize_extras=resize_extras,
    width_field="intermediate_size",
)
TOY_DENSE = DenseFamily("toy_dense", "Toy", up="up_proj", gate="gate_proj", down="down_proj", activation="act_fn")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "toy_moe", TOY_MOE)
    monkeypatch.setitem(FAMILIES, "toy_dense", TOY_DENSE)


Configs = Callable[[str], ModelConfig]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> Configs:
    """A random checkpoint of each of the two families."""
    folder = tmp_path_factory.mktemp("toys")
    configs = {
        "toy_moe": ToyConfig(num_local_experts=EXPERTS, num_experts_per_tok=2, **COMMON),
        "toy_dense": ToyDenseConfig(**COMMON),
    }
    for name, config in configs.items():
        with torch.random.fork_rng():
            torch.manual_seed(5)
            model = AutoModelForCausalLM.from_config(config)
            for key, parameter in model.named_parameters():
                if key.endswith("chooser.weight"):
                    nn.init.normal_(parameter, std=0.4)
        model.save_pretrained(folder / name)
        tiny_tokenizer.save_pretrained(folder / name)
    return lambda name: ModelConfig(str(folder / name), device="cpu")


class PlainBlock(nn.Module):
    """An edited toy block, one token at a time in float64."""

    def __init__(self, block: Any, edit: EepEdit, layer: int) -> None:
        super().__init__()
        self.router = block.chooser.weight.double()
        self.mapping = torch.tensor(edit.router_mapping[layer], dtype=torch.float64)
        coefficients = torch.tensor(edit.expert_merging[layer], dtype=torch.float64)
        self.gate_up = torch.einsum("ij,jab->iab", coefficients, block.experts.gate_up_proj.double())
        self.down = torch.einsum("ij,jab->iab", coefficients, block.experts.down_proj.double())
        self.active = edit.active

    def token(self, hidden: Tensor) -> Tensor:
        scores = self.mapping @ torch.softmax(self.router @ hidden, dim=0)
        total = torch.zeros_like(hidden)
        for expert in torch.argsort(scores, descending=True)[: self.active]:
            gate, up = (self.gate_up[expert] @ hidden).chunk(2)
            total += SCALE * scores[expert] * (self.down[expert] @ (nn.functional.silu(gate) * up))
        return total

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = [self.token(row) for row in hidden_states.reshape(-1, hidden_states.shape[-1]).double()]
        return torch.stack(rows).to(hidden_states.dtype).reshape(hidden_states.shape)


@torch.no_grad()
def plain_logits(config: ModelConfig, edit: EepEdit, ids: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(config.path).eval()
    for i, layer in enumerate(model.model.layers):
        layer.mlp = PlainBlock(layer.mlp, edit, i)
    return model(ids).logits


def edit_of(kind: str) -> EepEdit:
    return edit_of_kind(LAYERS, EXPERTS, kind)


def test_without_its_line_it_is_refused(toy: Configs) -> None:
    for name in ("toy_moe", "toy_dense"):
        with pytest.raises(
            UserError, match=f"model type '{name}' is not supported: .*describes.* mixtral .Mixtral., .*, phi"
        ):
            describe_model(toy(name))


@pytest.mark.usefixtures("registered")
def test_it_is_described(toy: Configs) -> None:
    facts = describe_model(toy("toy_moe"))
    expert = 3 * HIDDEN * WIDTH
    assert (facts.family, facts.experts, facts.active, facts.moe_layers) == ("toy_moe", EXPERTS, 2, (0, 1, 2))
    assert (facts.expert_parameters, facts.router_parameters_per_expert) == (expert, HIDDEN)
    assert facts.rule == RoutingRule(renormalise=False, scale=SCALE)
    assert facts.notes == ("the family does not rescale the top-k routing weights to sum 1",)
    dense = describe_model(toy("toy_dense"))
    assert (dense.family, dense.experts, dense.moe_layers) == ("toy_dense", 0, ())
    assert dense.dense is not None and (dense.dense.width, dense.dense.gated) == (WIDTH, True)


@pytest.mark.usefixtures("registered")
def test_it_is_loaded_as_it_says(toy: Configs) -> None:
    moe, dense = ResidentModel.load(toy("toy_moe")), ResidentModel.load(toy("toy_dense"))
    assert type(moe.model) is ToyForCausalLM and type(dense.model) is ToyDenseForCausalLM
    assert moe.model.config._attn_implementation == "eager"
    assert dense.model.config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("kind", ["prune", "merged", "both"])
def test_experts_are_edited(kind: str, toy: Configs, tokens: Tensor) -> None:
    model = ResidentModel.load(toy("toy_moe"))
    before = logits(model, IdentityEdit(), tokens)
    stock = AutoModelForCausalLM.from_pretrained(toy("toy_moe").path, attn_implementation="eager").eval()
    with torch.no_grad():
        assert torch.equal(before, stock(tokens).logits)
    found = logits(model, edit_of(kind), tokens)
    assert_close(found, plain_logits(toy("toy_moe"), edit_of(kind), tokens))
    assert float((found - before).abs().max()) > 1e-3
    assert torch.equal(logits(model, IdentityEdit(), tokens), before)


def masked(heads: HeadMasks | None = None) -> ToMoeEdit:
    """An edit with one expert, which is the first half of the neurons."""
    kept = np.zeros((LAYERS, 1, WIDTH), dtype=np.bool_)
    kept[:, :, : WIDTH // 2] = True
    return ToMoeEdit(kept, np.zeros((LAYERS, 1, 2)), np.zeros((LAYERS, 2, HIDDEN)), heads)


@pytest.mark.usefixtures("registered")
def test_dense_networks_are_edited(toy: Configs, tokens: Tensor) -> None:
    model = ResidentModel.load(toy("toy_dense"))
    before = logits(model, IdentityEdit(), tokens)
    plain = AutoModelForCausalLM.from_pretrained(toy("toy_dense").path).eval()
    for layer in plain.model.layers:
        layer.mlp.down_proj.weight.data[:, WIDTH // 2 :] = 0
    with torch.no_grad():
        assert_close(logits(model, masked(), tokens), plain(tokens).logits)
    assert torch.equal(logits(model, IdentityEdit(), tokens), before)


@pytest.mark.usefixtures("registered")
def test_it_is_exported(toy: Configs, tokens: Tensor, tmp_path: Path) -> None:
    edit = edit_of_kind(LAYERS, EXPERTS, "both", active=1, space="logits")
    report = export_model(toy("toy_moe"), edit, tmp_path / "out", CARD)
    assert report.form == "stock" and report.agreement.holds
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (settings["num_local_experts"], settings["num_experts_per_tok"], settings["chosen"]) == (4, 1, "1 of 4")
    with torch.no_grad():
        alone = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(tokens).logits
    assert_close(alone, logits(ResidentModel.load(toy("toy_moe")), edit, tokens))
