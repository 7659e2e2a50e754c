"""Exports of edited dense models: a stock Mixtral or narrower model, or native; all load without moevolve."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_edits import HEAD_DIM, HIDDEN, LAYERS, WIDTH, divided, head_masks, masked
from edit_checks import Computed, Found, Residents, assert_same_elsewhere, computed, logits
from families import DENSE, representatives
from repair_samples import rows_of, sequences_of
from safetensors.torch import load_file
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.card import ExportCard
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.families.layers import find_linears
from moevolve.workers.methods.factorllm.edit import FactorLlmEdit
from moevolve.workers.methods.factorllm.method import FactorLlmExporter
from moevolve.workers.methods.nanomoe.edit import BlockForm, NanoMoeEdit
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.methods.tomoe.calibrate import calibrate_tomoe
from moevolve.workers.methods.tomoe.edit import HeadMasks, ToMoeEdit, ToMoeMeasurement
from moevolve.workers.methods.tomoe.method import ToMoeExporter
from moevolve.workers.model.describe import describe_model
from moevolve.workers.model.resident import ResidentModel

Configs = Callable[..., ModelConfig]

CARD = ExportCard("A small model", "someone/base", "f00d")
ROWS = sequences_of((40, 17, 50, 3, 44, 31, 28, 39, 60, 52, 1, 47))


def still_heads(*layers: int) -> HeadMasks:
    """In some layers the scores of values don't depend on the token."""
    heads = head_masks(active=(5, 3, 1))
    heads.value_router[list(layers)] = 0
    return heads


def mixed(model: ResidentModel, variant: Any, pattern: str) -> NanoMoeEdit:
    names = tuple(name for name in find_linears(model.model) if fnmatchcase(name, pattern))
    form = BlockForm(variant, 1 if variant == "low_rank" else 4, 3)
    steps = np.random.default_rng(0).normal(0, 0.3, (len(names), *form.mixing_shape))
    return NanoMoeEdit(form, names, (form.unmixed + steps).astype(np.float32))


TOP1 = divided(1, bias=0)
EVEN = masked((24, 24, 24))
CASES: dict[str, Any] = {
    "llama-top1-stock": TOP1,
    "llama-routers-native": divided(4, routers=3),
    "opt-routers-native": divided(4, routers=2),
    "llama-whole-stock": masked((24, 24, 24), head_masks((4, 4, 4), (8, 8, 8))),
    "llama-some-native": masked((48, 7, 48), head_masks((4, 2, 4), (8, 8, 2))),
    "qwen2-still-native": masked(heads=still_heads(1)),
    "opt-some-native": masked((48, 1, 20)),
    "opt-one-native": masked((20, 7, 33), experts=1),
    "llama-narrow-stock": masked((24, 24, 24), experts=1),
    "opt-narrow-stock": masked((8, 8, 8), experts=1),
    "phi-narrow-stock": masked((13, 13, 13), experts=1),
    "opt-III-native": ("III", "*.fc?"),
    "phi-lowrank-native": ("low_rank", "*"),
    "mixtral-I-native": ("I", "*.self_attn.*"),
}
"""Edits by family and form; of block-mixed layers, the variant and the layers' names."""


def masked_parameters(before: int, edit: ToMoeEdit, family: str, form: str) -> int:
    """Each kept neuron and dimension counts once, or all of a Mixtral's experts."""
    neuron = 3 * HIDDEN if family in ("llama", "qwen2") else 2 * HIDDEN + 1
    if form == "stock" and edit.experts == 1:
        return int(before - (WIDTH - edit.widths).sum() * neuron)
    for width, kept in zip(edit.widths, edit.kept, strict=True):
        stored = edit.experts * width if form == "stock" else kept.any(axis=0).sum()
        before += (stored - WIDTH) * neuron
        before += edit.experts * HIDDEN * (form == "stock" or width < WIDTH)
    if edit.heads is not None and form == "native":
        before -= (~edit.heads.pairs).sum() * 2 * (4 + 2) * (HIDDEN + (family == "qwen2"))
        before += ((edit.heads.active < HEAD_DIM) & ~edit.heads.static).sum() * (2 * HIDDEN + HEAD_DIM * 3)
        dropped = ((HEAD_DIM - edit.heads.active) * edit.heads.static).sum()
        before -= dropped * (2 * (HIDDEN + (family == "qwen2")) + 4 * HIDDEN)
    return int(before)


