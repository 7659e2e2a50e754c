"""Families with known routers and attention of their own: facts, edits, scores and exports are exact for each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from edit_checks import CARD, Residents, assert_close, logits, write_source
from family_samples import (
    COMMON,
    DEEPSEEK_V3,
    GLM_NEXT,
    LLAMA4,
    MINIMAX_M3,
    MISTRAL_LARGE,
    MUSE,
    QWEN4,
    RECENT,
    STEP,
    UNREPAIRABLE,
    edit_of_kind,
    randomise,
    representatives,
    sample_rows,
)
from plain_families import plain_family_logits, stock_family_logits
from safetensors.torch import load_file, save_file
from tiny_models import word_tokenizer, words
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.facts import parameters_after
from moevolve.workers.contract.settings import EngineConfig, ModelConfig, Shortcuts
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.engine.reuse import LayerReuse
from moevolve.workers.export.export import export_model
from moevolve.workers.export.folder import loader_of
from moevolve.workers.families.registry import only_inside
from moevolve.workers.methods.eep.accuracy import scores_with_errors
from moevolve.workers.methods.eep.calibrate_experts import calibrate_experts
from moevolve.workers.methods.eep.edit import EepEdit, ExpertsMeasurement
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.model.resident import ResidentModel
from moevolve.workers.profiling.costs import _uses
from moevolve.workers.profiling.outline import outline_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Checkpoints = Callable[[str], Path]
Configs = Callable[..., ModelConfig]

EXPERTS = 6
TWO = ("mimo_v2_flash", "mellum", "hy_v3", "laguna", "lfm2_moe", "ernie4_5_moe", "afmoe", "nemotron_h", "beam", "flint")
TWO += ("minimax_m3_vl_text", "llama4_text", "glm5_next_text", "step3p5", "muse_spark_text", "mistral_large4_text")
"""Families of which two layers have experts, without a setting of that name."""

PRECISIONS = {
    "exaone_moe": "routing groups, a router in float32",
    "ernie4_5_moe": "a router in float32 whose weights are cast, and a bias on a softmax",
    "phimoe": "each expert's softmax of its own",
    "gemma4_text": "a router that gives probabilities, with factors",
    "lfm2_moe": "scores rounded to sixteen bits",
    "deepseek_v4": "tables, and roots rounded to sixteen bits",
    "mistral4": "DeepSeek's scores without float32",
    "kolibri1": "sigmoids of the chosen",
    "llama4_text": "an adapted block that scales inputs",
    "step3p5": "an adapted block that cuts activations",
    "muse_spark_text": "a factor on logits, and modules before experts",
}
"""A family of each way in which routers round."""

LIKE_OTHERS = {
    "qwen3_5_moe_text": "qwen3_next",
    "cohere2_moe-softmax": "mixtral",
    "deepseek_v32": "glm_moe_dsa",
    "glm4_moe_lite": "deepseek_v3",
    "mimo_v2_flash": "deepseek_v3",
    "axk1": "deepseek_v3",
    "axk2": "glm_moe_dsa",
    "dots1": "deepseek_v3",
    "solar_open": "deepseek_v3",
    "mellum": "qwen2_moe",
    "flex_olmo": "qwen2_moe",
    "hy_v3": "minimax_m2",
    "granitemoe": "granitemoehybrid",
    "granitemoeshared": "granitemoehybrid",
    "bailing_hybrid": "kimi_linear",
}
"""Families whose MoE blocks are described and routed as those of another."""

OWN_MIXERS = {
    "kimi_linear": "recurrent states with short convolutions",
    "jamba": "Mamba",
    "lfm2_moe": "convolutions",
    "nemotron_h": "Mamba-2, and layers without attention",
    "glm_moe_dsa": "an indexer over tokens",
    "minimax_m3_vl_text": "an indexer over blocks",
    "deepseek_v4": "compressed keys",
    "llama4_text": "attention in chunks",
    "mimo_v2_flash": "sinks",
    "gemma4_text": "windows, with heads of another width",
    "hy_v4": "several residual streams",
    "qwen4_exp_text": "n-grams of token ids",
    "mistral_large4_text": "keys and values of other layers",
}
"""A family of each kind of layer that isn't plain attention."""

OTHER_MIXERS = ("deepseek_v32", "exaone_moe", "afmoe", "bailing_hybrid", "beam", "flint", "glm5_next_text", "step3p5")
OTHER_MIXERS += ("muse_spark_text", "qwen3_next", "granitemoehybrid")
"""Further families with such layers."""

