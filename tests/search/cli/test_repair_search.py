"""Whole searches that repair: run, resumed, repeated with shortcuts off; and their individuals through all commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from commands_here import run_command
from dense_lab import dense_run
from local_workers import Step, interrupted_after, local_pool, plainly
from report_lab import DENSE, finished

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task
from moevolve.search.config.files import load_run_config
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.repaired import RepairedGenome, base_genome
from moevolve.search.interface.individuals import AnalyseRequest
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.local import LocalPool
from moevolve.search.pools.ray_pool import RayPool
from moevolve.search.running.candidates import find_candidate
from moevolve.search.running.execute import execute, ray_pool
from moevolve.search.running.observer import Observer
from moevolve.search.running.resume import set_up_stored
from moevolve.search.running.set_up import set_up
from moevolve.store.repository import Store
from moevolve.workers.methods.repair import fits as repair_fits
from moevolve.workers.methods.repair.fit_cache import FitCache
from moevolve.workers.worker import EvaluationWorker

TOKENS = 200
PRUNED, MERGED, TOTAL = 4, 7, 12
PHASES: list[dict[str, Any]] = [
    {
        "kind": "prune",
        "evaluations": PRUNED,
        "initial": 3,
        "init": ["reap", "random"],
        "repair": {"ridge_lambdas": [0.01, 0.3], "tokens": TOKENS},
    },
    {
        "kind": "merge",
        "evaluations": MERGED - PRUNED,
        "sigma": 0.2,
        "repair": {"tokens": TOKENS // 2, "neurons": True},
    },
    {
        "kind": "repair",
        "evaluations": TOTAL - MERGED,
        "repair": {"ridge_lambdas": [0.1], "tokens": TOKENS},
    },
]
DIVIDED, MIXED = ({"kind": kind, **DENSE[kind]} for kind in ("factorllm", "nanomoe"))
GENOME = {"kind": "eep", "experts": 2, "groups": 4, "router_space": "logits"}


def written(tiny: Any, folder: Path, **changes: Any) -> Path:
    """A search that repairs in every phase, for agreement with the full model."""
    settings = {
        "tasks": [f"{tiny.task}@kl"],
        "phases": PHASES,
        "genome": GENOME,
        "final": {"rerank": 2, "random_baselines": 0},
    }
    path: Path = tiny.write_run(folder / "run.yaml", "mended", **(settings | changes))
    return path


@pytest.fixture(scope="module")
def run(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return load_run_config(written(tiny, tmp_path_factory.mktemp("mended")))


@contextmanager
def counted_fits() -> Iterator[list[None]]:
    """A list that grows with every layer that is fitted in a `with` block."""
    fits: list[None] = []
    fit_ridge = repair_fits.fit_ridge

    def counted(*arguments: Any) -> Any:
        fits.append(None)
        return fit_ridge(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repair_fits, "fit_ridge", counted)
        yield fits


@pytest.fixture(scope="module")
def folder(run: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `moevolve.db` has the search, finished in this process by one worker."""
    folder = tmp_path_factory.mktemp("store")
    with Store.open(f"sqlite:///{folder / 'moevolve.db'}") as store, counted_fits() as fits:
        finished(store, run)
    (folder / "fits").write_text(str(len(fits)))
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path, run: RunConfig, snapshot: Any) -> Any:
    """What the store holds: taken before any command adds to it."""
    return snapshot(folder / "moevolve.db", run.name)


@pytest.fixture(scope="module")
def best(folder: Path, expected: Any) -> str:
    """A repaired individual."""
    (row,) = json.loads(run_command(folder, "best", "--task", "pick@kl", "--json", "--limit", "1").stdout)
    assert "repaired" in row["summary"] and row["dev_score"] is not None
    return str(row["ref"])