def parameters(facts: ModelFacts, edit: Any, family: str, form: str) -> int:
    """Parameters that the described model must have with an edit."""
    if isinstance(edit, FactorLlmEdit):
        biases = edit.router_bias[0].size if form == "native" else 0
        return facts.parameters + LAYERS * (edit.router_weight[0].size + biases)
    if isinstance(edit, ToMoeEdit):
        return masked_parameters(facts.parameters, edit, family, form)
    sizes = {each.name: (each.outputs, each.inputs) for each in facts.linears}
    saved = sum(sizes[each][0] * sizes[each][1] - edit.form.parameters(*sizes[each]) for each in edit.layers)
    return facts.parameters - saved


def test_exports_load_and_agree_without_moevolve(
    resident: Residents,
    model_config: Configs,
    tokens: Tensor,
    outsider: Callable[[list[Path], Tensor], Found],
    tmp_path: Path,
) -> None:
    expected: dict[Path, Computed] = {}
    for name, given in CASES.items():
        family, _, form = name.split("-")
        model, facts = resident(family), describe_model(model_config(family))
        edit = mixed(model, *given) if isinstance(given, tuple) else given
        expected[tmp_path / name] = computed(model, edit, tokens)
        report = export_model(model, edit, tmp_path / name, CARD)
        assert report.form == form and report.agreement.holds and report.agreement.positions > 50, name
        assert report.parameters == parameters(facts, edit, family, form), name
        if isinstance(edit, NanoMoeEdit):
            card = (tmp_path / name / "README.md").read_text()
            assert f"{report.parameters:,} ({facts.parameters:,} before)" in card
            assert f"| variant | {edit.form.variant} |" in card
        else:
            assert (report.experts, report.active) == (edit.experts, getattr(edit, "active", 1))
    assert_same_elsewhere(expected, outsider(list(expected), tokens))


