"""Whole searches with aligned experts, in this process: calibrated, run, repeated, resumed, evaluated, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dense_lab import local_cache, population, search
from local_workers import calibrate
from search_samples import continuous, eep_space

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import Split
from moevolve.search.config.files import load_run_config
from moevolve.search.config.run import RunConfig
from moevolve.search.loop.final import Finaliser
from moevolve.search.loop.standings import standings
from moevolve.search.running.calibration import calibrated_setup
from moevolve.search.running.set_up import set_up
from moevolve.search.service.evaluate import evaluate_subject
from moevolve.search.service.export import export_coefficients, export_individual
from moevolve.search.service.launch import register
from moevolve.search.service.resume import set_up_stored
from moevolve.search.service.subject import find_subject
from moevolve.store.repository import Store
from moevolve.workers.messages import EvaluationRequest
from moevolve.workers.methods.base import Edit, IdentityEdit
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.worker import EvaluationWorker

GENOME = {"kind": "eep", "experts": 2, "groups": 2}


def config(tiny: Any, folder: Path, name: str, **genome: Any) -> RunConfig:
    return load_run_config(tiny.write_run(folder / f"{name}.yaml", name, genome=GENOME | genome, engine={}))


def never(*arguments: Any) -> bytes:
    raise AssertionError("the calibration is stored")


def launched(run: RunConfig, store: Store, stop: int | None = None) -> None:
    setup = set_up(run, f"{run.name}-1")
    register(setup, store)
    setup = calibrated_setup(setup, store, calibrate)
    if stop is None:
        search(setup, store)
        return
    with pytest.raises(KeyboardInterrupt):
        search(setup, store, stop)
    search(calibrated_setup(set_up_stored(store, run.name), store, never), store)


@pytest.fixture(scope="module")
def run(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return config(tiny, tmp_path_factory.mktemp("aligned"), "aligned", align="hungarian")


@pytest.fixture(scope="module")
def store(run: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Store.open(f"sqlite:///{tmp_path_factory.mktemp('stores') / 'whole.db'}") as opened:
        launched(run, opened)
        yield opened


def first_merge(store: Store) -> str:
    for row in store.history("aligned-1"):
        subject = find_subject(store, f"aligned:{row.index}")
        assert isinstance(subject.edit, EepEdit)
        if subject.edit.alignment is not None:
            return f"aligned:{row.index}"
    raise AssertionError("nothing was merged")


def test_a_resumed_search_gives_the_same_population(run: RunConfig, store: Store, tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'interrupted.db'}") as other:
        launched(run, other, stop=17)
        assert population(other, "aligned-1") == population(store, "aligned-1")
        assert len(population(other, "aligned-1")) == 24


def test_pruning_individuals_are_those_of_a_search_without_alignment(
    tiny: Any, run: RunConfig, store: Store, tmp_path: Path
) -> None:
    plain = config(tiny, tmp_path, "plain")
    assert plain.config_hash != run.config_hash
    with Store.open(f"sqlite:///{tmp_path / 'plain.db'}") as other:
        launched(plain, other)
        ours, theirs = store.history("aligned-1"), other.history("plain-1")
    pruned = [row.index for row in ours if row.phase == "prune"]
    for index in pruned:
        assert (ours[index].phenotype_hash, ours[index].fitness, ours[index].tie_break) == (
            theirs[index].phenotype_hash,
            theirs[index].fitness,
            theirs[index].tie_break,
        )
    merged = {row.phenotype_hash for row in ours[len(pruned) :] if ", aligned" in summary(store, row.index)}
    assert len(merged) > 3 and not merged & {row.phenotype_hash for row in theirs}


def alone(run: RunConfig, edit: Edit, split: Split) -> tuple[float, float]:
    """Score and gold log-probability on a worker that has run nothing else."""
    splits = set_up(run, "any").prepared[split]
    worker = EvaluationWorker(run.model, run.engine)
    reply = worker.evaluate(EvaluationRequest(edit, tuple(item.ref for item in splits)), splits)
    (found,) = reply.results.values()
    return found.score, found.gold_logprob


def summary(store: Store, index: int) -> str:
    return store.individual(f"aligned:{index}").individual.summary


def test_stored_individuals_are_evaluated_and_exported_as_they_were_searched(
    run: RunConfig, store: Store, tmp_path: Path
) -> None:
    reference = first_merge(store)
    subject = find_subject(store, reference)
    assert subject.detail is not None
    assert subject.edit.phenotype_hash == subject.detail.individual.phenotype_hash
    assert subject.detail.individual.summary.endswith(", aligned")
    record = evaluate_subject(store, subject, run.tasks[0].name, "test")
    assert record.failure is None and record.score is not None
    one = subject.detail.individual
    assert alone(run, subject.edit, "search") == (one.fitness, one.tie_break)
    report = export_individual(store, reference, tmp_path / "out")
    assert report.agreement.holds and report.experts == 2
    with pytest.raises(UserError, match=r"neurons aligned, which a coefficient file can't say"):
        export_coefficients(store, reference, tmp_path / "file.pth")
    export_coefficients(store, "aligned:0", tmp_path / "file.pth")
    assert (tmp_path / "file.pth").is_file()


def test_the_end_of_a_search_scores_both_kinds_alike(run: RunConfig, store: Store) -> None:
    """Re-ranking and the final table mix pruned, merged and unedited models on one worker."""
    setup = calibrated_setup(set_up_stored(store, run.name), store, never)
    record = store.search("aligned")
    cache = local_cache(setup, store)
    Finaliser(setup, store, cache).run()
    winner = standings(store, record, store.history(record.id)).winner
    assert winner is not None
    references = [winner, first_merge(store), "aligned:0"]
    edits = [IdentityEdit(), *(find_subject(store, reference).edit for reference in references)]
    for item in cache.settle([EvaluationRequest(edit, setup.splits("dev")) for edit in edits]):
        (found,) = item.evaluations
        assert (found.score, found.gold_logprob) == alone(run, item.request.edit, "dev")


def test_an_unknown_value_is_refused(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"genome\.align: Input should be 'none' or 'hungarian'"):
        config(tiny, tmp_path, "wrong", align="greedy")


def test_only_aligned_spaces_need_a_calibration() -> None:
    assert eep_space().recipe is None
    space = eep_space(align="hungarian")
    assert space.recipe is not None and space.recipe.tokens > 0
    merged, pruned = continuous(space), space.from_kept(np.arange(4)[None].repeat(4, axis=0))
    assert space.describe(merged).summary.endswith(", aligned")
    assert space.describe(pruned).summary == eep_space().describe(pruned).summary
    with pytest.raises(AssertionError, match="calibrated"):
        merged.express()


def test_alignment_and_baselines_are_measured_together(tiny: Any, tmp_path: Path) -> None:
    phases = [{"kind": "merge", "evaluations": 6, "init": ["hc_smoe", "random"], "initial": 4, "sigma": 0.2}]
    path = tiny.write_run(
        tmp_path / "both.yaml", "both", genome=GENOME | {"align": "hungarian"}, engine={}, phases=phases
    )
    with Store.open(f"sqlite:///{tmp_path / 'both.db'}") as store:
        launched(load_run_config(path), store)
        first = find_subject(store, "both:0")
        assert isinstance(first.edit, EepEdit) and first.edit.alignment is not None
        assert first.detail is not None
        assert first.edit.phenotype_hash == first.detail.individual.phenotype_hash
        assert first.space.calibration.tokens_run > 0