def test_every_phase_repairs_as_it_says(folder: Path, expected: Any) -> None:
    with Store.open(f"sqlite:///{folder / 'moevolve.db'}") as store:
        rows = store.history(store.search("mended").id)
        subjects = [find_candidate(store, f"mended:{row.index}") for row in rows]
    assert len(rows) == TOTAL and all(row.status == "ok" for row in rows)
    stored = [subject.edit.phenotype_hash for subject in subjects]
    assert stored == [row.phenotype_hash for row in rows], "an edit can be made again of what is stored"
    assert rows[0].operator == "reap"
    genomes = [subject.genome for subject in subjects if isinstance(subject.genome, RepairedGenome)]
    settings = [genome.settings for genome in genomes]
    assert len(settings) == TOTAL
    assert all(each.neurons and each.tokens == TOKENS // 2 for each in settings[PRUNED:MERGED])
    assert {each.ridge_lambdas for each in settings[MERGED:]} == {(0.1,)}
    for row, genome in zip(rows[MERGED:], genomes[MERGED:], strict=True):
        assert row.operator == "repair" and row.depth > 0
        assert base_genome(genome) == base_genome(genomes[row.parents[0]])
    assert len({row.fitness for row in rows}) > 4


def test_layers_in_common_are_fitted_once_and_change_nothing(
    run: RunConfig, folder: Path, expected: Any, snapshot: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(FitCache, "get", lambda *_: None)
    with Store.open(f"sqlite:///{tmp_path / 'anew.db'}") as store, counted_fits() as fits:
        finished(store, run)
    assert snapshot(tmp_path / "anew.db", "mended") == expected
    assert int((folder / "fits").read_text()) < 0.8 * len(fits)


def test_two_workers_that_take_turns_and_a_resume_among_repairs_change_nothing(
    run: RunConfig, expected: Any, snapshot: Any, tmp_path: Path
) -> None:
    """They take turns; what they get and give is copied as it is between processes."""

    def copied(message: Any) -> Any:
        return ray.cloudpickle.loads(ray.cloudpickle.dumps(message))

    def pool(setup: SearchSetup, step: Step = plainly) -> LocalPool:
        config = setup.config
        workers = cycle([EvaluationWorker(config.model, config.engine) for _ in range(2)])
        both: Any = SimpleNamespace(evaluate=lambda asked, splits: next(workers).evaluate(copied(asked), splits))
        return local_pool(setup, lambda _, asked, splits: copied(step(both, asked, splits)))

    with Store.open(f"sqlite:///{tmp_path / 'two.db'}") as store:
        with pytest.raises(KeyboardInterrupt):
            finished(store, run, partial(pool, step=interrupted_after(MERGED + 3)))
        assert store.search("mended").status == "interrupted"
        rows = store.history(store.search("mended").id)
        assert MERGED < sum(row.status == "ok" for row in rows) < TOTAL
        execute(set_up_stored(store, "mended"), store, Observer(), pool)
    assert snapshot(tmp_path / "two.db", "mended") == expected


@pytest.mark.slow
def test_workers_that_read_layers_for_several_candidates_change_nothing(
    run: RunConfig,
    expected: Any,
    snapshot: Any,
    ray_address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two workers on Ray, with experts on the disk."""
    model = replace(run.model, expert_offload="disk")
    section = run.workers.model_copy(update={"count": 2, "num_cpus": 1, "address": ray_address})
    changed = run.model_copy(update={"model": model, "workers": section})
    sizes: list[int] = []
    form = RayPool._round

    def counted(*arguments: Any) -> Any:
        found = form(*arguments)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(RayPool, "_round", counted)
    try:
        with Store.open(f"sqlite:///{tmp_path / 'rounds.db'}") as store:
            finished(store, changed, ray_pool)
    finally:
        ray.shutdown()
    assert max(sizes) > 1
    assert snapshot(tmp_path / "rounds.db", "mended") == expected


def test_listings_say_how_it_is_repaired(best: str, folder: Path) -> None:
    def said(*arguments: str) -> str:
        done = run_command(folder, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    last = f"mended:{TOTAL - 1}"
    assert "repaired, " in said("show", best) and "repaired" in said("lineage", last)
    assert "ridge lambda" in said("show", best, "--genome")
    outline = json.loads(said("show", best, "--genome", "--json"))
    assert len(outline["layers"]) > 1 and all(len(layer["experts"]) == 2 for layer in outline["layers"])
    assert {"repair"} < {node["operator"] for node in json.loads(said("lineage", last, "--json"))["nodes"]}
    said("report", "mended", "-o", "page.html")
    page = (folder / "page.html").read_text()
    assert "repaired, " in page and best in page


def test_usage_is_that_of_what_is_repaired(expected: Any, folder: Path, tiny: Any) -> None:
    """Repairs without neurons change nothing before the first layer's experts have answered, and everything behind."""
    last = f"mended:{TOTAL - 1}"
    with Store.open(f"sqlite:///{folder / 'moevolve.db'}") as store:
        found = AnalyseRequest(last, task=str(tiny.task)).answer(store)
        subject = find_candidate(store, last)
    assert isinstance(subject.genome, RepairedGenome)
    worker = EvaluationWorker(subject.config.model, subject.config.engine)
    split = prepare_split(load_task(str(tiny.task)), found.split)
    plain = worker.analyse(base_genome(subject.genome).express(), split)
    alike = [
        np.array_equal(one.weights, other.weights) for one, other in zip(found.after.routed, plain.routed, strict=True)
    ]
    assert alike == [True, False, False, False]


def test_an_export_says_how_it_is_repaired(folder: Path, expected: Any, tmp_path: Path) -> None:
    """Logits are compared by `export` itself."""
    name, target = f"mended:{TOTAL - 1}", tmp_path / "out"
    done = run_command(folder, "export", name, target, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["form"] == "stock" and report["experts"] == 2 and report["agreement"] is not None
    card = (target / "README.md").read_text()
    assert name in card and "ridge regression of output projections" in card


def test_what_a_kind_can_not_have_is_refused_before_anything_runs(tiny: Any, tmp_path: Path) -> None:
    tune = {"kind": "tune", "evaluations": 8, "initial": 4}
    for genome, phases, message in (
        (MIXED, [tune | {"repair": {}}], r"phases\.0\.repair.*genome kind nanomoe can't be repaired"),
        (MIXED, [tune, {"kind": "repair", "evaluations": 8}], r"phases\.1\.repair.*nanomoe can't be repaired"),
        (
            DIVIDED,
            [tune | {"repair": {"neurons": True}}],
            r"phases\.0\.repair.*only experts of a mixture can be filled",
        ),
    ):
        run = RunConfig.model_validate(dense_run(tiny, tmp_path, genome, "dense").model_dump() | {"phases": phases})
        with pytest.raises(UserError, match=message):
            set_up(run, "dense-1")


def test_dense_kinds_are_repaired_without_neurons(tiny: Any, tmp_path: Path) -> None:
    plain = dense_run(tiny, tmp_path, DIVIDED, "dense")
    phases = [
        {"kind": "tune", "evaluations": 3, "initial": 3, "repair": {"tokens": 100}},
        {"kind": "repair", "evaluations": 3, "repair": {"tokens": TOKENS}},
    ]
    final = {"rerank": 0, "test": False}
    run = RunConfig.model_validate(plain.model_dump() | {"phases": phases, "final": final})
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        finished(store, run)
        rows = store.history(store.search("dense").id)
        assert [row.status for row in rows] == ["ok"] * 6 and rows[0].operator == "start"
        for row in rows:
            genome = find_candidate(store, f"dense:{row.index}").genome
            assert isinstance(genome, RepairedGenome) and not genome.settings.neurons


def test_what_is_wrong_is_said_in_a_line(tiny: Any, in_process: Any, tmp_path: Path) -> None:
    mending: dict[str, Any] = {"kind": "repair", "evaluations": 2}
    for phases, message in (
        ([PHASES[0], mending, PHASES[1]], "phases: a repair phase repairs what others found"),
        ([PHASES[0] | {"repair": {"tolkens": 9}}], "phases.0.repair.tolkens: unknown key"),
    ):
        done = in_process("launch", written(tiny, tmp_path, phases=phases))
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "moevolve.db").exists()