def half_kept(model: ResidentModel, experts: int) -> RepairedEdit:
    """The start of ToMoE with half of the neurons in every expert, repaired."""
    measured = calibrate_tomoe(model, ROWS, ToMoeMeasurement(False, experts, 0.5, 4, sample=25, tokens=1000)).arrays
    kept = np.zeros((LAYERS, experts, WIDTH), dtype=bool)
    np.put_along_axis(kept, np.argsort(-measured["expert_saliency"], axis=-1)[..., : WIDTH // 2], True, axis=-1)
    base = ToMoeEdit(kept, measured["expert_rows"], measured["network_directions"])
    return RepairedEdit(base, RepairSettings((0.1, 1.0)), rows_of(ROWS))


@pytest.mark.parametrize("family", representatives(("cohere2", "gemma2", "phi3", "starcoder2"), DENSE))
def test_half_of_the_neurons_of_every_family(
    family: str,
    resident: Residents,
    checkpoint: Callable[[str], Path],
    tokens: Tensor,
    outsider: Callable[[list[Path], Tensor], Found],
    tmp_path: Path,
) -> None:
    """A mixture with half of the neurons active, and a narrower model; with -s the largest differences are printed."""
    from transformers import AutoModelForCausalLM

    model, expected = resident(family), dict[Path, Computed]()
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(checkpoint(family)).eval()(tokens).logits
    differences = [float((logits(model, None, tokens) - whole).abs().max())]
    assert differences[0] == 0
    for experts, name in ((8, "active-native"), (1, "neurons-stock")):
        edit, directory = half_kept(model, experts), tmp_path / name
        expected[directory] = computed(model, edit, tokens)
        report = export_model(model, edit, directory, CARD, "native" if experts > 1 else None)
        assert report.form == name.split("-")[1] and report.agreement.holds
    found = outsider(list(expected), tokens)
    assert_same_elsewhere(expected, found)
    pairs = zip(expected.values(), found, strict=True)
    differences += [float((torch.tensor(other) - scores).abs().max()) for (scores, _), (other, *_) in pairs]
    facts = describe_model(ModelConfig(str(tmp_path / "neurons-stock"), device="cpu"))
    assert facts.dense is not None and facts.dense.width == WIDTH // 2
    print(f"{family}: logits, active and neurons differ by {', '.join(f'{each:.1e}' for each in differences)}")


@pytest.mark.parametrize(
    ("edit", "sizes", "said"),
    [
        (TOP1, (6, 1, 8), ("divided into 6 equal experts, 1 active per token", "| division | 1R6E1K |")),
        (EVEN, (4, 1, 24), ("of one of 4 overlapping experts per token", "| neurons per expert | 24 to 24 of 48 |")),
    ],
)
def test_stock_forms_are_mixtrals(
    edit: Any, sizes: tuple[int, ...], said: tuple[str, ...], resident: Residents, tmp_path: Path
) -> None:
    report = export_model(resident("llama"), edit, tmp_path / "out", CARD)
    assert report.form == "stock" and report.agreement.holds
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("mixtral", ["MixtralForCausalLM"])
    assert (config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"]) == sizes
    assert describe_model(ModelConfig(str(tmp_path / "out"))).experts == edit.experts
    card = (tmp_path / "out" / "README.md").read_text()
    assert all(text in card for text in (*said, "A stock Mixtral checkpoint"))


def test_the_native_form_can_be_asked_for(resident: Residents, model_config: Configs, tmp_path: Path) -> None:
    """It stores shared neurons once, while a Mixtral's experts repeat them."""
    native = export_model(resident("llama"), masked(), tmp_path / "native", CARD, "native")
    assert native.form == "native" and native.agreement.holds
    assert native.parameters == parameters(describe_model(model_config("llama")), masked(), "llama", "native")
    with pytest.raises(UserError, match="--form stock: dimensions of its heads are masked"):
        export_model(resident("llama"), masked(heads=head_masks()), tmp_path / "other", CARD, "stock")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("edit", [TOP1, masked(heads=head_masks())], ids=["divided", "masked"])
def test_sixteen_bits_keep_their_routers_whole(edit: Any, resident: Residents, tmp_path: Path) -> None:
    """A Mixtral's scores would be rounded, so the form is native."""
    report = export_model(resident("llama", dtype="bfloat16"), edit, tmp_path / "out", CARD)
    assert report.form == "native" and report.agreement.holds
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        whole, wide = name.endswith(("neurons", "dimensions")), "router" in name or "value_" in name
        assert tensor.dtype == (torch.int64 if whole else torch.float32 if wide else torch.bfloat16), name


def test_forms(resident: Residents, model_config: Configs, tmp_path: Path) -> None:
    divides, masks, half = FactorLlmExporter(), ToMoeExporter(), resident("llama", dtype="bfloat16")
    model = ResidentModel.load(model_config("llama"))
    tiny = TOP1.router_bias.copy()
    tiny[2, 0, 5] = 1e-30
    router, kept = EVEN.router.copy(), EVEN.kept.copy()
    router[1, 2], kept[1, 2] = router[1, 3], kept[1, 3]
    tied = replace(EVEN, router=router)
    assert divides.obstacle(model, TOP1) is masks.obstacle(model, EVEN) is None
    for odd in (masked(), masked((13, 13, 13))):
        assert "its experts have" in str(masks.obstacle(model, odd))
    assert masks.obstacle(model, replace(tied, kept=kept)) is None and "experts tie" in str(masks.obstacle(model, tied))
    for other in (replace(TOP1, router_bias=tiny), replace(TOP1, active=2)):
        assert "no Mixtral's" in str(divides.obstacle(model, other))
    assert "routes in the model's dtype, bfloat16" in str(masks.obstacle(half, EVEN))
    with pytest.raises(UserError, match=r"routes in the model's dtype, bfloat16.*--dtype float32"):
        export_model(half, TOP1, tmp_path / "stock", CARD, "stock")
    with pytest.raises(UserError, match="checkpoint already"):
        export_model(model, IdentityEdit(), tmp_path / "out", CARD)
    assert list(tmp_path.iterdir()) == []
    model.model.config.attention_bias = True
    assert "biases" in str(divides.obstacle(model, TOP1))
