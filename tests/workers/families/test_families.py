"""Every family of the table: facts, edits, scores and exports are those of its equations and of `transformers`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from edit_checks import CARD, Residents, assert_close, logits, write_source
from families import VARIANTS, examples, family_edit, representatives, sample_rows, showing
from plain_families import plain_family_logits, stock_family_logits
from tiny_models import words
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.checkpoints.text_models import SAME_ON_TEXT
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.facts import active_parameters, parameters_after
from moevolve.workers.contract.settings import EngineConfig, ModelConfig, Shortcuts
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.engine.products import make_rows_independent
from moevolve.workers.export.export import export_model
from moevolve.workers.export.folder import loader_of
from moevolve.workers.families.registry import FAMILIES, NOT_DESCRIBED, only_inside
from moevolve.workers.methods.eep.accuracy import scores_with_errors
from moevolve.workers.methods.eep.calibrate_experts import calibrate_experts
from moevolve.workers.methods.eep.edit import EepEdit, ExpertsMeasurement
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.model.describe import describe_model
from moevolve.workers.model.resident import ResidentModel
from moevolve.workers.profiling.outline import outline_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Checkpoints = Callable[[str], Path]
Configs = Callable[..., ModelConfig]


@pytest.mark.parametrize("family", representatives((each for each, one in VARIANTS.items() if not one.like), VARIANTS))
def test_facts_and_logits_are_those_of_the_equations(
    family: str, model_config: Configs, resident: Residents, checkpoint: Checkpoints, tokens: Tensor
) -> None:
    row, facts, model = VARIANTS[family], outline_model(model_config(family)).facts, resident(family)
    assert facts.family == family.split("-", maxsplit=1)[0]
    assert facts.moe_layers == tuple(layer.index for layer in model.layers) == row.moe_layers
    assert (facts.experts, facts.active, facts.dtype_bytes) == (row.experts, 2, 4)
    assert facts.expert_parameters == row.expert_parameters
    assert facts.router_parameters_per_expert == row.router_parameters
    # GPT-OSS's output bias is no neuron's.
    assert facts.neuron_parameters == (row.expert_parameters - 32 * (family == "gpt_oss")) // 24
    assert getattr(model.model.config, model.layers[0].family.width_field) == 24
    assert (facts.unrepairable is not None) == row.unrepairable
    rule = model.layers[0].rule
    assert facts.rule == rule and rule.one_hot_folds == row.folds
    stored = sum(each.numel() for each in model.model.parameters())
    assert facts.parameters == parameters_after(facts, row.experts) == stored
    kept = parameters_after(facts, 4)
    assert kept == stored - (row.experts - 4) * row.layers * (row.expert_parameters + row.router_parameters)
    assert active_parameters(facts, 4, 2) == kept - row.layers * 2 * row.expert_parameters

    ids, scored = tokens[:1, :7], "probs" if rule.has_scores else "logits"
    for kind, space in (("crossed", "logits"), ("mixed", scored)):
        edit = family_edit(family, kind, space=space)
        assert_close(logits(model, edit, ids), plain_family_logits(checkpoint(family), edit, ids))
    found, stock = logits(model, IdentityEdit(), ids), stock_family_logits(checkpoint(family), ids)
    if not model.layers[0].family.adapted:
        assert torch.equal(found, stock)
    else:
        assert_close(found, stock)


@pytest.mark.parametrize("family", showing("rule"))
def test_routers_are_mapped_in_probabilities_and_in_logits(
    family: str, resident: Residents, checkpoint: Checkpoints, tokens: Tensor
) -> None:
    """One-hot matrices are the same function in both where they fold into a smaller router."""
    model, ids, found = resident(family), tokens[:1, :7], {}
    for kind in ("crossed", "mixed"):
        for space in ("probs", "logits") if kind == "crossed" or model.layers[0].rule.has_scores else ("logits",):
            edit = family_edit(family, kind, space=space)
            found[kind, space] = logits(model, edit, ids)
            assert_close(found[kind, space], plain_family_logits(checkpoint(family), edit, ids))
    assert torch.equal(found["crossed", "probs"], found["crossed", "logits"]) == VARIANTS[family].folds


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2-grouped", "deepseek_v3-grouped", "gpt_oss"])
def test_numbers_retained_and_active(family: str, resident: Residents, checkpoint: Checkpoints, tokens: Tensor) -> None:
    model, count, ids = resident(family), VARIANTS[family].experts, tokens[:1, :7]
    groups = model.layers[0].rule.groups
    tried = 0
    for retained in range(1, count + 1):
        for active in {1, 2, retained}:
            if groups.fault(retained) or active > groups.reach(retained):
                continue
            edit = family_edit(family, "both", retained, active, space="logits", seed=retained)
            assert_close(logits(model, edit, ids), plain_family_logits(checkpoint(family), edit, ids))
            tried += 1
    assert tried >= 4


def test_host_originals_give_the_same_logits(resident: Residents, tokens: Tensor) -> None:
    host, device = resident("gpt_oss", expert_offload="host"), resident("gpt_oss")
    for kind in ("prune", "both"):
        edit = family_edit("gpt_oss", kind, space="logits")
        assert_close(logits(host, edit, tokens), logits(device, edit, tokens))


@pytest.mark.parametrize("family", ["deepseek_v3-grouped", "gpt_oss"])
def test_sixteen_bit_models_keep_their_dtype(family: str, resident: Residents, tokens: Tensor) -> None:
    model = resident(family, dtype="bfloat16")
    for kind in ("prune", "both"):
        found = logits(model, family_edit(family, kind, space="logits"), tokens)
        assert found.dtype == torch.bfloat16 and torch.isfinite(found).all()
    if family == "deepseek_v3-grouped":
        assert {layer.correction_bias.dtype for layer in model.layers} == {torch.float32}


@pytest.mark.parametrize(
    ("family", "retained", "active", "space", "message"),
    [
        ("deepseek_v3-grouped", 5, 2, "probs", "5 experts can't be divided .* 2 routing groups"),
        ("deepseek_v3-grouped", 4, 3, "probs", "3 active experts of 4 .* the 2 in the 1 of 2 routing groups"),
        ("deepseek_v2-grouped", 6, 1, "logits", "6 experts can't be divided .* 4 routing groups"),
        ("glm4_moe", 1, 1, "probs", "1 experts are too few"),
        ("gpt_oss", 4, 2, "probs", "router_space: logits"),
    ],
)
def test_what_a_family_cannot_express_is_refused(
    family: str, retained: int, active: int, space: str, message: str, resident: Residents, tokens: Tensor
) -> None:
    model = resident(family)
    before = logits(model, IdentityEdit(), tokens)
    with pytest.raises(UserError, match=message):
        model.apply(family_edit(family, "both", retained, active, space))
    assert isinstance(model.applied, IdentityEdit)
    assert torch.equal(logits(model, IdentityEdit(), tokens), before)


def independent(config: ModelConfig) -> ResidentModel:
    """Load a model with the products that workers use, whose results don't depend on how many columns there are."""
    resident = ResidentModel.load(config)
    make_rows_independent(resident.model)
    return resident