OWN_NAMES = ("qwen3_next", "minimax_m2", "laguna", "granitemoehybrid", "jamba", "ernie4_5_moe", "hunyuan_v1_moe")
OWN_NAMES += ("afmoe", "nemotron_h", "granitemoe_swa", "hy_v4", "qwen4_exp_text")
"""Families whose files name or place experts, routers or config fields otherwise; all others are like one of these."""

OTHER_NAMES = ("exaone_moe", "lfm2_moe", "phimoe", "gemma4_text", "kolibri1", "deepseek_v4", "llama4_text")
"""Further such families, whose checkpoints the test in sixteen bits loads."""

OWN_ROUTERS = ("qwen3_next", "minimax_m2", "jamba", "ernie4_5_moe", "hunyuan_v1_moe", "afmoe", "nemotron_h")
"""Families whose native routers differ in rule, names or place; those of all others are like one of these."""


def depth(family: str) -> int:
    """Number of MoE layers."""
    dense = "first_k_dense_replace" in RECENT[family] or family.split("-", maxsplit=1)[0] in TWO
    return 2 if dense and family != "solar_open" else 3


@pytest.mark.parametrize("family", representatives(RECENT.keys() - LIKE_OTHERS, RECENT))
def test_facts_and_logits_are_those_of_the_equations(
    family: str, model_config: Configs, resident: Residents, checkpoint: Checkpoints, tokens: Tensor
) -> None:
    facts, model, layers = outline_model(model_config(family)).facts, resident(family), depth(family)
    assert (facts.family, len(facts.moe_layers)) == (family.split("-", maxsplit=1)[0], layers)
    others = {"nemotron_h": 2 * 24 * 32, "nemotron_h-latent": 2 * 24 * 16, "muse_spark_text": 3 * 24 * 16}
    expert = others.get(family, 3 * 24 * 32)
    assert (facts.experts, facts.active, facts.expert_parameters) == (EXPERTS, 2, expert)
    assert (
        facts.neuron_parameters == expert // 24
        and getattr(model.model.config, model.layers[0].family.width_field) == 24
    )
    assert (facts.unrepairable is not None) == (family in UNREPAIRABLE)
    assert (
        facts.parameters == parameters_after(facts, EXPERTS) == sum(each.numel() for each in model.model.parameters())
    )
    # Kinds of edits, and both spaces of their routers; all pairs of them are tried in test_family_edits.
    scored, ids = "probs" if model.layers[0].rule.has_scores else "logits", tokens[:1, :7]
    for kind, space in (("crossed", "logits"), ("mixed", scored)):
        edit = edit_of_kind(layers, EXPERTS, kind, space=space)
        assert_close(logits(model, edit, ids), plain_family_logits(checkpoint(family), edit, ids))
    found, stock = logits(model, IdentityEdit(), ids), stock_family_logits(checkpoint(family), ids)
    if not model.layers[0].family.adapted:
        assert torch.equal(found, stock)
    else:
        assert_close(found, stock)


@pytest.mark.parametrize("family", representatives(PRECISIONS, RECENT))
def test_in_sixteen_bits_a_pruned_checkpoint_computes_what_was_measured(
    family: str, model_config: Configs, tokens: Tensor, tmp_path: Path
) -> None:
    """Bit for bit: routers choose and weight experts in the precision in which `transformers` does.

    Keeping all experts is computing what the whole model computes.
    """
    config = model_config(family, dtype="bfloat16")
    resident = ResidentModel.load(config)
    whole = np.tile(np.eye(EXPERTS, dtype=np.float32), (depth(family), 1, 1))
    all_kept = EepEdit(whole, whole, 2, "logits")
    assert torch.equal(logits(resident, all_kept, tokens), logits(resident, IdentityEdit(), tokens))
    edit = edit_of_kind(depth(family), EXPERTS, "prune", space="logits")
    write_source(config, edit, tmp_path / "out")
    exported = ResidentModel.load(replace(config, path=str(tmp_path / "out")))
    assert torch.equal(logits(exported, IdentityEdit(), tokens), logits(resident, edit, tokens))
    if not only_inside(family):
        agreement = export_model(resident, edit, tmp_path / "stock", CARD).agreement
        assert agreement is not None and agreement.holds
        assert loader_of(tmp_path / "stock") == ("Mistral4" if family == "mistral4" else "AutoModel") + "ForCausalLM"


