"""A whole search from Python: launched, asked for, evaluated, exported, resumed, and its records as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from commands_here import worker_here
from huggingface_hub import ModelCard

import moevolve

README = Path(__file__).parents[3] / "README.md"
Launched = tuple[str, "moevolve.FinalTable", list[str]]


@pytest.fixture(scope="module")
def launched(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """URL of the store, how the search with a worker in this process ended, and what an observer was told."""
    folder = tmp_path_factory.mktemp("notebook")
    store = f"sqlite:///{folder / 'demo.db'}"
    config = tiny.write_run(folder / "demo.yaml", "demo")
    told: list[str] = []
    observer = moevolve.Observer(
        on_begin=lambda config: told.append(f"begin {config.name} in {config.store}"), on_stage=told.append
    )
    with worker_here():
        run = moevolve.launch(config, store=store, overrides={"final.rerank": 2}, observer=observer)
    return store, run, told


@pytest.mark.usefixtures("worker_here")
def test_the_lines_of_the_first_page_run(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README's, with a small search in the place of the demo's."""
    (lines,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    phases = [{"kind": "prune", "evaluations": 4, "initial": 3}]
    config = tiny.write_run(tmp_path / "run.yaml", "first", phases=phases)
    assert "configs/runs/demo.yaml" in lines
    lines = lines.replace("configs/runs/demo.yaml", str(config))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(lines, names)
    assert {score.split for score in names["run"].best.scores} == {"search", "dev", "test"}
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "smaller" / "config.json").exists()


def test_six_lines(launched: Launched, tmp_path: Path) -> None:
    url, run, told = launched
    assert run.winner is not None and run.best is not None
    assert {score.split for score in run.best.scores} == {"search", "dev", "test"}
    with moevolve.open_store(url) as store:
        top = moevolve.best(store, task="pick", experts=2)
        assert moevolve.best(store, task="pick", experts=4) == []
        assert [row.search.name for row in moevolve.searches(store)] == ["demo"], "it was left open"
    assert run.winner in [row.ref for row in top]
    frame = pd.json_normalize(moevolve.as_data(top))
    assert list(frame["parameters"]) == [row.parameters for row in top]
    moevolve.plot(url, "demo", tmp_path / "demo.png", individual="demo:0")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(moevolve.UserError, match="unknown picture format; use one of "):
        moevolve.plot(url, "demo", tmp_path / "demo.txt")
    assert top[0].dev_score == max(row.dev_score for row in top if row.dev_score is not None)
    exported = moevolve.export(url, run.winner, tmp_path / "smaller")
    assert (tmp_path / "smaller" / "config.json").exists()
    assert moevolve.show(url, run.winner).exports[0].path == str(exported.directory)
    assert told == [f"begin demo in {url}", "starting workers", "evaluating", "re-ranking and final scores"]


def test_the_store_has_the_table_that_launching_returned(launched: Launched) -> None:
    url, run, _ = launched
    with moevolve.open_reader(url) as store:
        assert moevolve.final_table(store, "demo") == run == moevolve.final_table(url, "demo")
    with pytest.raises(moevolve.StoreError, match="demi"):
        moevolve.final_table(url, "demi")


def test_the_card_of_an_export_has_the_results_on_test(launched: Launched, tmp_path: Path) -> None:
    url, run, _ = launched
    moevolve.export(url, run.winner, tmp_path / "small")
    card = ModelCard.load(tmp_path / "small" / "README.md")
    assert [each.dataset_split for each in card.data.eval_results] == ["test"] and "| full model | pick" in card.text


def test_evaluations_have_intervals_and_are_kept(launched: Launched) -> None:
    url, run, _ = launched
    assert run.winner is not None
    task = json.loads(moevolve.show(url, run.winner).search.config)["tasks"][0]["name"]
    found = moevolve.evaluate(url, run.winner, tasks=task)
    assert run.best is not None
    score = run.best.score("pick", "test")
    (model,) = found.models
    assert score is not None and model.scores == (score,)
    data = moevolve.as_data(found)
    assert data["models"][0]["name"] == run.winner and data["models"][0]["scores"][0]["low"] == score.low
    assert json.loads(json.dumps(data)) == data


def test_records_become_what_the_commands_print(launched: Launched, in_process: Any) -> None:
    url, run, _ = launched
    assert run.winner is not None
    done = in_process("show", run.winner, "--store", url, "--json")
    assert json.loads(done.stdout) == moevolve.as_data(moevolve.show(url, run.winner))
    assert {task["name"] for task in moevolve.as_data(moevolve.tasks())} >= {"demo-calendar", "boolq"}


def test_what_is_finished_is_resumed_without_evaluating_anything(launched: Launched) -> None:
    url, run, _ = launched
    evaluations = moevolve.show(url, run.winner or "").evaluations
    with moevolve.open_store(url) as store:
        again = moevolve.resume(store, "demo")
        assert again.entries == run.entries
        assert moevolve.show(store, run.winner or "").evaluations == evaluations
        notes: list[str] = []
        assert moevolve.retry(store, "demo", observer=moevolve.Observer(on_note=notes.append)) is None
    assert notes == ["nothing to retry: no individual failed by fault of a worker or of time"]


def test_a_taken_name_and_other_settings_are_refused(tiny: Any, launched: Launched, tmp_path: Path) -> None:
    url, _, _ = launched
    config = moevolve.load_config(tiny.write_run(tmp_path / "demo.yaml", "demo"), {"final.rerank": 2})
    with pytest.raises(moevolve.UserError, match=f"search demo exists in {url}: continue it with"):
        moevolve.launch(config, store=url)
    with pytest.raises(moevolve.UserError, match="with other settings than this configuration has now"):
        moevolve.launch(config, store=url, overrides={"seed": 9}, or_resume=True)
    with pytest.raises(moevolve.UserError, match="only `workers`, `final` and `loggers` may change"):
        moevolve.resume(url, "demo", overrides=["seed=9"])
    with pytest.raises(moevolve.UserError, match=r"--experts 0[.]5: give a number such as 8"):
        moevolve.shrink("model", data=tmp_path / "chats.jsonl", experts=0.5, progress=False)
    with pytest.raises(moevolve.UserError, match="demo:0: say in which store it is"):
        moevolve.profile(None, ["demo:0"])


@pytest.mark.usefixtures("worker_here")
def test_an_open_store_is_where_a_search_goes(tiny: Any, tmp_path: Path) -> None:
    run = tiny.write_run(tmp_path / "run.yaml", "here", phases=[{"kind": "prune", "evaluations": 3, "initial": 3}])
    with moevolve.open_store(f"sqlite:///{tmp_path / 'open.db'}", create=True) as store:
        found = moevolve.launch(moevolve.load_config(run), store=store, name="there")
        (summary,) = moevolve.searches(store)
    assert found.search == summary.search.name == "there"
    assert json.loads(summary.search.config)["store"] == f"sqlite:///{tmp_path / 'open.db'}"


def test_a_store_that_was_opened_to_read_is_only_read(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'read.db'}"
    with pytest.raises(moevolve.StoreError, match="no store at"):
        moevolve.open_reader(url)
    with moevolve.open_store(url, create=True) as store, moevolve.open_reader(url) as reader:
        assert moevolve.searches(reader) == [] and moevolve.db.check(reader).problems == ()
        assert moevolve.db.prune(store).searches == 0
        writer: Any = reader
        with pytest.raises(moevolve.StoreError, match=r"opened for reading only, .* moevolve\.open_store"):
            moevolve.db.prune(writer)
        with pytest.raises(moevolve.StoreError, match="opened for reading only"):
            moevolve.pause(writer, "none")
