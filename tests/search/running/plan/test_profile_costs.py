"""What a profile counts in exported models: against the genomes' own descriptions and formulas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from profile_lab import HIDDEN, LAYERS, VOCABULARY, Exported, export_sample, load_plainly, write_model
from pydantic import TypeAdapter
from search_samples import MERGE, PRUNE, TUNE

from moevolve.search.genomes.registry import AnyGenomeSection, costs_of, make_space
from moevolve.search.running.plan.counts import model_sizes
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.profiling.costs import active_parameters
from moevolve.workers.profiling.outline import outline_model

FACTOR = {"kind": "factorllm", "experts": 4, "active": 2, "calibration_tokens": 200}
MASKS = {"kind": "tomoe", "experts": 3, "calibration_tokens": 200}
MIXED = {"kind": "nanomoe", "blocks": 4, "rank": 2}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "eep-prune-unscaled": ("qwen2_moe", {"kind": "eep", "experts": 2, "groups": 2, "router_space": "probs"}, "native"),
    "eep-prune": ("qwen2_moe", {"kind": "eep", "experts": 2, "groups": 2}, "stock"),
    "eep-merge": ("mixtral", {"kind": "eep", "experts": 3, "groups": 1}, "native"),
    "eep-merge-logits": ("qwen2_moe", {"kind": "eep", "experts": 3, "groups": 1, "router_space": "logits"}, "stock"),
    "factorllm": ("llama", FACTOR, "native"),
    "factorllm-biases": ("opt", FACTOR, "native"),
    "factorllm-stock": ("llama", FACTOR | {"active": 1, "router_bias": False}, "stock"),
    "tomoe-heads-biases": ("qwen2", MASKS, "native"),
    "tomoe-plain": ("phi", MASKS | {"attention": False}, "native"),
    "tomoe-fused": ("phi3", MASKS | {"attention": False}, "native"),
    "factorllm-fused": ("phi3", FACTOR, "native"),
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


@pytest.mark.parametrize("case", CASES)
def test_an_export_has_the_parameters_that_its_genome_describes_and_a_plan_says(
    exported: Callable[[str], Exported], checkpoint: Callable[[str], Path], case: str
) -> None:
    found, (family, genome, form) = exported(case), CASES[case]
    assert found.form == form
    model = load_plainly(found.directory)
    assert model.num_parameters() == found.described.parameters
    assert active_parameters(model) == found.described.active_parameters
    outline = outline_model(ModelConfig(str(checkpoint(family))))
    space = make_space(TypeAdapter(AnyGenomeSection).validate_python(genome), outline.facts)
    phase = MERGE if "merge" in case else PRUNE if "prune" in case else TUNE
    _, size = model_sizes(outline, costs_of(space, outline), {phase.kind: phase})
    if "heads" not in case:  # how many values heads keep depends on the genome
        assert size.active_parameters == found.described.active_parameters
        assert size.parameters in (None, found.described.parameters)


def test_costs_of_a_mixtral_in_closed_form(checkpoint: Callable[[str], Path]) -> None:
    model = load_plainly(checkpoint("mixtral"))
    attention, expert, router = 3 * HIDDEN * HIDDEN, 3 * HIDDEN * 24, 4 * HIDDEN
    embedding, norms = VOCABULARY * HIDDEN, (2 * LAYERS + 1) * HIDDEN
    outside = embedding + norms + LAYERS * (attention + router)
    assert active_parameters(model) == outside + LAYERS * 2 * expert, "embeddings are tied, and count once"


def test_a_stock_form_repeats_shared_neurons(tiny: Any, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    found = export_sample(
        tiny, checkpoint("llama"), MASKS | {"attention": False, "equal_widths": True, "budget": 0.5}, tmp_path / "stock"
    )
    assert found.form == "stock"
    model = load_plainly(found.directory)
    count = model.num_parameters()
    repeated = LAYERS * 3 * model.config.intermediate_size * 3 * HIDDEN
    elsewhere = found.parameters_full - LAYERS * 48 * 3 * HIDDEN + LAYERS * 3 * HIDDEN
    assert count == elsewhere + repeated > found.described.parameters
