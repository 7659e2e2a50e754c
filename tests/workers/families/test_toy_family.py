"""New model families work like the others once they are registered with one line each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from edit_checks import CARD, assert_close, logits
from families import COMMON, edit_of_kind
from plain_families import plain_family_logits
from torch import Tensor, nn
from toy_moe import SCALE, ToyConfig, ToyForCausalLM
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.families.base import DenseFamily, ExpertFamily
from moevolve.workers.families.registry import FAMILIES
from moevolve.workers.methods.tomoe.edit import ToMoeEdit
from moevolve.workers.model.describe import describe_model
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

HIDDEN, WIDTH, LAYERS, EXPERTS = 32, 24, 3, 6


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
    folder, settings = tmp_path_factory.mktemp("toys"), COMMON | {"intermediate_size": WIDTH}
    configs = {
        "toy_moe": ToyConfig(num_local_experts=EXPERTS, **settings),
        "toy_dense": ToyDenseConfig(**settings),
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


def test_without_its_line_it_is_refused(toy: Configs) -> None:
    for name in ("toy_moe", "toy_dense"):
        with pytest.raises(
            UserError, match=f"model type '{name}' is not supported: .*describes.* mixtral .Mixtral., .*, phi"
        ):
            describe_model(toy(name))


@pytest.mark.usefixtures("registered")
def test_experts_are_described_edited_and_exported(toy: Configs, tokens: Tensor, tmp_path: Path) -> None:
    facts = describe_model(toy("toy_moe"))
    assert (facts.family, facts.experts, facts.active, facts.moe_layers) == ("toy_moe", EXPERTS, 2, (0, 1, 2))
    assert (facts.expert_parameters, facts.router_parameters_per_expert) == (3 * HIDDEN * WIDTH, HIDDEN)
    assert facts.notes == ("the family does not rescale the top-k routing weights to sum 1",)
    model = ResidentModel.load(toy("toy_moe"))
    assert type(model.model) is ToyForCausalLM and model.model.config._attn_implementation == "eager"
    before, edit = logits(model, IdentityEdit(), tokens), edit_of_kind(LAYERS, EXPERTS, "both")
    found = logits(model, edit, tokens)
    assert_close(found, plain_family_logits(toy("toy_moe").path, edit, tokens))
    assert float((found - before).abs().max()) > 1e-3
    assert torch.equal(logits(model, IdentityEdit(), tokens), before)
    edit = edit_of_kind(LAYERS, EXPERTS, "both", active=1, space="logits")
    report = export_model(model, edit, tmp_path / "out", CARD)
    assert report.form == "stock" and report.agreement.holds
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (settings["num_local_experts"], settings["num_experts_per_tok"], settings["chosen"]) == (4, 1, "1 of 4")
    with torch.no_grad():
        alone = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(tokens).logits
    assert_close(alone, logits(model, edit, tokens))


@pytest.mark.usefixtures("registered")
def test_dense_networks_are_described_and_edited(toy: Configs, tokens: Tensor) -> None:
    facts = describe_model(toy("toy_dense"))
    assert (facts.family, facts.experts, facts.moe_layers) == ("toy_dense", 0, ())
    assert facts.dense is not None and (facts.dense.width, facts.dense.gated) == (WIDTH, True)
    model = ResidentModel.load(toy("toy_dense"))
    assert type(model.model) is ToyDenseForCausalLM and model.model.config._attn_implementation == "sdpa"
    before = logits(model, IdentityEdit(), tokens)
    # One expert, which is the first half of the neurons.
    kept = np.arange(WIDTH)[None, None].repeat(LAYERS, axis=0) < WIDTH // 2
    edit = ToMoeEdit(kept, np.zeros((LAYERS, 1, 2)), np.zeros((LAYERS, 2, HIDDEN)))
    plain = AutoModelForCausalLM.from_pretrained(toy("toy_dense").path).eval()
    for layer in plain.model.layers:
        layer.mlp.down_proj.weight.data[:, WIDTH // 2 :] = 0
    with torch.no_grad():
        assert_close(logits(model, edit, tokens), plain(tokens).logits)
    assert torch.equal(logits(model, IdentityEdit(), tokens), before)
