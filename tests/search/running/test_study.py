from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import chain, product, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from local_workers import interrupted_after, local_pool, plainly
from replies import loss

import moevolve
from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.cli.output.study import write_markdown
from moevolve.search.config.study import Study, load_study
from moevolve.search.loop.final_table import BEST_LABEL, FULL_LABEL
from moevolve.search.loop.scores import Score
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.loop.significance import TaskOutcomes
from moevolve.search.pools.local import Evaluator, LocalPool
from moevolve.search.results.study import StudyRow, study_rows, with_tests
from moevolve.search.running.observer import Observer
from moevolve.search.running.study import run_study
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest
from moevolve.workers.methods.repair.edit import RepairSettings


def write(tiny: Any, folder: Path, **changes: Any) -> Path:
    """A study of two budgets and three methods on the tiny model, with two seeds."""
    base = tiny.run_data("unused")
    del base["name"]
    base["phases"] = [{"kind": "prune", "evaluations": 5, "initial": 4}, {"kind": "merge", "evaluations": 2}]
    base["final"] = {"rerank": 2, "random_baselines": 3}
    data = {
        "name": "both",
        "base": base,
        "budgets": {"2 of 4": {"genome.experts": 2}, "3 of 4": {"genome.experts": 3}},
        "methods": {
            "random": {"baseline": "random"},
            "reap": {"baseline": "reap"},
            "prune": {"phases": [{"kind": "prune", "evaluations": 5, "initial": 4}]},
        },
        "seeds": [0, 1],
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(data | changes, sort_keys=False))
    return path


def no_pool(setup: SearchSetup) -> LocalPool:
    raise AssertionError(f"{setup.config.name} starts workers")


def run(study: Study, store: Store, make: Any = local_pool) -> list[StudyRow]:
    outcomes = run_study(study, store, lambda place, cell: Observer(), make)
    return study_rows(outcomes, store)


def test_cells_are_all_combinations_in_order(tiny: Any, tmp_path: Path) -> None:
    methods = {
        "reap": {"baseline": "reap"},
        "prune": {"phases": [{"kind": "prune", "evaluations": 9, "initial": 4}]},
        "whole": None,
    }
    path = write(tiny, tmp_path, tasks=[str(tiny.task), f"{tiny.task}@kl"], methods=methods)
    study = load_study(path, ("base.window=3", "methods.prune.phases.0.evaluations=5"))
    names = [cell.config.name for cell in study.cells]
    assert len(set(names)) == len(names) == 2 * 2 * 3 * 2
    labels = [(cell.task, cell.budget, cell.method, cell.config.seed) for cell in study.cells]
    assert labels == list(product((str(tiny.task), f"{tiny.task}@kl"), ("2 of 4", "3 of 4"), methods, (0, 1)))
    for cell in study.cells:
        assert cell.config.window == 3
        assert cell.config.genome.experts == int(cell.budget[0])  # type: ignore[union-attr]
        assert [task.name for task in cell.config.tasks] == [cell.task]
        assert cell.baseline == (cell.method == "reap")
        phases = [(phase.kind, phase.evaluations) for phase in cell.config.phases]
        known = {"reap": [("prune", 1)], "prune": [("prune", 5)], "whole": [("prune", 5), ("merge", 2)]}
        assert phases == known[cell.method]


