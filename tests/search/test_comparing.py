from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy.stats import binom

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.metrics import confidence_interval
from moevolve.search.cli.comparison_tables import print_tables, write_csv, write_markdown
from moevolve.search.comparing.config import Comparison, load_comparison
from moevolve.search.comparing.rows import Row, comparison_rows
from moevolve.search.comparing.run import run_comparison
from moevolve.search.comparing.significance import Outcomes, paired_test, weighted_interval
from moevolve.search.finalise import BEST_LABEL, FULL_LABEL
from moevolve.search.local_pool import LocalPool
from moevolve.search.plan import Plan
from moevolve.search.service import Observer
from moevolve.store.repository import Store
from moevolve.workers.actor import EvaluationWorker
from moevolve.workers.edits.base import IdentityEdit


def write(tiny: Any, folder: Path, **changes: Any) -> Path:
    """A comparison of two budgets and two methods on the tiny model, with two seeds."""
    base = tiny.run_data("unused")
    del base["name"], base["engine"]
    base["phases"][0] |= {"evaluations": 6, "initial": 4}
    base["phases"][1] |= {"evaluations": 4}
    base["final"] = {"rerank": 2, "random_draws": 3}
    data = {
        "name": "both",
        "base": base,
        "budgets": {"2 of 4": {"genome.experts": 2}, "3 of 4": {"genome.experts": 3}},
        "methods": {
            "random": {"baseline": "random"},
            "reap": {"baseline": "reap"},
            "prune": {"phases": [{"kind": "prune", "evaluations": 6, "initial": 4}]},
            "prune + merge": None,
        },
        "seeds": [0, 1],
    }
    path = folder / "compare.yaml"
    path.write_text(yaml.safe_dump(data | changes, sort_keys=False))
    return path


def pool(plan: Plan) -> LocalPool:
    config = plan.config
    return LocalPool(lambda: EvaluationWorker(config.model.to_worker(), config.engine.to_worker()), plan.all_prepared)


def calibrate(workers: Any, model: Any, engine: Any, recipe: Any, splits: Any) -> bytes:
    return EvaluationWorker(model, engine).calibrate(recipe, splits)


def no_pool(plan: Plan) -> LocalPool:
    raise AssertionError(f"{plan.config.name} starts workers")


def run(comparison: Comparison, store: Store, make: Any = pool) -> list[Row]:
    outcomes = run_comparison(comparison, store, lambda place, cell: Observer(), make, calibrate)
    return comparison_rows(outcomes, store)


def test_cells_are_all_combinations_in_order(tiny: Any, tmp_path: Path) -> None:
    path = write(tiny, tmp_path, tasks=[str(tiny.task), f"{tiny.task}@kl"])
    comparison = load_comparison(path, ("base.window=3", "methods.prune.phases.0.evaluations=5"))
    assert len(comparison.cells) == 2 * 2 * 4 * 2
    names = [cell.config.name for cell in comparison.cells]
    assert len(set(names)) == len(names)
    labels = [(cell.task, cell.budget, cell.method, cell.config.seed) for cell in comparison.cells]
    tasks, methods = (str(tiny.task), f"{tiny.task}@kl"), ("random", "reap", "prune", "prune + merge")
    assert labels == list(product(tasks, ("2 of 4", "3 of 4"), methods, (0, 1)))
    for cell in comparison.cells:
        assert cell.config.window == 3
        assert cell.config.genome.experts == int(cell.budget[0])  # type: ignore[union-attr]
        assert [task.name for task in cell.config.tasks] == [cell.task]
        assert cell.baseline == (cell.method in ("random", "reap"))
        phases = [(phase.kind, phase.evaluations) for phase in cell.config.phases]
        known = {
            "random": [("prune", 3)],
            "reap": [("prune", 1)],
            "prune": [("prune", 5)],
            "prune + merge": [("prune", 6), ("merge", 4)],
        }
        assert phases == known[cell.method]


