"""What a plan counts, against published sizes and what genomes count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from profile_lab import write_model
from pydantic import TypeAdapter
from search_samples import TUNE
from tomoe_samples import tomoe_space

from moevolve.search.config.files import find_model, shipped_models
from moevolve.search.genomes.registry import AnyGenomeSection, costs_of, make_space
from moevolve.search.running.plan.counts import model_sizes
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.profiling.outline import outline_model

# Billions of parameters, all and per token, as published: announcements of Mistral AI and Qwen, DeepSeek-V2's, V3's
# and V4's papers, OLMoE's, the model card of GPT-OSS, GLM-4.5's report. The third number says how many of the two
# matrices of vocabulary x hidden size, of which a token uses one row and the other whole, aren't in the second one.
PUBLISHED = {
    "mixtral-8x7b": (46.7, 12.9, 0),
    "mixtral-8x22b": (141, 39, 0),
    "qwen1.5-moe-a2.7b": (14.3, 2.7, 0),
    "qwen2-57b-a14b": (57.4, 14, 0),
    "qwen3-30b-a3b": (30.5, 3.3, 0),
    "qwen3-coder-480b-a35b": (480, 35, 0),
    "olmoe-1b-7b": (6.92, 1.3, 0),
    "deepseek-v2-lite": (15.7, 2.4, 1),
    "deepseek-v3": (671, 37, 0),
    "deepseek-v4-flash": (284, 13, 1),
    "gpt-oss-20b": (20.91, 3.61, 1),
    "glm-4.5-air": (106, 12, 2),
}
PUBLISHED_DENSE = {"llama-3-8b": 8.03, "opt-13b": 12.9}  # Meta's announcements


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_configs_have_the_published_parameters(name: str) -> None:
    outline = outline_model(ModelConfig(find_model(name), dtype="bfloat16"))
    section = {"experts": outline.facts.experts, "router_space": "logits"}
    space = make_space(TypeAdapter(AnyGenomeSection).validate_python(section), outline.facts)
    full = model_sizes(outline, costs_of(space, outline), {})[0]
    total, active, matrices = PUBLISHED[name]
    assert full.parameters is not None
    assert full.parameters / 1e9 == pytest.approx(total, rel=0.01)
    left_out = matrices * outline.vocabulary * outline.hidden
    assert (full.active_parameters - left_out) / 1e9 == pytest.approx(active, rel=0.025)
    tables = 3 * 129_280 * 6 * 8 if name == "deepseek-v4-flash" else 0  # of the experts of token ids, in three layers
    # From transformers 5.24 on, routers of DeepSeek and GLM stay in float32.
    assert outline.weight_bytes == pytest.approx(2 * full.parameters + tables, rel=3e-4)


def test_shipped_dense_configs_have_the_published_parameters() -> None:
    assert set(shipped_models()) == {*PUBLISHED, *PUBLISHED_DENSE}
    for name, parameters in PUBLISHED_DENSE.items():
        facts = outline_model(ModelConfig(find_model(name), dtype="bfloat16")).facts
        assert facts.dense is not None and facts.parameters / 1e9 == pytest.approx(parameters, rel=0.005)


def test_masked_values_are_counted_as_the_genome_counts_them(tmp_path: Path) -> None:
    outline = outline_model(ModelConfig(str(write_model("llama", tmp_path / "model"))))
    space = tomoe_space(outline.facts)
    _, size = model_sizes(outline, costs_of(space, outline), {"tune": TUNE})
    start = space.start(TUNE).genome
    moved = space.genome(routers=start.routers, heads=np.ones_like(start.heads))
    assert size.active_parameters == space.describe(moved).active_parameters
    assert size.active_parameters > space.describe(start).active_parameters, "all tokens keep the same values"
