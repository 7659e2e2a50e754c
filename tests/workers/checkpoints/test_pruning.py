"""Tensors that a pruned checkpoint keeps, for the layouts of published formats."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.headers import StoredTensor
from moevolve.workers.checkpoints.pruning import Pruning
from moevolve.workers.contract.card import MtpLayers
from moevolve.workers.contract.methods import ExpertSelection
from moevolve.workers.families.registry import FAMILIES

EXPERTS = 4
ROUTERS, KEPT = ((3, 1), (0, 2)), ((3, 0), (2, 1))
"""Router rows and experts that are kept of MoE layers 1 and 2 of a model with three decoder layers."""

MATRICES = ("gate_proj", "up_proj", "down_proj")
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "plain": ("weight",),
    "fp8": ("weight", "weight_scale_inv"),
    "nvfp4": ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "int4": ("weight_packed", "weight_scale", "weight_shape", "weight_g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
}
"""Tensors of a quantised linear layer, by format."""


def stored(name: str, *shape: int) -> StoredTensor:
    return StoredTensor(name, Path("file"), "U8", shape, 0, math.prod(shape))


def tensors_of(parts: tuple[str, ...], block: str, stem: str = "model.layers.") -> dict[str, StoredTensor]:
    """A model whose layers 1 and 2 have experts, and layer 3 is for multi-token prediction."""
    found = [stored("model.embed_tokens.weight", 9, 5), stored(f"{stem}0.mlp.gate_proj.weight", 8, 5)]
    for layer in (1, 2, 3):
        found += [
            stored(f"{stem}{layer}.self_attn.q_proj.weight", EXPERTS, 5),
            stored(f"{stem}{layer}.{block}.gate.weight", EXPERTS, 5),
            stored(f"{stem}{layer}.{block}.gate.e_score_correction_bias", EXPERTS),
            stored(f"{stem}{layer}.{block}.shared_experts.up_proj.weight", EXPERTS, 5),
        ]
        for expert in range(EXPERTS):
            prefix = f"{stem}{layer}.{block}.experts.{expert}."
            found += [stored(f"{prefix}{matrix}.{part}", 6, 5) for matrix in MATRICES for part in parts]
    return {tensor.name: tensor for tensor in found}


def pruning(
    tensors: Mapping[str, StoredTensor], mtp: MtpLayers = "drop", selection: ExpertSelection | None = None
) -> Pruning:
    family = FAMILIES["deepseek_v3"]
    wanted = selection or ExpertSelection(ROUTERS, KEPT, 1)
    return Pruning(tensors, family, (1, 2), EXPERTS, 3, wanted, mtp)  # type: ignore[arg-type]


def origins(made: Pruning) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    return {kept.name: (kept.source.name, kept.rows) for kept in made.kept()}


@pytest.mark.parametrize("stem", ["model.layers.", "model.language_model.layers.", "thinker.model.layers."])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_experts_tensors_follow_it(layout: str, stem: str) -> None:
    tensors = tensors_of(parts := LAYOUTS[layout], "mlp", stem)
    expected: dict[str, tuple[str, tuple[int, ...] | None]] = {}
    for name in list(tensors):
        if ".experts." not in name and not name.startswith(f"{stem}3."):
            expected[name] = (name, None)
    for layer, routers, experts in zip((1, 2), ROUTERS, KEPT, strict=True):
        for row in ("weight", "e_score_correction_bias"):
            expected[f"{stem}{layer}.mlp.gate.{row}"] = (f"{stem}{layer}.mlp.gate.{row}", routers)
        for slot, expert in enumerate(experts):
            for end in (f"{matrix}.{part}" for matrix in MATRICES for part in parts):
                name = f"{stem}{layer}.mlp.experts.{slot}.{end}"
                expected[name] = (f"{stem}{layer}.mlp.experts.{expert}.{end}", None)
    if stem.startswith("thinker."):  # Qwen3-Omni's model that talks has experts of its own, which stay
        name = "talker.model.layers.1.mlp.experts.3.up_proj.weight"
        tensors[name], expected[name] = stored(name, 6, 5), (name, None)
    assert origins(pruning(tensors)) == expected


def test_fused_experts_are_rows() -> None:
    """GPT-OSS: experts come first in every tensor, and the router has a bias."""
    found = [stored("model.layers.0.input_layernorm.weight", EXPERTS)]
    ends = ("gate_up_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias", "down_proj_blocks", "down_proj_bias")
    for layer in (0, 1):
        found += [stored(f"model.layers.{layer}.mlp.experts.{end}", EXPERTS, 3, 2) for end in ends]
        found += [stored(f"model.layers.{layer}.mlp.router.weight", EXPERTS, 2)]
        found += [stored(f"model.layers.{layer}.mlp.router.bias", EXPERTS)]
    tensors = {tensor.name: tensor for tensor in found}
    family = FAMILIES["gpt_oss"]
    made = Pruning(tensors, family, (0, 1), EXPERTS, 2, ExpertSelection(ROUTERS, KEPT, 1))  # type: ignore[arg-type]
    for kept in made.kept():
        assert kept.name == kept.source.name
        if ".experts." in kept.name or ".router." in kept.name:
            rows = KEPT if ".experts." in kept.name else ROUTERS
            assert kept.rows == rows[int(kept.name.split(".")[2])]
            assert kept.shape == (2, *kept.source.shape[1:]) and kept.nbytes * 2 == kept.source.nbytes
        else:
            assert kept.rows is None and kept.nbytes == kept.source.nbytes


@pytest.mark.parametrize("stem", ["mtp.layers.0.", "mtp_dspark.layers.0."])
def test_layers_for_multi_token_prediction(stem: str) -> None:
    tensors = tensors_of(("weight",), "mlp")
    later = {name for name in tensors if name.startswith("model.layers.3.")}
    kept = {mtp: origins(pruning(tensors, mtp)) for mtp in ("drop", "prune", "keep")}  # type: ignore[arg-type]
    assert not later & kept["drop"].keys()
    assert kept["keep"] == kept["drop"] | {name: (name, None) for name in later}
    pruned = {name: source for name, source in kept["prune"].items() if name in later}
    assert pruned["model.layers.3.mlp.gate.weight"][1] == ROUTERS[1]
    assert pruned["model.layers.3.mlp.experts.0.up_proj.weight"][0] == "model.layers.3.mlp.experts.2.up_proj.weight"
    assert not any(".experts.2." in name for name in pruned)
    assert len(pruned) == 4 + 2 * len(MATRICES)
    other = {name.replace("model.layers.3.", stem): tensors[name] for name in later}
    renamed = {name: stored(name, *tensor.shape) for name, tensor in other.items()}
    moved = {name: tensor for name, tensor in tensors.items() if name not in later} | renamed
    assert origins(pruning(moved)) == kept["drop"]
    assert pruning(moved).has_mtp and origins(pruning(moved, "keep")).keys() == kept["drop"].keys() | renamed.keys()


def test_names_in_settings_follow_the_experts() -> None:
    settings = {
        "ignore": ["lm_head", "model.layers.1.mlp.gate", "model.layers.1.mlp.experts.3.up_proj", "re:.*self_attn.*"],
        "dropped": ["model.layers.1.mlp.experts.1.up_proj", "model.layers.3.eh_proj"],
        "extra": {"model.layers.2.mlp.experts.1": {"bits": 8}, "model.layers.2.mlp.experts.3": {"bits": 4}},
        "bits": 4,
    }
    assert pruning(tensors_of(("weight",), "mlp")).renamed(settings) == {
        "ignore": ["lm_head", "model.layers.1.mlp.gate", "model.layers.1.mlp.experts.0.up_proj", "re:.*self_attn.*"],
        "dropped": [],
        "extra": {"model.layers.2.mlp.experts.1": {"bits": 8}},
        "bits": 4,
    }


@pytest.mark.parametrize(
    "pattern", [r"+:.*experts\.[02]\.", "re:.*experts.3.up_proj", r"-:model\.layers\.1\.mlp\.experts\.(1|2)"]
)
def test_patterns_that_number_experts_are_refused(pattern: str) -> None:
    found = pruning(tensors_of(("weight",), "mlp"))
    with pytest.raises(UserError, match="names experts by the pattern"):
        found.renamed({"dynamic": {pattern: {"bits": 8}}})
    of_all = [r"re:.*experts\.\d+\.up_proj", r"+:.*experts\.[0-9]+\.down_proj", "re:.*mlp.experts.*"]
    assert found.renamed(of_all) == of_all


def test_experts_that_calibration_never_saw_may_lack_scales_of_activations() -> None:
    tensors = tensors_of(("weight", "input_scale"), "mlp")
    unseen = "model.layers.1.mlp.experts.0.up_proj.input_scale"
    lacking = {name: tensor for name, tensor in tensors.items() if name != unseen}
    assert origins(pruning(lacking)) == {
        name: found for name, found in origins(pruning(tensors)).items() if found[0] != unseen
    }


LAYER = "model.layers."


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("2.mlp.gate.weight", (3, 5), r"gate.weight has shape \[3, 5\], where 4 experts should come first"),
        ("2.mlp.gate.qweight", (3, 5), "gate.qweight belongs to a quantised router"),
        ("0.encoder.layers.1.mlp.experts.4.up_proj.weight", (6, 5), "are under model.layers. and model.layers.0.enc"),
    ],
)
def test_what_does_not_fit_is_named(name: str, shape: tuple[int, ...], message: str) -> None:
    tensors = tensors_of(LAYOUTS["fp8"], "mlp")
    tensors[LAYER + name] = stored(LAYER + name, *shape)
    with pytest.raises(UserError, match=message):
        pruning(tensors).kept()
