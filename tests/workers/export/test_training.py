"""Exports go on learning: with transformers' trainer, with the loss that balances routers, and with peft's LoRA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from edit_checks import CARD, Residents
from families import family_edit
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from moevolve.workers.contract.edits import Edit
from moevolve.workers.export.export import export_model

EDITS: dict[str, Edit] = {
    "stock": family_edit("qwen2_moe", "prune", space="logits"),
    "native": family_edit("qwen2_moe", "mixed"),
}
"""Layer 0 is pruned in both. The latter keeps the whole router, whose scores the last layer maps and mixes."""

FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(scope="module")
def exported(resident: Residents, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("exports")

    def make(form: str) -> Path:
        if not (folder / form).exists():
            assert export_model(resident("qwen2_moe"), EDITS[form], folder / form, CARD).form == form
        return folder / form

    return make


def loaded(folder: Path, **settings: Any) -> Any:
    remote = folder.name == "native"
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=remote, **settings)


def trained(model: Any, ids: Tensor, folder: Path) -> list[float]:
    """Losses of six steps on the same rows."""
    rows = [{"input_ids": row, "labels": row} for row in ids]
    settings: dict[str, Any] = {"max_steps": 6, "per_device_train_batch_size": len(rows), "learning_rate": 1e-2}
    quiet: dict[str, Any] = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    arguments = TrainingArguments(folder, use_cpu=True, logging_steps=1, **settings, **quiet)
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


@pytest.mark.parametrize("form", EDITS)
def test_a_trainer_lowers_the_loss_and_the_result_is_saved(
    form: str, exported: Callable[[str], Path], tokens: Tensor, tmp_path: Path
) -> None:
    model = loaded(exported(form), output_router_logits=True)
    before = {name: each.detach().clone() for name, each in model.state_dict().items()}
    losses = trained(model, tokens, tmp_path / "run")
    assert len(losses) == 6 and losses[-1] < 0.9 * losses[0]
    moved = {name for name, each in model.state_dict().items() if not torch.equal(each, before[name])}
    assert {
        f"model.layers.{layer}.mlp.{part}"
        for layer in (0, 2)
        for part in ("gate.weight", *(each[4:] for each in FUSED))
    } <= moved
    assert not any("router_mapping" in name for name in moved)
    model.save_pretrained(tmp_path / form)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(tmp_path / form)(tokens).logits, model(tokens).logits, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("form", EDITS)
def test_the_balancing_loss_is_of_the_kept_experts(
    form: str, exported: Callable[[str], Path], resident: Residents, tokens: Tensor
) -> None:
    """By its formula (arXiv 2101.03961, Eq. 4), from the source's router rows and the layer's inputs."""
    model, edit = loaded(exported(form)), EDITS[form]
    inputs: list[Tensor] = []
    block = model.model.layers[0].mlp
    block.register_forward_pre_hook(lambda _, given: inputs.append(given[0].flatten(0, 1)))
    out = model(tokens, labels=tokens, output_router_logits=True)
    plain = model(tokens, labels=tokens)
    torch.testing.assert_close(out.loss - plain.loss, model.config.router_aux_loss_coef * out.aux_loss)

    rows = load_file(Path(resident("qwen2_moe").config.path) / "model.safetensors")["model.layers.0.mlp.gate.weight"]
    kept = edit.router_mapping[0].argmax(axis=1).tolist()  # type: ignore[attr-defined]
    first = (inputs[0] @ rows.T)[:, kept].softmax(-1)
    shares = [each.softmax(-1) for each in out.router_logits]
    torch.testing.assert_close(shares[0], first)
    both = torch.cat([first, shares[1]])
    chosen = torch.zeros_like(both).scatter(1, both.topk(2).indices, 1.0)
    torch.testing.assert_close(out.aux_loss, 4 * (chosen.mean(0) * both.mean(0)).sum())

    out.aux_loss.backward()
    gradients = [layer.mlp.gate.weight.grad for layer in (model.model.layers[0], model.model.layers[2])]
    assert all(each.isfinite().all() and each.any() for each in gradients)


@pytest.mark.parametrize("form", EDITS)
def test_lora_reaches_experts_by_their_parameters(
    form: str, exported: Callable[[str], Path], tokens: Tensor, tmp_path: Path
) -> None:
    def adapted(**targets: Any) -> tuple[Any, set[str]]:
        model = get_peft_model(loaded(exported(form)), LoraConfig(r=2, task_type="CAUSAL_LM", **targets))
        names = {
            name.partition(".layers.0.")[2].partition(".lora_")[0]
            for name, each in model.named_parameters()
            if each.requires_grad
        }
        return model, names - {""}

    attention = {f"self_attn.{name}_proj" for name in "qkvo"}
    shared = {f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")} | {"mlp.shared_expert_gate"}
    assert adapted(target_modules=["q_proj", "v_proj"])[1] == {"self_attn.q_proj", "self_attn.v_proj"}
    assert adapted(target_modules="all-linear")[1] == attention | shared, "fused experts aren't linear layers"
    model, names = adapted(target_modules="all-linear", target_parameters=FUSED)
    assert names == attention | shared | {"mlp.experts", "mlp.experts.base_layer"}
    losses = trained(model, tokens, tmp_path / "run")
    assert losses[-1] < losses[0]