@pytest.mark.parametrize("family", examples("rounds"))
def test_in_sixteen_bits_a_pruned_checkpoint_computes_what_was_measured(
    family: str, model_config: Configs, tokens: Tensor, tmp_path: Path
) -> None:
    """Bit for bit: routers choose and weight experts in the precision in which `transformers` does.

    Keeping all experts is computing what the whole model computes.
    """
    row, config = VARIANTS[family], model_config(family, dtype="bfloat16")
    resident = independent(config)
    whole = np.tile(np.eye(row.experts, dtype=np.float32), (row.layers, 1, 1))
    all_kept = EepEdit(whole, whole, 2, "logits")
    assert torch.equal(logits(resident, all_kept, tokens), logits(resident, IdentityEdit(), tokens))
    edit = family_edit(family, "prune", space="logits")
    write_source(config, edit, tmp_path / "out")
    exported = independent(replace(config, path=str(tmp_path / "out")))
    assert torch.equal(logits(exported, IdentityEdit(), tokens), logits(resident, edit, tokens))
    if not only_inside(family):
        agreement = export_model(resident, edit, tmp_path / "stock", CARD).agreement
        assert agreement is not None and agreement.holds
        assert loader_of(tmp_path / "stock") == ("Mistral4" if family == "mistral4" else "AutoModel") + "ForCausalLM"


