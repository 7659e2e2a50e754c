"""What a plan counts, against published sizes, the engine's own passes and exported checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from profile_lab import write_model
from pydantic import TypeAdapter
from search_samples import PRUNE, TUNE
from tomoe_samples import tomoe_space

from moevolve.evaluators.fitness.scoring import run_split
from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.config.files import find_model, shipped_models
from moevolve.search.genomes.registry import AnyGenomeSection, costs_of, make_space
from moevolve.search.running.plan.counts import model_sizes
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.engine.columns import Layout
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.model.resident import ResidentModel
from moevolve.workers.profiling.outline import outline_model
from moevolve.workers.profiling.passes import PromptMeter, passes_of

# Billions of parameters, all and per token, as published: announcements of Mistral AI and Qwen, DeepSeek-V2's, V3's
# and V4's papers, OLMoE's, the model card of GPT-OSS, GLM-4.5's report. The third number says how many of the two
# matrices of vocabulary x hidden size, of which a token uses one row and the other whole, aren't in the second one.
PUBLISHED = {
    "mixtral-8x7b": (46.7, 12.9, 0),
    "mixtral-8x22b": (141, 39, 0),
    "qwen1.5-moe-a2.7b": (14.3, 2.7, 0),
    "qwen2-57b-a14b": (57.4, 14, 0),
    "qwen3-30b-a3b": (30.5, 3.3, 0),
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


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Callable[[str], PreparedSplit]:
    """The tiny task with choices of one and of several tokens, under any fitness."""
    folder = tmp_path_factory.mktemp("tasks")
    words = ("red", "the cat", "is a dog", "blue bird")
    rows = [{"text": "which " * (1 + 5 * i % 4) + words[i % 4], "label": words[i % 4]} for i in range(23)]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = ["source: {files: {all: words.jsonl}}", "splits: {search: {from: all}}", 'prompt: "{{ text }} Answer :"']
    lines += ['answer: "{{ label }}"', f"choices: {json.dumps(words)}", "max_new_tokens: 5", "matching: {kind: exact}"]
    (folder / "words.yaml").write_text("\n".join(lines))
    return lambda fitness: prepare_split(load_task(f"{folder}/words.yaml").with_fitness(fitness), "search")  # type: ignore[arg-type]


class Seen:
    """Passes that a model ran: positions of each, and positions that were cached before."""

    def __init__(self) -> None:
        self.passes: list[tuple[int, int]] = []

    def __call__(self, module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        if "attention_mask" not in kwargs:
            return  # the output head by itself
        rows, columns = kwargs["input_ids"].shape
        mask = kwargs["attention_mask"]
        self.passes.append((rows * columns, 0 if mask is None else rows * (mask.shape[1] - columns)))


@contextmanager
def watched(model: Any) -> Iterator[Seen]:
    seen = Seen()
    handle = model.register_forward_pre_hook(seen, with_kwargs=True)
    yield seen
    handle.remove()


@pytest.fixture(scope="module")
def resident(tiny: Any) -> ResidentModel:
    return ResidentModel.load(ModelConfig(str(tiny.model), device="cpu"))


@pytest.fixture
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Layout:
    if request.param == "padded":
        monkeypatch.setattr("moevolve.workers.engine.forward.packs", lambda *_: False)
    layout: Layout = request.param
    return layout


ENGINE = EngineConfig(batch_tokens=40)
KINDS = ("rank", "generate", "perplexity", "kl", "agreement", "perplexity in windows")


@pytest.mark.parametrize(
    ("fitness", "layout"),
    [*((kind, "packed") for kind in KINDS), *((kind, "padded") for kind in KINDS[:3])],
    indirect=["layout"],
)
def test_passes_are_those_of_the_engine(
    resident: ResidentModel, task: Callable[[str], PreparedSplit], fitness: str, layout: Layout
) -> None:
    split = task(fitness.removesuffix(" in windows"))
    if fitness.endswith(" in windows"):
        split = replace(split, window=13)
    outline = outline_model(resident.config)
    assert outline.layout == "packed"
    tokens = PromptMeter(resident.config, ENGINE).tokens(split)
    planned = passes_of(tokens, ENGINE.batch_tokens, layout, outline.caches)
    section: Any = TypeAdapter(AnyGenomeSection).validate_python({"experts": 2, "groups": 2})
    space = make_space(section, outline.facts)
    edit = space.sample(np.random.default_rng(1), PRUNE).genome.express()
    engine = GenerationEngine(resident.model, resident.tokenizer, ENGINE)
    engine.remember(split)
    # No answer is decoded on: those that are decided at once leave only what every candidate needs.
    run = (lambda: engine.generate(split, lambda i, text: True)) if fitness == "generate" else None
    with resident.edited(edit), watched(resident.model) as seen:
        run() if run is not None else run_split(engine, split)
    assert [(one.tokens, one.cached) for one in planned.required] == seen.passes


def test_decoding_takes_a_pass_of_one_column_per_step(
    resident: ResidentModel, task: Callable[[str], PreparedSplit]
) -> None:
    split = task("generate")
    planned = passes_of(PromptMeter(resident.config, ENGINE).tokens(split), ENGINE.batch_tokens)
    engine = GenerationEngine(resident.model, resident.tokenizer, ENGINE)
    with watched(resident.model) as seen:
        engine.generate(split, lambda i, text: False)
    decoded = [each for each in seen.passes if each[1]]
    # Gold answers that are met, and ends, spare some steps.
    assert 0 < len(decoded) <= sum(one.steps for one in planned.decoding)
    assert all(one.steps == split.max_new_tokens - 1 for one in planned.decoding)
    assert max(tokens for tokens, _ in decoded) <= max(one.tokens for one in planned.decoding)
    examples = len(split.examples)
    assert sum(one.tokens for one in planned.decoding) == examples


def test_masked_values_are_counted_as_the_genome_counts_them(tmp_path: Path) -> None:
    outline = outline_model(ModelConfig(str(write_model("llama", tmp_path / "model"))))
    space = tomoe_space(outline.facts)
    _, size = model_sizes(outline, costs_of(space, outline), {"tune": TUNE})
    start = space.start(TUNE).genome
    moved = space.genome(routers=start.routers, heads=np.ones_like(start.heads))
    assert size.active_parameters == space.describe(moved).active_parameters
    assert size.active_parameters > space.describe(start).active_parameters, "all tokens keep the same values"
