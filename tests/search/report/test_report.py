"""Reports of searches of every kind and in every state; a page needs no other files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_workers import local_pool
from page_checks import check_report
from report_lab import KINDS
from scripted_pool import Stopped
from search_lab import UnrulyPool, run_config, start
from typer.testing import CliRunner

import moevolve
from moevolve.evaluators.errors import UserError
from moevolve.search.cli.app import app
from moevolve.search.config.files import load_run_config, parse_run_config
from moevolve.search.config.run import RunConfig
from moevolve.search.loop.evaluation_cache import EvaluationCache
from moevolve.search.loop.search_loop import SearchLoop
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.report.contents import ReportContents, gather, group_failures
from moevolve.search.report.page import render_page
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.search.running.resume import set_up_stored
from moevolve.search.strategies.phased import make_strategy
from moevolve.search.text import percent
from moevolve.store.errors import StoreError
from moevolve.store.repository import Store
from moevolve.store.session import without_password


def page_of(contents: ReportContents) -> tuple[str, str]:
    """The page, checked, and its text."""
    page = render_page(contents)
    return page, check_report(page).text


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_search_is_reported_completely(all_kinds: str, kind: str) -> None:
    with Store.open(all_kinds) as store:
        contents = gather(store, kind)
        # A finished search has nothing left to evaluate: ending it again only reads.
        ended = execute(set_up_stored(store, kind), store, Observer(), local_pool)
    table = contents.standings
    assert not contents.notes and table.reranked and table.winner is not None
    assert table == ended
    labels = [one.label for one in table.entries]
    assert labels[0] == "full model" and labels[-1] == "best found"
    assert labels[1].startswith("random ") and ("unsearched start" in labels) == (kind != "eep")
    again = parse_run_config(yaml.safe_load(contents.settings), "report")
    assert again.config_hash == contents.search.config_hash
    if kind == "tomoe":
        assert str(table.winner) in page_of(contents)[1]


@pytest.fixture
def lab(tmp_path: Path) -> Store:
    return Store.open(f"sqlite:///{tmp_path / 'lab.db'}")


def lab_config(**changes: Any) -> RunConfig:
    """A search on a synthetic model without files."""
    return run_config(model={"path": "/nowhere/model"}, **changes)


def drive(store: Store, setup: SearchSetup, pool: UnrulyPool) -> None:
    """Evaluates with the search's own engine."""
    engine = store.search(setup.search_id).engine_fingerprint
    cache = EvaluationCache(store, pool, setup.search_id, setup.facts.fingerprint, engine)
    SearchLoop(setup, make_strategy(setup.config, setup.space, setup.schedule), store, cache).run()


EVIL = '<script>alert("x")</script> & co'
TASKS = [{"name": "one", "weight": 3}, {"name": EVIL}]


def test_a_search_just_made_is_reported(lab: Store, tmp_path: Path) -> None:
    start(lab, lab_config())
    with pytest.raises(StoreError, match="did you mean lab"):
        gather(lab, "labb")
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, ["report", "lab", "-o", str(tmp_path / "file" / "r.html"), "--store", lab.url])
    assert isinstance(done.exception, UserError) and "file: File exists; give another one" in str(done.exception)
    contents = gather(lab, "lab")
    _, text = page_of(contents)
    assert "Nothing found: 0 individuals failed" in text and "Nothing was evaluated yet" in text
    assert contents.counts == {"planned": 60, "made": 0, "ok": 0, "failed": 0, "pending": 0}


def test_an_interrupted_search_of_several_tasks_is_reported(lab: Store) -> None:
    setup = start(lab, lab_config(tasks=TASKS, final={"random_baselines": 5}))
    with pytest.raises(Stopped):
        drive(lab, setup, UnrulyPool(4, stop_at=30))
    contents = gather(lab, "lab")
    page, text = page_of(contents)
    assert contents.standings.tasks == ("one", EVIL) and f"one (weight 3), {EVIL} (weight 1)" in text
    assert "<script>" not in page and "<caption>one" in page
    assert contents.counts["made"] == len(lab.history(setup.search_id)) < 60
    assert "moevolve resume lab" in text
    assert contents.notes == () and "Experts of" in text, "though the synthetic model is nowhere"
    best = max((row for row in contents.history if row.fitness is not None), key=lambda row: row.fitness or 0)
    assert f"the best has {100 * (best.fitness or 0):.1f} %" in text
    for task in ("one", EVIL):
        full, draws, best_found = (one.score(task, "search") for one in contents.standings.entries)
        assert full and draws and best_found and draws.spread
        assert draws.score < best_found.score < full.score == pytest.approx(0.9, abs=0.1)  # type: ignore[operator]