def test_the_base_may_be_a_run_of_its_own(tiny: Any, tmp_path: Path) -> None:
    data = yaml.safe_load(write(tiny, tmp_path).read_text())
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run.yaml").write_text(yaml.safe_dump(data["base"] | {"name": "run"}))
    comparison = load_comparison(write(tiny, tmp_path, base="runs/run.yaml"))
    assert comparison == load_comparison(write(tiny, tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metods": {}}, "metods: unknown key"),
        ({"methods": {}}, "methods: "),
        ({"seeds": []}, "seeds: "),
        ({"budgets": {"much": {"genome.experts": "many"}}}, "much / random: genome.experts"),
        ({"methods": {"a": {"genome.expert": 2}}}, "2 of 4 / a: genome.expert: unknown key"),
        ({"methods": {"a": {"phases.7.sigma": 2}}}, "2 of 4 / a: phases has no entry '7'"),
        ({"methods": {"a+b": {}, "a b": {}}}, "two labels give the same name both.2-of-4.a-b.s0"),
        (
            {"methods": {"a": {"baseline": "repa"}}},
            "2 of 4 / a: baseline: repa is unknown; there are random, frequency",
        ),
        ({"base": "nowhere.yaml"}, "nowhere.yaml: no such file"),
    ],
)
def test_what_is_wrong_is_named(tiny: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_comparison(write(tiny, tmp_path, **changes))
    assert message in str(caught.value)


def test_nothing_is_recorded_when_a_cell_cannot_run(tiny: Any, tmp_path: Path) -> None:
    path = write(tiny, tmp_path, budgets={"fine": {}, "too many": {"genome.experts": 9}})
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        with pytest.raises(UserError, match="experts"):
            run(load_comparison(path), store, no_pool)
        assert store.searches() == []


@pytest.fixture(scope="module")
def finished(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path, list[Row]]:
    folder = tmp_path_factory.mktemp("comparison")
    comparison = load_comparison(write(tiny, folder))
    with Store.open(f"sqlite:///{folder / 'store.db'}") as store:
        return comparison, folder, run(comparison, store)


def test_rows_say_what_the_store_holds(finished: tuple[Comparison, Path, list[Row]]) -> None:
    _, folder, rows = finished
    per_budget = [FULL_LABEL, "random", "reap", "prune", "prune", "prune + merge", "prune + merge"]
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


def test_tasks_that_were_not_searched_on_have_columns_of_their_own(tiny: Any, tmp_path: Path) -> None:
    path = write(tiny, tmp_path, budgets={"": {}}, methods={"prune": {}}, seeds=[0])
    comparison = load_comparison(path, (f"base.final.held_out=['{tiny.task}@kl']", "base.final.random_draws=0"))
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        full, best = run(comparison, store)
        task = f"{comparison.cells[0].config.tasks[0].name.rpartition('/')[2].removesuffix('.yaml')}@kl"
        found = best.score("test", task)
        (stored,) = (
            each for each in store.individual(best.refs[0]).evaluations if (each.task, each.split) == (task, "test")
        )
        assert found is not None and found.score == stored.score
    assert full.score("test", task) is not None and best.score("search", task) is None


def test_a_finished_comparison_starts_no_workers(finished: tuple[Comparison, Path, list[Row]]) -> None:
    comparison, folder, rows = finished
    with Store.open(f"sqlite:///{folder / 'store.db'}") as store:
        assert run(comparison, store, no_pool) == rows


def test_an_interrupted_comparison_goes_on(finished: tuple[Comparison, Path, list[Row]], tmp_path: Path) -> None:
    comparison, _, rows = finished

    class Lost(LocalPool):
        polls = 0

        def poll(self, timeout: float) -> Any:
            Lost.polls += 1
            if Lost.polls == 40:
                raise KeyboardInterrupt
            return super().poll(timeout)

    def losing(plan: Plan) -> LocalPool:
        made = pool(plan)
        made.__class__ = Lost
        return made

    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        with pytest.raises(KeyboardInterrupt):
            run(comparison, store, losing)
        states = [each.search.status for each in store.searches()]
        assert "interrupted" in states and "created" in states
        again = run(comparison, store)
    assert [replace(row, seconds=0) for row in again] == [replace(row, seconds=0) for row in rows]


def test_other_settings_under_the_same_name_are_refused(
    tiny: Any, finished: tuple[Comparison, Path, list[Row]]
) -> None:
    _, folder, _ = finished
    changed = load_comparison(folder / "compare.yaml", ("base.window=2",))
    with (
        Store.open(f"sqlite:///{folder / 'store.db'}") as store,
        pytest.raises(UserError, match=r"both\.2-of-4\.random\.s0 is in the store with other settings"),
    ):
        run(changed, store, no_pool)


def test_a_search_that_fails_stops_no_other(tiny: Any, tmp_path: Path) -> None:
    comparison = load_comparison(write(tiny, tmp_path, budgets={"one": {}}, seeds=[0]))

    class Failing(LocalPool):
        def poll(self, timeout: float) -> Any:
            return [
                replace(each, reply=replace(each.reply, results=(), failure="broken")) for each in super().poll(timeout)
            ]

    made: list[LocalPool] = []

    def first_fails(plan: Plan) -> LocalPool:
        made.append(pool(plan))
        if len(made) == 1:
            made[0].__class__ = Failing
        return made[-1]

    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        rows = run(comparison, store, first_fails)
    failures = {row.method: row.failure for row in rows}
    assert "the unedited model can't be evaluated: broken" in str(failures.pop("random"))
    assert set(failures) == {FULL_LABEL, "reap", "prune", "prune + merge"} and not any(failures.values())


@pytest.mark.parametrize("broken", [1, 2])
def test_a_best_that_breaks_on_test_scores_nothing_there(tiny: Any, tmp_path: Path, broken: int) -> None:
    path = write(tiny, tmp_path, budgets={"one": {}}, methods={"prune": {}})
    comparison = load_comparison(path, ("base.final.random_draws=0",))
    left = [broken]

    class Breaking(LocalPool):
        def poll(self, timeout: float) -> Any:
            request = self._queue[0] if self._queue else None
            found = super().poll(timeout)
            if request is None or isinstance(request.edit, IdentityEdit) or not left[0]:
                return found
            if self._splits[request.splits[0]].split != "test":
                return found
            left[0] -= 1
            return [replace(each, reply=replace(each.reply, results=(), failure="broken")) for each in found]

    def breaking(plan: Plan) -> LocalPool:
        made = pool(plan)
        made.__class__ = Breaking
        return made

    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        rows = run(comparison, store, breaking)
        (best,) = (row for row in rows if (row.method, row.contestant) == ("prune", BEST_LABEL))
        scores = [
            each.score or 0.0 for ref in best.refs for each in store.individual(ref).evaluations if each.split == "test"
        ]
    assert len(scores) == 2 and scores.count(0.0) >= broken
    found = best.score("test")
    assert found is not None and found.score == pytest.approx(np.mean(scores))
    assert found.low is not None and found.high is not None and found.low <= found.score <= found.high
    assert best.against_full is not None
    assert best.failure == "; ".join(f"seed {seed} on test: broken" for seed in range(broken))


def test_tables_hold_every_row(
    finished: tuple[Comparison, Path, list[Row]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison, _, rows = finished
    print_tables(comparison.name, rows)
    shown = capsys.readouterr().out
    assert shown.count("random") >= 2 and "both, 2 of 4" in shown and "both, 3 of 4" in shown
    write_csv(rows, tmp_path / "rows.csv")
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert len(lines) == 1 + sum(len(row.scores) for row in rows)
    write_markdown(comparison.name, rows, tmp_path / "rows.md")
    tables = [line for line in (tmp_path / "rows.md").read_text().splitlines() if line.startswith("|")]
    assert len(tables) == len(rows) + 2 * 2
    assert len({line.count("|") for line in tables}) == 1


def test_several_tasks_are_summed_up(
    finished: tuple[Comparison, Path, list[Row]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, rows = finished
    both = [replace(row, task=task) for task in ("pick", "other") for row in rows if row.budget == "2 of 4"]
    write_markdown("both", both, tmp_path / "rows.md")
    _, summary = (tmp_path / "rows.md").read_text().split("**both, 2 of 4, all tasks")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in summary.splitlines() if "|" in line]
    assert lines[0] == ["method", "pick", "other"]
    for row, (_, *cells) in zip(rows[:7], lines[2:], strict=True):
        assert row.headline is not None
        assert {cell.removesuffix(" *") for cell in cells} == {f"{100 * row.headline.score:.1f}"}


def outcomes(values: Any, metric: str = "mean", weight: float = 1.0) -> Outcomes:
    return Outcomes(np.asarray(values, dtype=np.float64), metric, weight)


def test_right_or_wrong_answers_are_compared_by_mcnemar() -> None:
    one = [1] * 9 + [0] * 2 + [1] * 5 + [0] * 4
    other = [0] * 9 + [1] * 2 + [1] * 5 + [0] * 4
    found = paired_test([outcomes(one)], [outcomes(other)])
    assert found.test == "McNemar"
    assert found.p == pytest.approx(2 * binom.cdf(2, 11, 0.5))
    assert paired_test([outcomes(one)], [outcomes(one)]).p == 1.0


def test_graded_answers_are_compared_by_flipping_signs() -> None:
    rng = np.random.default_rng(4)
    one, other = rng.random(10), rng.random(10) * 0.7
    found = paired_test([outcomes(one)], [outcomes(other)])
    assert found.test == "sign flips"
    sums = [abs(np.dot(signs, one - other)) for signs in product((-1, 1), repeat=10)]
    exact = np.mean(np.array(sums) >= abs((one - other).sum()) - 1e-12)
    assert found.p == pytest.approx(exact, abs=0.02)


def test_weights_of_tasks_count_in_tests_and_intervals() -> None:
    better, worse = outcomes([1.0] * 30), outcomes([0.0] * 30)
    same = [0.0, 1.0] * 15
    heavy = paired_test([better, outcomes(same, weight=1)], [worse, outcomes(same, weight=1)])
    assert heavy.test == "sign flips" and heavy.p < 0.001
    low, high = weighted_interval([outcomes([1.0] * 50, weight=3), outcomes([0.0] * 50, weight=1)])
    assert (low, high) == (0.75, 0.75)
    graded = np.linspace(0.2, 0.8, 40)
    assert weighted_interval([outcomes(graded)]) == confidence_interval(graded)


def test_examples_must_pair() -> None:
    with pytest.raises(ValueError, match="same examples"):
        paired_test([outcomes([1, 0])], [outcomes([1])])


@pytest.mark.slow
def test_the_command_runs_and_repeats(
    tiny: Any, ray_address: str, moevolve: Any, in_process: Any, tmp_path: Path
) -> None:
    path = write(tiny, tmp_path, budgets={"2 of 4": {}}, seeds=[0])
    store = f"sqlite:///{tmp_path / 'store.db'}"
    joined = ("--address", ray_address, "--csv", str(tmp_path / "rows.csv"))
    first = moevolve("compare", str(path), "--store", store, "--json", *joined)
    assert first.returncode == 0, first.stderr
    rows = json.loads(first.stdout)
    assert [row["method"] for row in rows] == [
        FULL_LABEL,
        "random",
        "reap",
        "prune",
        "prune",
        "prune + merge",
        "prune + merge",
    ]
    assert (tmp_path / "rows.csv").is_file()
    again = in_process("compare", str(path), "--store", store, "--json")
    assert json.loads(again.stdout) == rows
    wrong = in_process("compare", str(path), "--store", store, "--csv", str(tmp_path / "no" / "rows.csv"))
    assert wrong.returncode == 2 and "the folder" in wrong.stderr