@pytest.mark.parametrize("family", examples("mixer"))
def test_scores_are_those_of_single_prompts(
    family: str, resident: Residents, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Answers are decoded, and gold answers scored, for many prompts at once as `transformers` does for one.

    Some end earlier than others of their batch, of the same length and of others.
    """
    prompts = [[i, i + 7, 2 * i, *[9, 30, 31][: i % 4]] for i in (6, 7, 8, 10)]
    split = words_split((words(prompt), words([prompt[0] + 4])) for prompt in prompts)
    model = resident(family)
    engine = GenerationEngine(model.model, tiny_tokenizer, EngineConfig(), Shortcuts())
    golds, texts = [], []
    with model.edited(family_edit(family, "prune", space="logits")), torch.no_grad():
        made = engine.generate(split, lambda row, text: row < 3 and len(text.split()) >= 2)
        for row, prompt in enumerate(prompts):
            ids, settings = torch.tensor([[1, *prompt]]), {"return_dict_in_generate": True, "output_logits": True}
            answer = model.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, pad_token_id=0, **settings
            )
            golds.append(float(answer.logits[0][0].log_softmax(-1)[prompt[0] + 4]))
            made_words = words(answer.sequences[0, ids.shape[1] :].tolist()).split()
            texts.append(" ".join(made_words[: 2 if row < 3 else 3]))
    assert list(made.texts) == texts
    assert made.gold_logprobs == pytest.approx(golds, abs=2e-4)


def words_split(rows: Any) -> PreparedSplit:
    made = tuple(Example(prompt, (answer,), ()) for prompt, answer in rows)
    return PreparedSplit("words", "search", "generate", "accuracy", Matching(), 3, " ", made)


@pytest.mark.parametrize("family", showing("refused"))
def test_what_no_fit_of_experts_repairs_is_refused(family: str, resident: Residents) -> None:
    model = resident(family)
    edit = RepairedEdit(family_edit(family, "prune"), RepairSettings((0.1,)), sample_rows())
    with pytest.raises(
        UserError, match=r"model can't be repaired: its (layers normalise|layers share|experts work|residual stream)"
    ):
        model.apply(edit)


@pytest.mark.parametrize("family", ["nemotron_h-latent", "afmoe"])
def test_experts_are_measured_on_their_own_inputs(family: str, resident: Residents, tokens: Tensor) -> None:
    """Saliency (REAP) from what the experts' modules get."""
    model, given, count = resident(family), [], VARIANTS[family].experts
    experts = [layer.experts for layer in model.layers]
    handles = [each.register_forward_pre_hook(lambda _, args: given.append(args)) for each in experts]
    model.run([[tuple(tokens[0].tolist())]])
    for handle in handles:
        handle.remove()
    measurement = ExpertsMeasurement(("importance",), None, 99)
    found = calibrate_experts(model, [tuple(tokens[0].tolist())], measurement).arrays
    scores, _ = scores_with_errors(found)
    for place, (module, (hidden, chosen, weights)) in enumerate(zip(experts, given, strict=True)):
        for expert in range(count):
            ones = torch.ones(len(hidden), 1)
            out = module(hidden, torch.full((len(hidden), 1), expert), ones)
            used = (weights * (chosen == expert)).sum(1) * out.norm(dim=1)
            wanted = float(used.sum() / max(1, int((chosen == expert).sum())))
            assert scores[place, expert] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("family", examples("names"))
def test_exports_load_with_transformers(
    family: str, model_config: Configs, resident: Residents, tokens: Tensor, tmp_path: Path
) -> None:
    """Files and configs name or place experts, routers and fields as `transformers` reads them."""
    from transformers import AutoModelForCausalLM

    config, model = model_config(family), resident(family)
    pruned, mapped = (family_edit(family, kind) for kind in ("prune", "mapped"))
    forms = ["source", "stock"]
    if not VARIANTS[family].folds:
        pruned = replace(pruned, router_space="logits")
    assert write_source(config, pruned, tmp_path / "source").form == "source"
    assert export_model(model, pruned, tmp_path / "stock", CARD).form == "stock"
    if family in showing("native"):  # routers that differ in rule, names or place
        forms.append("native")
        assert export_model(model, mapped, tmp_path / "native", CARD).form == "native"
    for name in forms:
        edit = mapped if name == "native" else pruned
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / name, trust_remote_code=name == "native").eval()
        with torch.no_grad():
            assert_close(exported(tokens).logits, logits(model, edit, tokens))
        assert {len(each) for name, each in exported.named_parameters() if name.endswith("experts.down_proj")} == {4}


def test_every_mixture_of_transformers_is_supported_or_named() -> None:
    """Multimodal models whose text model is of a family count as supported, and those that see images aren't language
    models."""
    import transformers

    sources = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    mixtures = {
        path.parent.name for path in sources if re.search(r"^class \w*(Experts|MoE)\(", path.read_text(), re.MULTILINE)
    }
    known = {*NOT_DESCRIBED, *(transformers.CONFIG_MAPPING[name].__module__.split(".")[-2] for name in FAMILIES)}
    known |= {name.removesuffix("_text") for name in SAME_ON_TEXT}
    assert len(mixtures) > 40 and mixtures - known <= {"vitpose_backbone"}


def test_a_way_of_choosing_that_transformers_lacks_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(checkpoint("deepseek_v2"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    for changes, message in (
        ({"topk_method": "noaux_tc"}, "deepseek_v2 model with topk_method 'noaux_tc'"),
        ({"topk_method": "greedy", "num_experts_per_tok": None}, "num_experts_per_tok"),
    ):
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        with pytest.raises(UserError, match=message):
            describe_model(ModelConfig(str(tmp_path), device="cpu"))


def test_a_model_that_looks_ahead_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(checkpoint("gemma3_text"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_bidirectional_attention": True}))
    with pytest.raises(UserError, match="use_bidirectional_attention: its tokens see those after them"):
        describe_model(ModelConfig(str(tmp_path), device="cpu"))
