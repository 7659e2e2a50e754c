"""Who won and what the table shows: one answer, whichever command is asked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from local_workers import local_pool
from replies import answers, result
from scripted_pool import ScriptedPool
from search_lab import make_lab_setup, run_config
from typer.testing import CliRunner

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import Example, Matching, PreparedSplit, Split
from moevolve.search.cli.app import app
from moevolve.search.cli.output.final_table import print_final_table
from moevolve.search.config.run import RunConfig
from moevolve.search.config.study import load_study
from moevolve.search.loop.final_table import BEST_LABEL, FinalTable, preferred, ranked_on_dev
from moevolve.search.loop.scores import Score, SearchScores, full_fitness
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.report.contents import gather
from moevolve.search.results.gain import search_gain
from moevolve.search.results.study import study_rows
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register
from moevolve.search.running.observer import Observer
from moevolve.search.running.study import run_study
from moevolve.search.text import percent
from moevolve.store.records import IndividualRecord
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest

EXAMPLES = 20
Sheet = Callable[[Edit, PreparedSplit], tuple[int, float] | None]
"""Right answers of `EXAMPLES` and gold log-probability of an edit on a split; None where it fails."""


def mark(edit: Edit, salt: str = "") -> int:
    """A number of the edit, 0 to 999."""
    return int(np.random.default_rng(list(f"{edit.phenotype_hash}{salt}".encode())).integers(1000))


def sheet_pool(setup: SearchSetup, sheet: Sheet) -> ScriptedPool:
    """Answers every request from a sheet, at once."""
    return ScriptedPool(partial(sheet_reply, setup, sheet))


def sheet_reply(setup: SearchSetup, sheet: Sheet, request: EvaluationRequest) -> EvaluationReply:
    results = {}
    for key in request.fingerprints:
        found = sheet(request.edit, setup.all_prepared[key])
        if found is None:
            return replace(answers(request, results), failure="broken", failed_on=(key,))
        outcomes = (np.arange(EXAMPLES) < found[0]).astype(np.float32)
        results[key] = result(found[0] / EXAMPLES, found[1], outcomes.tolist())
    return answers(request, results)


def prepared(task: str, split: Split) -> PreparedSplit:
    examples = tuple(Example(f"{task} {split} {i}?", ("yes",), ("yes", "no")) for i in range(EXAMPLES))
    return PreparedSplit(task, split, "rank", "mean", Matching(), 1, " ", examples)


def lab_setup(config: RunConfig) -> SearchSetup:
    """What `set_up` makes, without a checkpoint or data."""
    names: list[Split] = ["search", *(["dev"] if config.final.rerank else []), *(["test"] if config.final.test else [])]  # type: ignore[list-item]
    return replace(
        make_lab_setup(config),
        prepared={name: tuple(prepared(task.name, name) for task in config.tasks) for name in names},
        held_out=tuple(prepared(task, "test") for task in config.final.held_out),
    )


def config(**changes: Any) -> RunConfig:
    phases = [{"kind": "prune", "evaluations": 12, "initial": 12}]
    settings: dict[str, Any] = {"phases": phases, "model": {"path": "/nowhere"}, "final": {"rerank": 6}}
    return run_config(**(settings | changes))


def launch(store: Store, settings: RunConfig, sheet: Sheet) -> FinalTable:
    setup = lab_setup(settings)
    register(setup, store)
    return resume(store, settings, sheet)


def resume(store: Store, settings: RunConfig, sheet: Sheet) -> FinalTable:
    setup = lab_setup(settings)
    return execute(setup, store, Observer(), lambda _: sheet_pool(setup, sheet))


def reported(store: Store) -> FinalTable:
    return gather(store, "lab").standings


def edits(store: Store, settings: RunConfig) -> dict[int, Edit]:
    setup = lab_setup(settings)
    return {row.index: setup.space.from_bytes(row.genome).express() for row in store.history("lab-1")}


def all_tied(edit: Edit, split: PreparedSplit) -> tuple[int, float]:
    """Everybody has the same score; what breaks ties differs."""
    return 10, -mark(edit, split.task + split.split) / 1000


def test_among_candidates_that_a_test_cant_tell_apart_a_stock_and_then_a_smaller_one_wins(store: Store) -> None:
    right = iter([18, 17, 17, 6])  # a test tells 6 of 20 from 18
    scores: dict[str, int] = {}

    def sheet(edit: Edit, split: PreparedSplit) -> tuple[int, float]:
        measured = split.split == "dev" and not isinstance(edit, IdentityEdit)
        return (scores.setdefault(edit.phenotype_hash, next(right)) if measured else 10), 0.0

    settings = config(tasks=[{"name": "one"}], final={"rerank": 4})
    launch(store, settings, sheet)
    found = SearchScores(store, store.search("lab"))
    plain = ranked_on_dev(found, settings, store.best_of_search("lab-1", 4))
    assert plain is not None and [scores[row.phenotype_hash] for row in plain] == [18, 17, 17, 6]
    custom = [replace(row, stock=False, parameters=600, parameters_full=1000) for row in plain]

    def winner(place: int, **changes: Any) -> int:
        rows = [*custom[:place], replace(custom[place], **changes), *custom[place + 1 :]]
        return rows.index(preferred(found, settings, rows))

    assert winner(0) == 0, "nothing speaks for another one"
    assert winner(2, stock=True) == 2 and winner(2, parameters=590) == 2
    assert winner(2, stock=True, parameters=900) == 2, "stock comes before size"
    assert winner(2, parameters=598) == 0, "less than a percent is no reason"
    assert winner(3, stock=True) == winner(3, parameters=100) == 0, "it is worse"
    worst = settings.model_copy(update={"task_aggregation": "worst"})
    assert preferred(found, worst, [custom[0], replace(custom[1], stock=True)]).index == custom[0].index


@pytest.mark.parametrize(("rule", "tasks"), [("gold_logprob", ["one", "two"]), ("index", ["one"])])
def test_ties_on_dev_are_broken_as_the_configuration_says(store: Store, rule: str, tasks: list[str]) -> None:
    weights = dict(zip(tasks, (3, 1), strict=False))
    sections = [{"name": name, "weight": weights[name]} for name in tasks]
    settings = config(tie_break=rule, tasks=sections, final={"rerank": 12})
    ended = launch(store, settings, all_tied)
    firsts: dict[str, int] = {}
    for index, edit in edits(store, settings).items():
        firsts.setdefault(edit.phenotype_hash, index)
    found = {index: edit for index, edit in edits(store, settings).items() if firsts[edit.phenotype_hash] == index}

    def worth(index: int) -> tuple[float, int]:
        if rule == "index":
            return 0.0, -index
        values = {task: all_tied(found[index], prepared(task, "dev"))[1] for task in tasks}
        return sum(weights[task] * values[task] for task in tasks), -index

    assert len(found) > 6
    assert ended.winner == f"lab:{max(found, key=worth)}" and ended.reranked
    assert reported(store).winner == ended.winner
    assert ended == reported(store)
    assert {score.task for one in ended.entries for score in one.scores} == set(tasks)


def test_dev_picks_the_one_whose_worst_task_keeps_most_of_the_full_models_score(store: Store) -> None:
    tasks = ["one", "two"]
    whole = {"one": 16, "two": 5}

    def sheet(edit: Edit, split: PreparedSplit) -> tuple[int, float]:
        right = whole[split.task]
        return (right if isinstance(edit, IdentityEdit) else mark(edit, split.task + split.split) % (right + 1)), -1.0

    settings = config(task_aggregation="worst", tasks=[{"name": name} for name in tasks], final={"rerank": 12})
    ended = launch(store, settings, sheet)
    assert full_fitness(store, store.search("lab")) == 1
    found = edits(store, settings)
    leaders = {row.index: found[row.index] for row in store.best_of_search("lab-1", 12)}

    def worst(index: int) -> tuple[float, int]:
        edit = leaders[index]
        return min(sheet(edit, prepared(task, "dev"))[0] / whole[task] for task in tasks), -index

    assert ended.winner == f"lab:{max(leaders, key=worst)}" and ended.reranked and ended == reported(store)
    means = {index: sum(sheet(edit, prepared(task, "dev"))[0] for task in tasks) for index, edit in leaders.items()}
    assert means[int(ended.winner.partition(":")[2])] < max(means.values()), "it isn't the best by the mean"


def test_without_a_share_of_the_full_models_score_on_dev_the_fitness_decides(store: Store) -> None:
    def sheet(edit: Edit, split: PreparedSplit) -> tuple[int, float]:
        full = isinstance(edit, IdentityEdit)
        return (0 if split.split == "dev" else 19) if full else mark(edit, split.split) % 19, -1.0

    ended = launch(store, config(task_aggregation="worst"), sheet)
    assert ended.winner == f"lab:{store.best_of_search('lab-1')[0].index}" and not ended.reranked


def graded(edit: Edit, split: PreparedSplit) -> tuple[int, float]:
    """Scores that differ from split to split."""
    return (19 if isinstance(edit, IdentityEdit) else mark(edit, split.split) % EXAMPLES), -1.0


@pytest.mark.parametrize("least", [10, 0])
def test_leaders_that_break_on_dev_are_out_unless_all_of_them_do(store: Store, least: int) -> None:
    """Those break whose score on `dev` would be at least so large."""

    def sheet(edit: Edit, split: PreparedSplit) -> tuple[int, float] | None:
        breaks = split.split == "dev" and not isinstance(edit, IdentityEdit) and mark(edit, "dev") % EXAMPLES >= least
        return None if breaks else graded(edit, split)

    ended = launch(store, config(), sheet)
    assert ended.best is not None and ended == reported(store)
    found = edits(store, config())
    marks = [mark(found[row.index], "dev") % EXAMPLES for row in store.best_of_search("lab-1", 6)]
    fine = [each for each in marks if each < least]
    score = ended.best.score("one", "dev")
    assert score is not None and ended.reranked == bool(fine)
    if fine:
        assert len(fine) < 6 and score.score == max(fine) / EXAMPLES
        assert score.low is not None and score.high is not None and score.low < score.high
    else:
        assert score == Score("one", "dev", None, failure="broken")
        assert ended.winner == f"lab:{store.best_of_search('lab-1')[0].index}"


def test_a_split_that_the_full_model_cannot_be_scored_on_ends_the_search(store: Store) -> None:
    """A row without tokens fails with every model: no leader would be left, and the winner be chosen without `dev`."""

    def sheet(edit: Edit, split: PreparedSplit) -> tuple[int, float] | None:
        return None if split.split == "dev" else graded(edit, split)

    with pytest.raises(UserError, match=r"the unedited model can't be scored on dev: broken"):
        launch(store, config(tasks=[{"name": "one"}]), sheet)


def test_one_that_breaks_on_a_task_of_test_failed_on_the_tasks_after_it(store: Store) -> None:
    def sheet(edit: Edit, split: PreparedSplit) -> tuple[int, float] | None:
        breaks = (split.task, split.split) == ("two", "test") and not isinstance(edit, IdentityEdit)
        return None if breaks else graded(edit, split)

    ended = launch(store, config(tasks=[{"name": name} for name in ("one", "two", "three")]), sheet)
    assert ended.best is not None
    first = ended.best.score("one", "test")
    assert first is not None and first.score is not None
    for task in ("two", "three"):
        assert ended.best.score(task, "test") == Score(task, "test", None, failure="broken")
    assert ended == reported(store)


@pytest.mark.parametrize(
    ("best", "first", "said"),
    [
        (18, 8, "gained over"),
        (12, 10, "gained nothing that a paired test can tell"),
        (8, 18, "lost against"),
        (0, 18, "gained nothing: the winner is"),
    ],
)
def test_what_a_search_gained_is_said_with_a_test(
    store: Store, monkeypatch: pytest.MonkeyPatch, best: int, first: int, said: str
) -> None:
    """The first individual counts as a one-shot choice."""
    shots: list[str] = []

    def entries(_: Any, history: Sequence[IndividualRecord], winner: IndividualRecord | None) -> list[Any]:
        return [("reap", history[0])] if winner is None or winner.index else []

    def sheet(edit: Edit, split: PreparedSplit) -> tuple[int, float]:
        if not isinstance(edit, IdentityEdit) and not shots:
            shots.append(edit.phenotype_hash)
        chosen = edit.phenotype_hash in shots
        if split.split == "test":
            return (first if chosen else best), 0.0
        return (10 if chosen == bool(best) else 15), 0.0

    monkeypatch.setattr("moevolve.search.loop.final_table.auxiliary_entries", entries)
    monkeypatch.setattr("moevolve.search.results.gain.auxiliary_entries", entries)
    table = launch(store, config(), sheet)
    assert f"The search {said}" in str(search_gain(store, table))

    # A last phase's repair gains something, too, and all if it is that of a one-shot choice.
    history = store.history("lab-1")
    for parent, what in ((0, "Repairing a one-shot choice"), (1, "The search and a repair of its best")):
        anew = [replace(one, operator="repair", parents=(parent,)) if one.index else one for one in history]
        monkeypatch.setattr(store, "history", lambda _, anew=anew: anew)
        assert (f"{what} at more length {said}" if best else said) in str(search_gain(store, table))


def test_a_search_whose_every_individual_failed_has_no_winner(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    def sheet(edit: Edit, split: PreparedSplit) -> tuple[int, float] | None:
        return graded(edit, split) if isinstance(edit, IdentityEdit) else None

    ended = launch(store, config(final={"rerank": 3, "random_baselines": 4}), sheet)
    assert (ended.winner, ended.best, ended.reranked) == (None, None, False)
    full, draws = ended.entries
    assert [score.score for score in draws.scores] == [0.0] and {score.split for score in full.scores} == {
        "search",
        "test",
    }
    assert ended == reported(store)
    print_final_table(ended, "sqlite:///s.db")
    assert "every individual failed" in capsys.readouterr().out


def test_random_draws_are_shown_where_they_are_asked_for(store: Store) -> None:
    settings = config(final={"rerank": 0, "random_baselines": 3})
    ended = launch(store, settings, graded)
    assert [one.label for one in ended.entries] == ["full model", "random pruning, 3 draws", BEST_LABEL]
    first = [edits(store, settings)[index] for index in range(3)]
    for split in ("search", "test"):
        values = [graded(edit, prepared("one", split))[0] / 20 for edit in first]  # type: ignore[arg-type]
        mean = ended.entries[1].score("one", split)  # type: ignore[arg-type]
        assert mean is not None and mean.score == pytest.approx(np.mean(values))
        assert mean.spread == pytest.approx(np.std(values, ddof=1)) and mean.low is None
    assert ended == reported(store)
    launch_again = resume(store, config(final={"rerank": 0}), graded)
    assert [one.label for one in launch_again.entries] == ["full model", BEST_LABEL]
    assert launch_again == reported(store)


def test_a_report_knows_the_final_settings_of_the_last_resume(store: Store) -> None:
    def sheet(edit: Edit, split: PreparedSplit) -> tuple[int, float]:
        found = 19 if isinstance(edit, IdentityEdit) else mark(edit) % EXAMPLES
        return (found if split.split == "search" else EXAMPLES - 1 - found), -1.0  # what is good here is bad there

    first = launch(store, config(final={"rerank": 1}), sheet)
    ended = resume(store, config(final={"rerank": 6, "held_out": ["other"]}), sheet)
    assert ended.winner != first.winner and ended.others == ("other",)
    assert ended.best is not None and ended.full.score("other", "test") and ended.best.score("other", "test")
    assert ended == reported(store)
    # As would resuming it once more without a word.
    again = resume(store, config(final={"rerank": 6}), sheet)
    assert again.winner == ended.winner and again == reported(store)


def test_leaders_that_are_not_all_measured_on_dev_are_not_ranked_again(store: Store) -> None:
    settings = config()
    setup = lab_setup(settings)
    register(setup, store)
    answered: list[int] = []

    def worst_three(waiting: Sequence[EvaluationRequest]) -> Sequence[EvaluationRequest]:
        """Answer three leaders on dev, the worst three of them, and stop."""
        if answered:
            raise KeyboardInterrupt
        if not any(setup.all_prepared[key].split == "dev" for one in waiting for key in one.fingerprints):
            return waiting
        answered.append(len(waiting[-3:]))
        return waiting[-3:]

    pool = ScriptedPool(partial(sheet_reply, setup, graded), worst_three)
    with pytest.raises(KeyboardInterrupt):
        execute(setup, store, Observer(), lambda _: pool)
    table = reported(store)
    assert answered == [3]
    assert table.winner == f"lab:{store.best_of_search('lab-1')[0].index}" and not table.reranked
    assert resume(store, settings, graded) == reported(store) and reported(store).reranked


def test_names_must_tell_splits_apart(tiny: Any, tmp_path: Path) -> None:
    other = tmp_path / tiny.task.name
    Path(colours(tiny, tmp_path)).rename(other)
    data = tiny.run_data("x", tasks=[str(tiny.task)], final={"held_out": [str(other)]})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(data))
    done = CliRunner().invoke(app, ["launch", str(tmp_path / "run.yaml"), "--store", f"sqlite:///{tmp_path}/s.db"])
    assert isinstance(done.exception, UserError)
    assert "task pick: its test split is used twice" in str(done.exception)
    assert not (tmp_path / "s.db").exists()


def colours(tiny: Any, folder: Path) -> str:
    task = yaml.safe_load(tiny.task.read_text())
    task["source"]["files"]["all"] = str(tiny.folder / "pick.jsonl")
    path = folder / "colours.yaml"
    path.write_text(yaml.safe_dump(task | {"prompt": "{{ text }} the Answer is"}))
    return str(path)


def test_all_commands_name_the_same_winner_and_numbers(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = {"rerank": 3, "random_baselines": 2, "held_out": [f"{tiny.task}@kl"]}
    tasks = [{"name": str(tiny.task), "weight": 3}, colours(tiny, tmp_path)]
    small = {"phases": [{"kind": "prune", "evaluations": 6, "initial": 4}], "engine": {"batch_tokens": 512}}
    changes = {"tasks": tasks, "tie_break": "index", "final": final}
    data = tiny.run_data("mine", store=f"sqlite:///{tmp_path}/s.db", **small) | changes
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(data))
    monkeypatch.setattr("moevolve.search.running.execute.execute", partial(execute, make_pool=local_pool))

    def ask(*arguments: str) -> str:
        done = CliRunner().invoke(app, [*arguments, "--store", data["store"]])
        assert done.exit_code == 0, (done.output, done.exception)
        return done.stdout

    ended = json.loads(ask("launch", str(tmp_path / "run.yaml"), "--json"))
    with Store.open(data["store"]) as store:
        table = gather(store, "mine").standings
        (tmp_path / "study.yaml").write_text(
            yaml.safe_dump(
                {"name": "c", "base": {k: v for k, v in data.items() if k not in ("name", "seed")}}
                | {"methods": {"m": {}}, "seeds": [data["seed"]]}
            )
        )
        study = load_study(tmp_path / "study.yaml")
        outcomes = run_study(study, store, lambda place, cell: Observer(), local_pool)  # type: ignore[arg-type]
        rows = {row.contestant: row for row in study_rows(outcomes, store)}
    # What launch prints is what the page reads.
    assert ended["winner"] == table.winner
    assert ended["reranked"] == table.reranked is True
    told = {
        (one["label"], s["task"], s["split"]): (s["score"], s["low"], s["high"], s["spread"])
        for one in ended["entries"]
        for s in one["scores"]
    }
    read = {
        (one.label, s.task, s.split): (s.score, s.low, s.high, s.spread) for one in table.entries for s in one.scores
    }
    assert told == read
    # The study's rows have them too, of the same individual.
    assert rows[BEST_LABEL].refs == (table.winner.replace("mine:", "c.m.s3:"),)  # type: ignore[union-attr]
    compared = 0
    for label, row in rows.items():
        for score in row.scores:
            if score.task or len(table.tasks) == 1:
                low, high = (score.low, score.high) if not row.contestant.startswith("random") else (None, None)
                name = score.task or table.tasks[0]
                assert (score.score, low, high) == pytest.approx(read[label, name, score.split][:3])
                compared += 1
    assert compared == len(read)
    # The plot shows the winner's matrices, and the page all numbers.
    ask("plot", "mine", "-o", str(tmp_path / "mine.svg"))
    assert f"experts of {table.winner} " in (tmp_path / "mine.svg").read_text()
    ask("report", "mine", "-o", str(tmp_path / "mine.html"))
    page = (tmp_path / "mine.html").read_text()
    body = page[page.index('id="result"') : page.index('id="searched"')]
    for one in table.entries:
        for score in one.scores:
            assert re.search(rf">\s*{percent(score.score)}<small>", body)