def test_costs_add_up_and_individuals_say_how_they_were_made(lab: Store) -> None:
    """In a space of 28 subsets, where individuals have to repeat."""
    phases = [{"kind": "prune", "evaluations": 40, "initial": 10, "strategy": "surrogate"}]
    genome = {"experts": 6, "groups": 1}
    drive(lab, start(lab, lab_config(tasks=TASKS, genome=genome, phases=phases)), UnrulyPool(4))
    contents = gather(lab, "lab")
    history = contents.history
    assert contents.costs.phenotypes == len({row.phenotype_hash for row in history}) < len(history)
    failed = len({row.phenotype_hash for row in history if row.status == "failed"})
    assert [part.task for part in contents.costs.splits] == ["one", EVIL]
    for part in contents.costs.splits:
        assert (part.split, part.failed, part.earlier) == ("search", failed, 0)
        assert part.evaluations == contents.costs.phenotypes + 1  # and the full model
        assert part.seconds == pytest.approx(0.1 * part.evaluations)
    facts = dict(contents.facts)
    assert "evolution, window 6" in facts.values(), facts
    assert any("40 individuals, 10 of them initial, by surrogate" in fact for fact in facts.values()), facts
    learned = [row for row in history if row.operator == "surrogate"]
    assert learned
    for one in learned:
        assert "(learned from " in one.summary and one.depth == 0
        assert [node.index for node in lab.ancestors(f"lab:{one.index}").nodes] == [one.index]


def test_a_search_whose_individuals_all_failed_is_reported(lab: Store) -> None:
    setup = start(lab, lab_config())
    drive(lab, setup, UnrulyPool(4, score=lambda edit: (0.9, -0.2) if edit.phenotype_hash == "full" else None))
    lab.set_status(setup.search_id, "finished")
    contents = gather(lab, "lab")
    _, text = page_of(contents)
    assert "Nothing found: 60 individuals failed" in text and "No individual has a score" in text
    (failure,) = contents.failures
    assert (failure.reason, failure.count, failure.example) == ("logits are not finite", 60, "lab:0")
    assert contents.standings.winner is None and "There is no best individual" in text


def test_failures_are_counted_by_reason_whatever_the_numbers(lab: Store) -> None:
    setup = start(lab, lab_config(phases=[{"kind": "prune", "evaluations": 9, "initial": 9}]))
    drive(lab, setup, UnrulyPool(4, score=lambda edit: (0.5, -1.0)))
    history = lab.history(setup.search_id)
    reasons = ["12 of 40 prompts", "3 of 40 prompts", "<b>KeyError</b>: 'x'", None]
    failed = [replace(row, status="failed", failure=why) for row, why in zip(history, reasons, strict=False)]
    found = [(each.reason, each.count, each.example) for each in group_failures(lab.search("lab"), failed)]
    assert found == [
        ("12 of 40 prompts", 2, "lab:0"),
        ("<b>KeyError</b>: 'x'", 1, "lab:2"),
        ("no reason was recorded", 1, "lab:3"),
    ]


def test_scores_that_are_evaluated_later_are_reported(tiny: Any, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    final = {"rerank": 0, "test": False, "random_baselines": 2}
    phases = [{"kind": "prune", "evaluations": 4, "initial": 4}]
    run = load_run_config(tiny.write_run(tmp_path / "r.yaml", "bare", phases=phases, final=final))
    with Store.open(url) as store:
        setup = set_up_new(run)
        register(setup, store)
        execute(setup, store, Observer(), local_pool)
        contents = gather(store, "bare")
        winner = contents.standings.winner
        assert winner is not None and not contents.standings.reranked
        before = _evaluations(tmp_path)
        moevolve.evaluate(store, winner, tasks=str(tiny.task), split="test")
        moevolve.evaluate(store, winner, tasks=str(tiny.task), split="dev")
        moevolve.evaluate(store, "full", search="bare", tasks=str(tiny.task), split="test")
        contents = gather(store, "bare")
        tested = contents.standings.full.score("pick", "test")
        assert tested is not None and not contents.standings.others
        assert _evaluations(tmp_path) == before + 3, "a report evaluates nothing"
        moevolve.evaluate(store, winner, tasks=f"{tiny.task}@perplexity", split="test")
        contents = gather(store, "bare")
        assert contents.standings.tasks == ("pick",) and contents.standings.others == ("pick@perplexity",)
        _, text = page_of(contents)
        assert "pick@perplexity not searched on" in text
        assert "nothing was ranked again on dev" in text and percent(tested.score) in text


def _evaluations(folder: Path) -> int:
    import sqlite3

    with sqlite3.connect(folder / "store.db") as connection:
        return int(connection.execute("select count(*) from evaluations").fetchone()[0])


def test_passwords_stay_out() -> None:
    for url, shown in {
        "postgresql+psycopg://me:se/cret@host:5432/db": "postgresql+psycopg://me:***@host:5432/db",
        "postgresql://me:p@ss:w@rd@host/db": "postgresql://me:***@host/db",
        "postgresql://host/db?user=me&password=secret": "postgresql://host/db?user=me&password=***",
        "sqlite:///a/b.db": "sqlite:///a/b.db",
    }.items():
        assert without_password(url) == shown