def test_baselines_are_compared_as_they_are_repaired_and_with_experts_skipped(tiny: Any, tmp_path: Path) -> None:
    """Methods that measure, each something else, between others that don't: the workers start once."""
    skips = {"genome.dynamic_skipping": True, "genome.calibration_tokens": "all"}
    methods: dict[str, Any] = {
        "reap": {"baseline": "reap", "repair": False},
        "reap repaired": {"baseline": "reap", "repair": True},
        "random repaired": {"baseline": "random", "repair": {"tokens": 60}},
        "NAEE": {"baseline": "naee"},
        "NAEE + Dyn": {"baseline": "naee"} | skips,
        "Dyn": {"baseline": "identity", "genome.experts": 4} | skips,
    }
    path = write(tiny, tmp_path, methods=methods, budgets={"2 of 4": {"genome.experts": 2}}, seeds=[0])
    study, started = load_study(path), list[LocalPool]()
    found = {cell.method: cell.config.phases[0].repair for cell in study.cells}
    assert [*found.values()] == [None, RepairSettings(), RepairSettings(tokens=60), None, None, None]

    def make(setup: SearchSetup) -> LocalPool:
        started.append(local_pool(setup))
        return started[-1]

    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        rows = {row.method: row for row in run(study, store, make)}
        individuals = {name: store.individual(row.refs[0]).individual for name, row in rows.items() if row.refs}
    assert len(started) == 1 and not any(row.failure for row in rows.values())
    assert "draws" in rows["random repaired"].contestant
    assert individuals.keys() == {*methods} - {"random repaired"}
    for name, one in individuals.items():
        assert ("repaired" in name, "Dyn" in name) == ("repaired" in one.summary, "skipped" in one.summary)
        assert one.experts == (4 if name == "Dyn" else 2)
    ours, theirs = individuals["reap"], individuals["reap repaired"]
    assert theirs.summary.startswith(f"{ours.summary}, repaired, lambda ")
    assert ours.phenotype_hash != theirs.phenotype_hash and ours.parameters == theirs.parameters
    assert individuals["NAEE"].content_hash == individuals["NAEE + Dyn"].content_hash
    assert len({individuals[name].phenotype_hash for name in ("NAEE", "NAEE + Dyn", "Dyn")}) == 3


def test_a_base_may_begin_with_a_run_of_another_folder(tiny: Any, tmp_path: Path) -> None:
    whole = load_study(write(tiny, tmp_path))
    base = yaml.safe_load((tmp_path / "study.yaml").read_text())["base"]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run.yaml").write_text(yaml.safe_dump(base | {"window": 1, "final": {"rerank": 2}}))
    own = {"from": "runs/run.yaml", "window": base["window"], "final": {"random_baselines": 3}}
    assert load_study(write(tiny, tmp_path, base=own)) == whole


def test_errors_name_the_setting(tiny: Any, tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"metods": {}}, "metods: unknown key"),
        ({"seeds": []}, "seeds: "),
        ({"methods": {"a": {"phases.7.sigma": 2}}}, "2 of 4 / a: phases has no entry '7'"),
        ({"methods": {"a+b": {}, "a b": {}}}, "two labels give the same name both.2-of-4.a-b.s0"),
        ({"methods": {"a": {"baseline": "repa"}}}, "2 of 4 / a: baseline: repa is unknown; there are random"),
        ({"methods": {"a": {"repair": True}}}, "2 of 4 / a: repair: it goes with a baseline; a search has `repair`"),
        ({"base": "nowhere.yaml"}, "nowhere.yaml: no such file"),
        ({"base": {"from": 3}}, "from: unknown key"),
    ]
    for changes, message in wrong:
        with pytest.raises(UserError) as caught:
            load_study(write(tiny, tmp_path, **changes))
        assert message in str(caught.value)


def test_nothing_is_recorded_when_a_cell_cannot_run(tiny: Any, tmp_path: Path) -> None:
    path = write(tiny, tmp_path, budgets={"fine": {}, "too many": {"genome.experts": 9}})
    with Store.open("sqlite://") as store:
        with pytest.raises(UserError, match="experts"):
            run(load_study(path), store, no_pool)
        assert store.searches() == []


@pytest.fixture(scope="module")
def finished(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path, list[StudyRow]]:
    folder = tmp_path_factory.mktemp("study")
    study = load_study(write(tiny, folder))
    with Store.open(f"sqlite:///{folder / 'store.db'}") as store:
        return study, folder, run(study, store)


def test_rows_agree_with_the_store(finished: tuple[Study, Path, list[StudyRow]]) -> None:
    _, folder, rows = finished
    per_budget = [FULL_LABEL, "random", "reap", "prune", "prune"]
    assert [row.method for row in rows] == per_budget * 2
    with Store.open(f"sqlite:///{folder / 'store.db'}") as store:
        for row in rows:
            assert row.failure is None
            assert (row.against_full is None) == (row.method == FULL_LABEL or "draws" in row.contestant)
            if row.contestant != BEST_LABEL:
                continue
            assert len(row.refs) == row.seeds == 2
            details = [store.individual(ref) for ref in row.refs]
            for split in ("search", "dev", "test"):
                scores = [each.score for detail in details for each in detail.evaluations if each.split == split]
                measured = row.score(split)  # type: ignore[arg-type]
                assert measured is not None and len(scores) == 2
                assert measured.score == pytest.approx(np.mean(scores))
                assert measured.spread == pytest.approx(np.std(scores, ddof=1))
                assert measured.low is not None and measured.high is not None
                assert measured.low <= measured.score <= measured.high
            if row.baseline:
                assert [detail.individual.operator for detail in details] == ["reap", "reap"]
                assert row.evaluations == 1 and row.against_baseline is None
            evaluated = [len({each.phenotype_hash for each in store.history(detail.search.id)}) for detail in details]
            assert row.evaluations == np.mean(evaluated)
            assert row.seconds > 0


