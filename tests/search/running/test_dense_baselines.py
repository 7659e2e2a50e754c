"""Comparisons of genome kinds for dense models: their baselines, plain and repaired."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from dense_lab import dense_run
from local_workers import local_pool

from moevolve.evaluators.errors import UserError
from moevolve.search.config.study import load_study
from moevolve.search.genomes.registry import KINDS
from moevolve.search.results.study import StudyRow, study_rows
from moevolve.search.running.observer import Observer
from moevolve.search.running.study import run_study
from moevolve.store.repository import Store

GENOMES = {
    "tomoe": {"kind": "tomoe", "experts": 4, "budget": 0.5, "attention": False},
    "factorllm": {"kind": "factorllm", "experts": 8, "active": 4},
    "nanomoe": {"kind": "nanomoe", "variant": "I", "blocks": 2, "rank": 5, "fit_to": "outputs"},
}
DENSE = [("tomoe", "random"), *((kind, name) for kind in GENOMES for name in ("start", *KINDS[kind].baselines))]
REPAIRED = [("tomoe", "flap"), ("factorllm", "start")]


def write(tiny: Any, folder: Path, methods: dict[str, Any]) -> Path:
    model = dense_run(tiny, folder, {"kind": "nanomoe", "rank": 2}, "unused").model
    base = {
        "model": {"path": model.path, "device": "cpu"},
        "tasks": [str(tiny.task)],
        "genome": GENOMES["tomoe"],
        "phases": [{"kind": "tune", "evaluations": 5, "initial": 4}],
        "final": {"rerank": 1, "random_baselines": 2},
        "store": f"sqlite:///{folder / 'store.db'}",
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({"name": "dense", "base": base, "methods": methods}, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def compared(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, list[StudyRow]]:
    """All dense baselines, one of each kind that can be also repaired, and a search with a baseline among its first."""
    methods: dict[str, Any] = {}
    for kind, name in DENSE:
        methods[f"{kind} {name}"] = {"baseline": name, "genome": GENOMES[kind]}
        if (kind, name) in REPAIRED:
            methods[f"{kind} {name} repaired"] = {**methods[f"{kind} {name}"], "repair": {"tokens": 120}}
    methods["search"] = {"phases.0.init": ["flap", "start", "saliency"], "final.random_baselines": 0}
    folder = tmp_path_factory.mktemp("dense")
    study = load_study(write(tiny, folder, methods))
    store = Store.open(study.store)
    outcomes = run_study(study, store, lambda place, cell: Observer(), local_pool)
    return store, study_rows(outcomes, store)


def test_every_baseline_has_a_row_at_the_asked_for_size(compared: tuple[Store, list[StudyRow]]) -> None:
    store, rows = compared
    for kind, name in DENSE:
        own = [row for row in rows if row.method.startswith(f"{kind} {name}")]
        assert len(own) == 1 + ((kind, name) in REPAIRED) and all(row.baseline and row.failure is None for row in own)
        assert len({row.active_parameters for row in own}) == 1, "a repair changes no size"
        for row in own:
            for ref in row.refs:
                individual = store.individual(ref).individual
                assert individual.operator == name
                assert ("repaired" in individual.summary) == ("repaired" in row.method)
    sizes = {kind: {row.active_parameters for row in rows if row.method.startswith(kind)} for kind in GENOMES}
    # Half of the networks, and routers, whose number doesn't depend on the baseline.
    assert [len(each) for each in sizes.values()] == [1, 1, 1]


def test_searches_begin_with_what_they_name_and_are_tested_against_the_best_baseline_of_dev(
    compared: tuple[Store, list[StudyRow]],
) -> None:
    store, rows = compared
    history = store.history(store.search("dense.search.s0").id)
    assert [row.operator for row in history[:4]] == ["flap", "start", "saliency", "random"]
    assert {row.contestant for row in rows if row.method == "search"} >= {"unsearched start", "best found"}
    scored = [row for row in rows if row.baseline and "random" not in row.method]
    best = max(scored, key=lambda row: row.score("dev").score)  # type: ignore[union-attr, arg-type, return-value]
    (found,) = (row for row in rows if row.method == "search" and row.contestant == "best found")
    assert found.against_baseline is not None and found.best_by == "dev"
    assert found.against_baseline.against == best.method


def test_baselines_of_another_kind_are_refused(tiny: Any, tmp_path: Path) -> None:
    low_rank = {"baseline": "low_rank", "genome": GENOMES["nanomoe"], "repair": True}
    for method, message in (
        ({"baseline": "cmoe"}, "baseline: cmoe is unknown; there are random, start, saliency, flap"),
        (low_rank, "candidates of genome kind nanomoe can't be repaired"),
    ):
        path = write(tiny, tmp_path, {"a": method})
        with Store.open("sqlite://") as store, pytest.raises(UserError, match=message):
            run_study(load_study(path), store, lambda place, cell: Observer(), local_pool)