def test_what_mixes_residual_streams_is_counted(resident: Residents) -> None:
    model: Any = resident("hy_v4").model
    streams = torch.zeros((1, 1, model.config.hc_mult, model.config.hidden_size))
    for part in (model.model.layers[0].attn_hc, model.model.hc_head):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            part(streams)
        assert 2 * sum(use.products for use in _uses(part, model.config, "")) == counter.get_total_flops() > 0


@pytest.mark.parametrize("family", representatives(OWN_MIXERS, OTHER_MIXERS))
def test_scores_are_those_of_single_prompts(
    family: str, resident: Residents, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Answers are decoded, and gold answers scored, for many prompts at once as `transformers` does for one.

    Some end earlier than others of their batch, of the same length and of others.
    """
    prompts = [[i, i + 7, 2 * i, *[9, 30, 31][: i % 4]] for i in (6, 7, 8, 10)]
    examples = tuple(Example(words(prompt), (words([prompt[0] + 4]),), ()) for prompt in prompts)
    split = PreparedSplit("words", "search", "generate", "accuracy", Matching(), 3, " ", examples)
    model = resident(family)
    engine = GenerationEngine(model.model, tiny_tokenizer, EngineConfig(), Shortcuts())
    golds, texts = [], []
    with model.edited(edit_of_kind(depth(family), EXPERTS, "prune", space="logits")), torch.no_grad():
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


@pytest.mark.parametrize(
    "family", representatives(("glm_moe_dsa-shared", "qwen4_exp_text", "mistral_large4_text"), ("hy_v4", "deepseek_v4"))
)
def test_candidates_start_from_layers_that_read_more_than_hidden_states(
    family: str, resident: Residents, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """The second of three layers reads the first one's choice of tokens, or its keys and values, so that candidates
    that differ in the third start there; or layers read token ids."""
    model = resident(family)
    examples = tuple(Example(words([3 * i, i + 7, 2 * i + 5]), (words([i + 4]),), ()) for i in range(4, 9))
    split = PreparedSplit("words", "search", "generate", "accuracy", Matching(), 3, " ", examples)
    reuse = LayerReuse(model.model, model.layer_keys, 1 << 20)
    engines = [GenerationEngine(model.model, tiny_tokenizer, EngineConfig(), reuse=each) for each in (None, reuse)]
    parent, other = (edit_of_kind(depth(family), EXPERTS, "prune", space="logits", seed=seed) for seed in (0, 1))
    child = replace(
        parent,
        router_mapping=np.stack([*parent.router_mapping[:-1], other.router_mapping[-1]]),
        expert_merging=np.stack([*parent.expert_merging[:-1], other.expert_merging[-1]]),
    )
    for edit in (parent, child, parent, other):
        with model.edited(edit):
            plain, reusing = (engine.generate(split, lambda *_: False) for engine in engines)
        assert plain.texts == reusing.texts
        assert np.array_equal(plain.gold_logprobs, reusing.gold_logprobs)
    assert reuse.saved > 0


@pytest.mark.parametrize("family", ["afmoe", "nemotron_h-latent", "hy_v4", "glm_moe_dsa-shared"])
def test_what_no_fit_of_experts_repairs_is_refused(family: str, resident: Residents) -> None:
    model = resident(family)
    edit = RepairedEdit(edit_of_kind(depth(family), EXPERTS, "prune"), RepairSettings((0.1,)), sample_rows())
    with pytest.raises(
        UserError, match=r"model can't be repaired: its (layers normalise|layers share|experts work|residual stream)"
    ):
        model.apply(edit)


@pytest.mark.parametrize("family", ["nemotron_h-latent", "afmoe"])
def test_experts_are_measured_on_their_own_inputs(family: str, resident: Residents, tokens: Tensor) -> None:
    """Saliency (REAP) from what the experts' modules get, and the distances of their mean outputs."""
    model, given = resident(family), []
    experts = [layer.experts for layer in model.layers]
    handles = [each.register_forward_pre_hook(lambda _, args: given.append(args)) for each in experts]
    model.run([tuple(tokens[0].tolist())])
    for handle in handles:
        handle.remove()
    measurement = ExpertsMeasurement(("importance", "mean_outputs"), None, 99)
    found = calibrate_experts(model, [tuple(tokens[0].tolist())], measurement).arrays
    scores, _ = scores_with_errors(found)
    for place, (module, (hidden, chosen, weights)) in enumerate(zip(experts, given, strict=True)):
        for expert in range(EXPERTS):
            ones = torch.ones(len(hidden), 1)
            out = module(hidden, torch.full((len(hidden), 1), expert), ones)
            used = (weights * (chosen == expert)).sum(1) * out.norm(dim=1)
            wanted = float(used.sum() / max(1, int((chosen == expert).sum())))
            assert scores[place, expert] == pytest.approx(wanted, rel=1e-4)
    assert found["output_distances"].shape == (len(experts), EXPERTS, EXPERTS)


@pytest.mark.parametrize("family", representatives(OWN_NAMES, OTHER_NAMES))
def test_exports_load_with_transformers(
    family: str, model_config: Configs, resident: Residents, tokens: Tensor, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    config, model, layers = model_config(family), resident(family), depth(family)
    pruned, mapped = (edit_of_kind(layers, EXPERTS, kind) for kind in ("prune", "mapped"))
    rule, forms = model.layers[0].rule, ["source", "stock"]
    if not rule.one_hot_folds:
        pruned = replace(pruned, router_space="logits")
    assert write_source(config, pruned, tmp_path / "source").form == "source"
    assert export_model(model, pruned, tmp_path / "stock", CARD).form == "stock"
    if family in OWN_ROUTERS:
        forms.append("native")
        assert export_model(model, mapped, tmp_path / "native", CARD).form == "native"
    for name in forms:
        edit = mapped if name == "native" else pruned
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / name, trust_remote_code=name == "native").eval()
        with torch.no_grad():
            assert_close(exported(tokens).logits, logits(model, edit, tokens))
        assert {len(each) for name, each in exported.named_parameters() if name.endswith("experts.down_proj")} == {4}


QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
QWEN3 = {"intermediate_size": 40, "moe_intermediate_size": 24, "num_experts": EXPERTS, "head_dim": 8}
WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "qwen3_vl_moe": (
        QWEN3 | MROPE,
        QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        "num_experts",
    ),
    "qwen3_omni_moe": (QWEN3 | MROPE | {"norm_topk_prob": True}, {}, "num_experts"),
    "qwen4_exp": (
        QWEN4 | MROPE,
        QWEN_VISION | {"num_position_embeddings": 16},
        "num_experts",
    ),
    "minimax_m3_vl": (
        MINIMAX_M3,
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"image_size": 8, "patch_size": 4},
        "num_local_experts",
    ),
    "glm5_next": (
        GLM_NEXT,
        {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "patch_size": 4, "image_size": 8}
        | {"out_hidden_size": 32, "spatial_merge_size": 1},
        "n_routed_experts",
    ),
    "step3p7": (
        STEP,
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "image_size": 8},
        "n_routed_experts",
    ),
    "muse_spark": (
        MUSE,
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4},
        "num_local_experts",
    ),
    "mistral_large4": (
        MISTRAL_LARGE,
        {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
        | {"num_attention_heads": 2, "patch_size": 4, "image_size": 8},
        "n_routed_experts",
    ),
    "llama4": (
        LLAMA4,
        {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"image_size": 8, "patch_size": 4, "vision_output_dim": 16, "projector_input_dim": 16}
        | {"projector_output_dim": 16},
        "num_local_experts",
    ),
    "mistral3": (
        DEEPSEEK_V3 | {"model_type": "mistral4"},
        {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
        | {"num_attention_heads": 2, "patch_size": 4, "image_size": 8},
        "n_routed_experts",
    ),
    "kimi_k25": (
        DEEPSEEK_V3 | {"model_type": "deepseek_v3"},
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        "n_routed_experts",
    ),
}
"""Settings of the text model and of what sees images, and the field with the number of experts, by model type."""


PUBLISHED = {
    "minimax_m3_vl": "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight",
    "step3p7": "model.layers.1.moe.gate_proj.weight",
    "mistral_large4": "layers.1.experts.0.w1.weight",
}
"""A tensor of an expert as published, in checkpoints whose names `transformers` knows for the multimodal class only."""


def wrapped(model_type: str) -> Any:
    """A tiny random model of a multimodal class."""
    from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3OmniMoeForConditionalGeneration

    text, vision, _ = WRAPPERS[model_type]
    parts: dict[str, Any] = {"text_config": COMMON | text, "vision_config": vision, "tie_word_embeddings": False}
    kind: Any = AutoModelForImageTextToText
    if model_type == "muse_spark":
        sizes = {"hidden_sizes": (8,) * 4, "depths": (1,) * 4, "patch_sizes": (2,) * 4, "out_hidden_size": 32}
        parts |= {"audio_config": sizes, "out_hidden_size": 64, "projector_hidden_size": 16}
    if model_type == "qwen3_omni_moe":
        sound = {"d_model": 16, "encoder_layers": 1, "encoder_ffn_dim": 16, "encoder_attention_heads": 2}
        vision = QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
        del parts["tie_word_embeddings"]
        thinker = parts | {"vision_config": vision, "audio_config": sound | {"output_dim": 32}}
        parts, kind = {"thinker_config": thinker, "enable_audio_output": False}, Qwen3OmniMoeForConditionalGeneration
    with torch.random.fork_rng():
        torch.manual_seed(7)
        config = AutoConfig.for_model(model_type, **parts)
        model = kind.from_config(config) if kind is AutoModelForImageTextToText else kind(config)
        for name, tensor in model.state_dict().items():
            randomise(name, tensor)
    return model.eval()


WRAPPED = {
    "qwen3_vl_moe": "transposed experts",
    "qwen3_omni_moe": "a model within a model",
    "minimax_m3_vl": "published names that transformers knows for the whole only, and a class for text alone",
    "step3p7": "published names of the whole, and no class for text alone",
    "llama4": "experts of its own form",
    "kimi_k25": "published names of a part that transformers renames",
}
"""A model type of each way in which checkpoints hold a text model."""


@pytest.mark.parametrize("model_type", representatives(WRAPPED, WRAPPERS))
def test_of_a_multimodal_checkpoint_the_text_model_is_pruned(model_type: str, tokens: Tensor, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole = wrapped(model_type)
    whole.save_pretrained(tmp_path / "whole")
    if model_type == "kimi_k25":  # `transformers` loads the published names, and writes others
        file = tmp_path / "whole" / "model.safetensors"
        published = {name.replace("model.blocks.", "model.layers."): each for name, each in load_file(file).items()}
        save_file(published, file, metadata={"format": "pt"})
    word_tokenizer(["one", "two", "a"]).save_pretrained(tmp_path / "whole")  # Qwen's class takes the letter
    source = ModelConfig(str(tmp_path / "whole"), device="cpu")
    resident = ResidentModel.load(source)
    edit = edit_of_kind(len(resident.layers), EXPERTS, "prune")

    def seen(model: Any) -> Tensor:
        # The whole Llama-4 of transformers 5.24 looks for results of images where there are none.
        part = {"qwen3_omni_moe": "thinker", "llama4": "language_model"}.get(model_type, "")
        with torch.no_grad():
            found: Tensor = getattr(model, part, model)(tokens).logits
        return found

    assert_close(logits(resident, IdentityEdit(), tokens), seen(whole))
    pruned_logits = logits(resident, edit, tokens)
    alone = resident.model.config.model_type
    if only_inside(alone):  # of which `transformers` has no class
        with pytest.raises(UserError, match=f"no class for {alone} models alone; export the individual as source"):
            export_model(resident, edit, tmp_path / "stock", CARD)
    if model_type in PUBLISHED:
        assert PUBLISHED[model_type] in load_file(tmp_path / "whole" / "model.safetensors")
        # Its merged experts are found under these names, too, which are gone again for text models alone.
        merged = edit_of_kind(len(resident.layers), EXPERTS, "mixed", space="logits")
        write_source(source, merged, tmp_path / "merged", requantise=True)
        expected = logits(resident, merged, tokens)
        assert_close(seen(type(whole).from_pretrained(tmp_path / "merged").eval()), expected)
    if model_type == "minimax_m3_vl":
        export_model(resident, edit, tmp_path / "stock", CARD)
        assert_close(seen(AutoModelForCausalLM.from_pretrained(tmp_path / "stock").eval()), pruned_logits)
    if model_type in ("qwen3_vl_moe", *PUBLISHED):  # the first stores transposed experts
        assert_close(logits(ResidentModel.load(replace(source, expert_offload="disk")), edit, tokens), pruned_logits)
    write_source(source, edit, tmp_path / "pruned")
    settings = json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert settings["model_type"] == model_type
    text = settings.get("thinker_config", settings)["text_config"]
    # `transformers` writes Qwen's number of experts under another name than published configs have.
    assert text.get(WRAPPERS[model_type][2], text.get("num_local_experts")) == 4
    assert not text.get("mtp_num_hidden_layers")
    assert loader_of(tmp_path / "pruned") == type(whole).__name__
    pruned = type(whole).from_pretrained(tmp_path / "pruned").eval()
    assert_close(seen(pruned), pruned_logits)
    before = {name: each for name, each in whole.state_dict().items() if "vis" in name}
    after = pruned.state_dict()
    assert before and all(torch.equal(each, after[name]) for name, each in before.items())
    if model_type == "qwen3_omni_moe":
        assert export_model(resident, edit, tmp_path / "stock", CARD).form == "stock"
        assert_close(seen(AutoModelForCausalLM.from_pretrained(tmp_path / "stock").eval()), pruned_logits)


def test_step_as_published_alone_and_in_fp8(tmp_path: Path, tokens: Tensor) -> None:
    """Step-3.5's files have the names of Step-3.7's text model, with an expert's scales [n, blocks, blocks]."""
    whole = wrapped("step3p7")
    whole.save_pretrained(tmp_path / "whole")
    state = load_file(tmp_path / "whole" / "model.safetensors")
    state = {name: each for name, each in state.items() if name.startswith(("model.", "lm_head."))}
    plain, packed, numbers = dict(state), dict(state), torch.Generator().manual_seed(5)
    for name, tensor in state.items():
        if ".moe." in name and tensor.ndim == 3:
            scales = torch.rand((EXPERTS, tensor.shape[1] // 8, tensor.shape[2] // 8), generator=numbers) + 0.5
            packed |= {name: tensor.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
            spread = scales.repeat_interleave(8, dim=1).repeat_interleave(8, dim=2)
            plain[name] = packed[name].float() * spread
    # Behind the last layer is one for multi-token prediction, and lists of the config count it.
    for tensors in (plain, packed):
        more = {name.replace("s.2.", "s.3."): each.clone() for name, each in tensors.items() if "layers.2." in name}
        tensors.update(more)
    text = whole.config.text_config.to_dict()
    text |= {"moe_num_experts": text["n_routed_experts"], "num_nextn_predict_layers": 1}
    for name in ("layer_types", "mlp_layer_types", "swiglu_limits"):
        text[name] = [*text[name], text[name][-1]]
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}
    for folder, tensors, more in ((tmp_path / "plain", plain, {}), (tmp_path / "packed", packed, fp8)):
        word_tokenizer(["one", "two"]).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(text | more))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    sources = [ModelConfig(str(tmp_path / name), device="cpu", dtype="float32") for name in ("plain", "packed")]
    edit = edit_of_kind(2, EXPERTS, "prune")
    expected, found = (logits(ResidentModel.load(source), edit, tokens) for source in sources)
    assert_close(found, expected)
    assert_close(logits(ResidentModel.load(replace(sources[1], expert_offload="disk")), edit, tokens), expected)
    write_source(sources[1], edit, tmp_path / "pruned")
    settings = json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert settings["n_routed_experts"] == settings["moe_num_experts"] == 4
    assert settings["num_nextn_predict_layers"] == 0 and len(settings["swiglu_limits"]) == 3
    written, kept = load_file(tmp_path / "pruned" / "model.safetensors"), edit.expert_merging.argmax(axis=2)
    for part in ("gate_proj.weight", "up_proj.weight_scale_inv", "router_bias"):
        name = f"model.layers.2.moe.{part}"
        assert torch.equal(written[name].float(), packed[name].float()[kept[1]])
    pruned = ResidentModel.load(replace(sources[1], path=str(tmp_path / "pruned")))
    assert_close(logits(pruned, IdentityEdit(), tokens), found)
    repaired = RepairedEdit(edit, RepairSettings((0.1,)), sample_rows())
    write_source(sources[1], repaired, tmp_path / "repaired", requantise=True)
    after = ResidentModel.load(replace(sources[1], path=str(tmp_path / "repaired")))
    assert_close(
        logits(after, IdentityEdit(), tokens), logits(ResidentModel.load(sources[1]), repaired, tokens), tolerance=0.1
    )