def test_a_finished_study_starts_no_workers_and_refuses_other_settings(
    finished: tuple[Study, Path, list[StudyRow]],
) -> None:
    study, folder, rows = finished
    changed = load_study(folder / "study.yaml", ("base.window=2",))
    with Store.open(f"sqlite:///{folder / 'store.db'}") as store:
        assert run(study, store, no_pool) == rows
        with pytest.raises(UserError, match=r"both\.2-of-4\.random\.s0 is in the store with other settings"):
            run(changed, store, no_pool)


def test_an_interrupted_study_continues(finished: tuple[Study, Path, list[StudyRow]], tmp_path: Path) -> None:
    study = replace(finished[0], cells=tuple(cell for cell in finished[0].cells if cell.budget == "2 of 4"))
    rows = [row for row in finished[2] if row.budget == "2 of 4"]

    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        with pytest.raises(KeyboardInterrupt):
            run(study, store, partial(local_pool, step=interrupted_after(12)))
        states = [each.search.status for each in store.searches()]
        assert "interrupted" in states and "created" in states
        again = run(study, store)
    assert [replace(row, seconds=0) for row in again] == [replace(row, seconds=0) for row in rows]


def test_a_search_that_fails_stops_no_other(tiny: Any, tmp_path: Path) -> None:
    methods = {"random": {"baseline": "random"}, "reap": {"baseline": "reap"}}
    study = load_study(write(tiny, tmp_path, budgets={"one": {}}, methods=methods, seeds=[0]))
    steps = chain([lambda worker, request, splits: loss(request, "worker", "broken")], repeat(plainly))

    def first_fails(setup: SearchSetup) -> LocalPool:
        return local_pool(setup, next(steps))

    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        rows = run(study, store, first_fails)
    failures = {row.method: row.failure for row in rows}
    assert "the unedited model can't be evaluated: broken" in str(failures.pop("random"))
    assert set(failures) == {FULL_LABEL, "reap"} and not any(failures.values())


