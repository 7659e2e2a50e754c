"""What a profile counts in exported models: against the genomes' own descriptions, torch's counter and formulas."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from profile_lab import FAMILIES, HEADS, HIDDEN, LAYERS, VOCABULARY, Exported, export_sample, load_plainly, write_model
from pydantic import TypeAdapter
from search_samples import MERGE, PRUNE, TUNE
from torch.utils.flop_counter import FlopCounterMode

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.registry import AnyGenomeSection, costs_of, make_space
from moevolve.search.interface.profile import _notes
from moevolve.search.running.plan.counts import model_sizes
from moevolve.workers.checkpoints.loading import backends
from moevolve.workers.checkpoints.native import NATIVE_PREFIX
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.profiling.costs import model_costs
from moevolve.workers.profiling.outline import outline_model
from moevolve.workers.profiling.report import LoadReply, ModelProfile, ProfileReport, ProfileSettings

CONTEXT = 7
FACTOR = {"kind": "factorllm", "experts": 4, "active": 2, "calibration_tokens": 200}
MASKS = {"kind": "tomoe", "experts": 3, "calibration_tokens": 200}
# The code of fewer blocks mixes diagonals by elementwise products, which torch's counter doesn't see.
MIXED = {"kind": "nanomoe", "blocks": 4, "rank": 2}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "eep-prune-unscaled": ("qwen2_moe", {"kind": "eep", "experts": 2, "groups": 2, "router_space": "probs"}, "native"),
    "eep-prune": ("qwen2_moe", {"kind": "eep", "experts": 2, "groups": 2}, "stock"),
    "eep-merge": ("mixtral", {"kind": "eep", "experts": 3, "groups": 1}, "native"),
    "eep-merge-logits": ("qwen2_moe", {"kind": "eep", "experts": 3, "groups": 1, "router_space": "logits"}, "stock"),
    "factorllm": ("llama", FACTOR, "native"),
    "factorllm-biases": ("opt", FACTOR, "native"),
    "factorllm-stock": ("llama", FACTOR | {"active": 1, "router_bias": False, "output_scale": "one"}, "stock"),
    "tomoe-heads-biases": ("qwen2", MASKS, "native"),
    "tomoe-plain": ("phi", MASKS | {"attention": False}, "native"),
    "nanomoe-I": ("llama", MIXED | {"variant": "I"}, "native"),
    "nanomoe-II": ("opt", MIXED | {"variant": "II", "blocks": 8, "layers": "*.fc?"}, "native"),
    "nanomoe-III": ("mixtral", MIXED | {"variant": "III", "blocks": 8, "layers": "*.self_attn.*"}, "native"),
    "nanomoe-low-rank": ("llama", MIXED | {"variant": "low_rank", "blocks": 1}, "native"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = write_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


@pytest.fixture(scope="module")
def exported(
    tiny: Any, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Exported]:
    made: dict[str, Exported] = {}

    def make(case: str) -> Exported:
        if case not in made:
            family, genome, _ = CASES[case]
            target = tmp_path_factory.mktemp("exports") / case
            made[case] = export_sample(tiny, checkpoint(family), genome, target, merge="merge" in case)
        return made[case]

    return make


def load_eagerly(directory: Path) -> Any:
    """The checkpoint with attention and experts in ordinary matrix products, which the counter sees."""
    kind = json.loads((directory / "config.json").read_text())["model_type"].removeprefix(NATIVE_PREFIX)
    eager = dict.fromkeys(backends(kind), "eager")
    return load_plainly(directory, **eager)


@torch.no_grad()
def counted(model: Any, context: int) -> tuple[int, int]:
    """Operations in weights and in attention for the last of `context` tokens, by torch's counter."""
    tokens = torch.arange(context)[None] * 7 % VOCABULARY
    before = model(input_ids=tokens[:, :-1], use_cache=True).past_key_values
    with FlopCounterMode(display=False, depth=10) as counter:
        model(input_ids=tokens[:, -1:], past_key_values=before, use_cache=True)
    by_module = {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
    rotary = sum(flops for name, flops in by_module.items() if name.endswith("rotary_emb"))
    attention = sum(flops for name, flops in by_module.items() if name.endswith("self_attn"))
    within = {name: name.partition(".self_attn.")[2] for name in by_module}
    projections = sum(by_module[name] for name, part in within.items() if part and "." not in part)
    return counter.get_total_flops() - rotary - (attention - projections), attention - projections


@pytest.mark.parametrize("case", CASES)
def test_an_export_costs_what_its_genome_describes_torch_counts_and_a_plan_says(
    exported: Callable[[str], Exported], checkpoint: Callable[[str], Path], case: str
) -> None:
    found, (family, genome, form) = exported(case), CASES[case]
    assert found.form == form
    model = load_eagerly(found.directory)
    costs = model_costs(model, CONTEXT)
    assert costs.parameters == found.described.parameters
    assert costs.active_parameters == found.described.active_parameters
    assert (costs.linear_flops, costs.attention_flops) == counted(model, CONTEXT)
    outline = outline_model(ModelConfig(str(checkpoint(family))))
    space = make_space(TypeAdapter(AnyGenomeSection).validate_python(genome), outline.facts)
    phase = MERGE if "merge" in case else PRUNE if "prune" in case else TUNE
    _, size = model_sizes(outline, costs_of(space, outline), {phase.kind: phase})
    if "heads" not in case:  # how many values heads keep depends on the genome
        assert size.active_parameters == costs.active_parameters
        assert size.parameters in (None, costs.parameters)


def test_operations_of_unedited_models_are_what_torch_counts(checkpoint: Callable[[str], Path]) -> None:
    for family in FAMILIES:
        model = load_eagerly(checkpoint(family))
        costs = model_costs(model, CONTEXT)
        assert (costs.linear_flops, costs.attention_flops) == counted(model, CONTEXT), family


def test_costs_of_a_mixtral_in_closed_form(checkpoint: Callable[[str], Path]) -> None:
    model = load_plainly(checkpoint("mixtral"))
    costs = model_costs(model, CONTEXT)
    attention, expert, router = 3 * HIDDEN * HIDDEN, 3 * HIDDEN * 24, 4 * HIDDEN
    embedding, norms = VOCABULARY * HIDDEN, (2 * LAYERS + 1) * HIDDEN
    outside = embedding + norms + LAYERS * (attention + router)
    assert costs.parameters == outside + LAYERS * 4 * expert, "embeddings are tied, and count once"
    assert costs.active_parameters == outside + LAYERS * 2 * expert
    assert costs.linear_flops == 2 * (embedding + LAYERS * (attention + router + 2 * expert))
    assert costs.attention_flops == LAYERS * 4 * CONTEXT * HIDDEN
    buffers = sum(each.nbytes for each in model.buffers())
    assert costs.weight_bytes == 4 * costs.parameters + buffers
    assert model_costs(model.bfloat16(), CONTEXT).weight_bytes < costs.weight_bytes * 0.6


def test_a_sliding_window_bounds_what_a_token_attends_to(checkpoint: Callable[[str], Path]) -> None:
    model = load_plainly(checkpoint("mixtral"))
    model.config.sliding_window = 5
    assert model_costs(model, 100).attention_flops == LAYERS * 4 * 5 * HIDDEN
    assert model_costs(model, 3).attention_flops == LAYERS * 4 * 3 * HIDDEN
    model.config.layer_types = ["sliding_attention", "full_attention", "full_attention"]
    assert model_costs(model, 100).attention_flops == 4 * (5 + 100 + 100) * HIDDEN


def test_a_mask_on_a_finished_product_saves_nothing(
    exported: Callable[[str], Exported], checkpoint: Callable[[str], Path]
) -> None:
    """Neither operations, by torch's counter, nor parameters used; and the genome's description says so."""
    found = exported("tomoe-heads-biases")
    edited, whole = load_eagerly(found.directory), load_eagerly(checkpoint("qwen2"))
    attention = edited.model.layers[0].self_attn
    assert type(attention.v_proj).__name__ == "MaskedValues" and attention.v_proj.active < HIDDEN // HEADS
    linear, pairs = counted(edited, CONTEXT)
    assert pairs == counted(whole, CONTEXT)[1]
    # A description counts entries of vectors as well, norms and biases, and looked-up embeddings.
    vectors = sum(each.numel() for each in edited.parameters() if each.dim() == 1)
    assert found.described.active_parameters == linear // 2 + vectors + VOCABULARY * HIDDEN


def test_a_stock_form_that_repeats_shared_neurons_is_noted(
    tiny: Any, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    found = export_sample(
        tiny, checkpoint("llama"), MASKS | {"attention": False, "equal_widths": True, "budget": 0.5}, tmp_path / "stock"
    )
    assert found.form == "stock"
    model = load_eagerly(found.directory)
    costs = model_costs(model, CONTEXT)
    assert (costs.linear_flops, costs.attention_flops) == counted(model, CONTEXT)
    repeated = LAYERS * 3 * model.config.intermediate_size * 3 * HIDDEN
    elsewhere = found.parameters_full - LAYERS * 48 * 3 * HIDDEN + LAYERS * 3 * HIDDEN
    assert costs.parameters == elsewhere + repeated > found.described.parameters

    load = LoadReply(costs.parameters, 1, 1, 1, 1, "mixtral", "float32", "cpu", "CPU", 1, "sdpa", "eager", 0)
    report = ProfileReport(
        ProfileSettings((1,), 1, 1, 1), (ModelProfile("full", load, ()), ModelProfile("s:0", load, ()))
    )
    for described, count in ((found.described.parameters, 1), (costs.parameters, 0)):
        individual = SimpleNamespace(parameters=described)
        subjects: Any = {
            "s:0": SimpleNamespace(detail=SimpleNamespace(individual=individual, evaluations=()), genome=None)
        }
        notes = _notes(report, subjects)
        assert len(notes) == count
        assert all(f"{described:,}" in note and f"{costs.parameters:,}" in note for note in notes)


def test_unknown_matrices_are_refused(checkpoint: Callable[[str], Path]) -> None:
    model = load_plainly(checkpoint("llama"))
    model.model.layers[1].mlp = torch.nn.Bilinear(HIDDEN, HIDDEN, HIDDEN)
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp.*Bilinear"):
        model_costs(model, CONTEXT)
