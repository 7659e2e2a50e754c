"""The run files of the EEP paper's tables: checked against the paper and on the demo model, two run to the end."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from local_workers import local_pool
from transformers import AutoModelForCausalLM, AutoTokenizer

from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task
from moevolve.search.config.study import Study, StudyCell, load_study
from moevolve.search.genomes.eep.section import EepSection
from moevolve.search.genomes.registry import check_baselines, make_space
from moevolve.search.results.study import study_rows
from moevolve.search.running.observer import Observer
from moevolve.search.running.study import run_study
from moevolve.search.strategies.phased import make_strategy
from moevolve.search.strategies.schedule import make_schedule, rounds_notes
from moevolve.store.repository import Store
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.model.describe import describe_config, meta_model

CONFIGS = Path(__file__).parents[3] / "configs"
TABLES = sorted(
    path.stem for path in (CONFIGS / "runs" / "eep").glob("*-*.yaml") if not path.stem.startswith("mixtral")
)
SHAPES = {
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b",
    "mistralai/Mixtral-8x22B-Instruct-v0.1": "mixtral-8x22b",
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": "qwen1.5-moe-a2.7b",
    "Qwen/Qwen2-57B-A14B-Instruct": "qwen2-57b-a14b",
}


@cache
def load(table: str, *overrides: str) -> Study:
    return load_study(CONFIGS / "runs" / "eep" / f"{table}.yaml", overrides)


@cache
def facts_of(model: str) -> ModelFacts:
    config = ModelConfig(str(CONFIGS / "models" / SHAPES[model]))
    return describe_config(meta_model(config), config)


def section_of(cell: StudyCell) -> EepSection:
    assert isinstance(cell.config.genome, EepSection)
    return cell.config.genome


def test_there_is_one_for_every_table_that_suits_the_papers_models_and_tasks() -> None:
    assert set(TABLES) == {"figure-3", *(f"table-{number}" for number in (1, 2, 3, 4, 7, 8, 9, 13))}
    known = set()
    for cell in (cell for table in TABLES for cell in load(table).cells):
        config = cell.config
        space = make_space(config.genome, facts_of(config.model.path), config.phases)
        check_baselines(config.phases, space)
        make_strategy(config, space, make_schedule(config))
        known |= {task.name for task in config.tasks} | set(config.final.held_out)
    assert all(name.startswith("eep/") for name in known)
    for name in known:
        assert name.endswith("-ood") or load_task(name).splits.keys() >= {"search", "dev", "test"}


def test_they_are_what_the_paper_compares() -> None:
    cells = {(cell.task, cell.budget, cell.method): cell for cell in load("table-1").cells}
    assert len(cells) == 7 * 2 * 6
    drawn = cells["eep/wic", "2 of 8", "random"].config
    assert drawn.phases[0].evaluations == drawn.final.random_baselines == 30
    both = cells["eep/wic", "2 of 8", "EEP, prune + merge"].config
    assert cells["eep/wic", "2 of 8", "EEP, prune only"].config.phases == both.phases[:1]
    groups = {cell.method: section_of(cell).groups for cell in load("table-13").cells}
    assert groups["NAEE"] == groups["EEP, prune only, 32 groups"] == "per_layer"
    assert groups["EEP, prune only"] == groups["EEP, prune + merge"] == 4
    spaces = {cell.method: section_of(cell) for cell in load("table-3").cells}
    assert [(each.experts, each.active, each.dynamic_skipping) for each in spaces.values()] == [
        *((8, 1, False), (8, None, True), (8, 1, False)),
        *((4, 1, False), (4, None, True), (4, 1, False)),
    ]
    (tuned,) = {(section_of(cell).experts, section_of(cell).active) for cell in load("table-9").cells}
    assert tuned == (8, None)


PUBLISHED_LIMIT = 2048
"""Tokens of a prompt and its answer together, the authors' `max_seq_len`."""


@pytest.mark.parametrize("table", TABLES)
def test_its_settings_are_the_authors(table: str) -> None:
    """A window is a round of its workers, a long prompt loses its beginning, and baselines measure on all rows."""
    for cell in load(table).cells:
        config, section = cell.config, section_of(cell)
        assert config.window == config.workers.count and config.window <= 5
        assert not rounds_notes(config), "phases have rounds enough"
        engine, longest = config.engine, max(load_task(task.name).max_new_tokens for task in config.tasks)
        assert engine.max_prompt_tokens is not None
        assert engine.max_prompt_tokens + longest <= PUBLISHED_LIMIT
        assert section.calibration_tokens == "all"


def on_tiny(tiny: Any, table: str, *overrides: str) -> Study:
    """A study on the tiny model of four experts."""
    task = f"tasks=[{{name: {tiny.task}, counts: {{search: 20, dev: 10}}}}]"
    model = f"base.model={{path: {tiny.model}, device: cpu}}"
    return load(table, model, task, "base.genome={experts: 4, groups: 2}", "base.engine={}", *overrides)


def scores(study: Study, folder: Path) -> dict[tuple[str, str], float | None]:
    """Of every row on `test`, by budget and method."""
    with Store.open(f"sqlite:///{folder / 'store.db'}") as store:
        outcomes = run_study(study, store, lambda place, cell: Observer(), local_pool)
        assert [outcome.failure for outcome in outcomes] == [None] * len(outcomes)
        rows = study_rows(outcomes, store)
    return {(row.budget, row.method): score.score for row in rows if (score := row.score("test"))}


def test_figure_3_is_the_model_with_other_numbers_of_active_experts(tiny: Any, tmp_path: Path) -> None:
    """Against `transformers` with that number in the model's config."""
    found = scores(
        on_tiny(tiny, "figure-3", "budgets={1 active: {genome.active: 1}, 4 active: {genome.active: 4}}"), tmp_path
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny.model)
    examples = prepare_split(load_task(str(tiny.task)), "test").examples
    letters = tokenizer.convert_tokens_to_ids(list(examples[0].choices))
    for active in (1, 4):
        model: Any = AutoModelForCausalLM.from_pretrained(tiny.model, num_experts_per_tok=active)
        right = 0
        for example in examples:
            ids = torch.tensor([[1, *tokenizer(example.prompt, add_special_tokens=False).input_ids]])
            with torch.no_grad():
                logits = model(ids).logits[0, -1, letters]
            right += example.choices[int(logits.argmax())] in example.references
        assert found[f"{active} active", "unpruned"] == pytest.approx(right / len(examples))