def test_a_best_that_fails_on_test_has_no_score_there(tiny: Any, tmp_path: Path) -> None:
    path = write(tiny, tmp_path, budgets={"one": {}}, methods={"prune": {}})
    study = load_study(path, ("base.final.random_baselines=0",))
    left = [1]

    def breaking(worker: Evaluator, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
        kept = tuple(split for split in splits if split.split != "test")
        if isinstance(request.edit, IdentityEdit) or not left[0] or kept == splits:
            return worker.evaluate(request, splits)
        left[0] -= 1
        reply = worker.evaluate(replace(request, splits=tuple(split.ref for split in kept)), kept)
        failed_on = tuple(key for key in request.fingerprints if key not in reply.results)
        return replace(reply, failure="broken", failed_on=failed_on)

    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        rows = run(study, store, partial(local_pool, step=breaking))
        (best,) = (row for row in rows if (row.method, row.contestant) == ("prune", BEST_LABEL))
        scores = [
            each.score or 0.0 for ref in best.refs for each in store.individual(ref).evaluations if each.split == "test"
        ]
    assert len(scores) == 2 and 0.0 in scores
    found = best.score("test")
    assert found is not None and found.score == pytest.approx(np.mean(scores))
    assert found.low is not None and found.high is not None and found.low <= found.score <= found.high
    assert best.against_full is not None
    assert best.failure == "seed 0 on test: broken"


def test_tables_hold_every_row(finished: tuple[Study, Path, list[StudyRow]], tmp_path: Path) -> None:
    study, _, rows = finished
    write_markdown(study.name, rows, tmp_path / "rows.md")
    tables = [line for line in (tmp_path / "rows.md").read_text().splitlines() if line.startswith("|")]
    assert len(tables) == len(rows) + 2 * 2
    assert len({line.count("|") for line in tables}) == 1


def one_of(method: str, right: int, **scores: float) -> tuple[StudyRow, list[TaskOutcomes]]:
    """A row of a study: so many of 100 answers right on `test`, with every one of two seeds."""
    values = np.repeat((np.arange(100) < right)[None, :], 2, axis=0).astype(float)
    found = (*(Score("", split, score) for split, score in scores.items()), Score("", "test", right / 100))  # type: ignore[arg-type]
    baseline, outcomes = method.islower() and method != FULL_LABEL, [TaskOutcomes(values, "mean", 1.0, (0, 1))]
    return StudyRow("", "", method, BEST_LABEL, baseline, 2, found), outcomes


def test_the_best_baseline_is_picked_on_dev() -> None:
    full, search = one_of(FULL_LABEL, 90, search=0.9), one_of("Search", 80, search=0.8, dev=0.7)
    lucky, good = one_of("lucky", 75, search=0.8, dev=0.5), one_of("good", 60, search=0.6, dev=0.6)
    rows = with_tests([full, lucky, good, search])
    assert [row.against_baseline and row.against_baseline.against for row in rows] == ["good", "good", None, "good"]
    assert {row.best_by for row in rows} == {"dev"}
    # By hand: of 20 answers that one alone has right, all are the search's.
    assert rows[3].against_baseline is not None and rows[3].against_baseline.p == pytest.approx(2 * 0.5**20)
    assert rows[3].against_full is not None and rows[3].against_full.p == pytest.approx(2 * 0.5**10)
    unranked = replace(lucky[0], scores=tuple(score for score in lucky[0].scores if score.split != "dev"))
    rows = with_tests([full, (unranked, lucky[1]), good, search])
    assert rows[3].best_by == "search" and rows[3].against_baseline is not None
    assert rows[3].against_baseline.against == "lucky"


def test_a_model_that_failed_with_every_seed_is_not_tested() -> None:
    full, search = one_of(FULL_LABEL, 90, search=0.9), one_of("Search", 80, search=0.8)
    rows = with_tests([full, (one_of("failed", 0, search=0.0)[0], []), search])
    assert [row.against_full is None for row in rows] == [True, True, False]
    assert [row.against_baseline for row in rows] == [None, None, None]


def test_p_values_are_corrected_in_tables_and_raw_in_rows(tmp_path: Path) -> None:
    better = [one_of(f"Search {right}", right, search=0.8, dev=0.7) for right in (64, 66, 68)]
    rows = with_tests([one_of(FULL_LABEL, 90), one_of("good", 60, dev=0.6), *better])
    raw = {f"Search {right}": 2 * 0.5 ** (right - 60) for right in (64, 66, 68)}
    tests = {row.method: row.against_baseline.p for row in rows if row.against_baseline is not None}
    assert {name: tests[name] for name in raw} == pytest.approx(raw)
    write_markdown("some", rows, tmp_path / "rows.md")
    text = (tmp_path / "rows.md").read_text()
    headings, _, *body = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    shown = {cells[0]: cells[headings.index("p baseline (Holm)")] for cells in body}
    # Four tests in the column: the full model's is the smallest, then these from the last to the first.
    expected = {"Search 68": 3 * raw["Search 68"], "Search 66": 2 * raw["Search 66"], "Search 64": raw["Search 64"]}
    assert {name: shown[name] for name in raw} == {name: f"{p:.3f}" for name, p in expected.items()}


def test_the_command_runs_and_repeats(tiny: Any, worker_here: None, in_process: Any, tmp_path: Path) -> None:
    methods = {"reap": {"baseline": "reap"}, "prune": {"phases": [{"kind": "prune", "evaluations": 4, "initial": 4}]}}
    path = write(tiny, tmp_path, methods=methods, budgets={"2 of 4": {}}, seeds=[0])
    store = f"sqlite:///{tmp_path / 'store.db'}"
    first = in_process("study", str(path), "--store", store, "--json", "-o", str(tmp_path / "rows.md"))
    assert first.returncode == 0, first.stderr
    rows = json.loads(first.stdout)
    assert [row["method"] for row in rows] == [FULL_LABEL, "reap", "prune", "prune"]
    assert (tmp_path / "rows.md").is_file()
    again = in_process("study", str(path), "--store", store, "--json")
    assert json.loads(again.stdout) == rows
    wrong = in_process("study", str(path), "--store", store, "-o", str(tmp_path / "no" / "rows.md"))
    assert wrong.returncode == 2 and "the folder" in wrong.stderr
    joined = moevolve.load_study(path, overrides=["base.workers.address=head:6379"]).cells
    assert {cell.config.workers.address for cell in joined} == {"head:6379"}
