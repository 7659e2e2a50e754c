"""Loggers: what they get of a search, that they can do it no harm, and that each program has it in the end."""

from __future__ import annotations

import json
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from disturbed_lab import local_pool, setup_of
from search_lab import make_lab_setup, prepared

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import load_run_config
from moevolve.search.config.run import RunConfig
from moevolve.search.loop.final_table import FinalTable
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.running import feeding
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register
from moevolve.search.running.loggers import LOGGERS, LoggedSearch
from moevolve.search.running.observer import Observer
from moevolve.store.repository import Store

FINAL = {"rerank": 0, "test": True}


class Kept:
    """A logger that keeps what it gets."""

    def __init__(self, search: LoggedSearch) -> None:
        self.search = search
        self.steps: dict[str, dict[int, float]] = {}
        self.final: Mapping[str, float] | str | None = "not closed"

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.steps.setdefault(name, {})[step] = value

    def close(self, values: Mapping[str, float] | None) -> None:
        self.final = values


def setup_with(store: Store, *loggers: str) -> SearchSetup:
    config = setup_of(store.url).config.model_dump(mode="json") | {"loggers": loggers, "final": FINAL}
    setup = make_lab_setup(RunConfig.model_validate(config), "id-lab")
    return replace(setup, prepared={**setup.prepared, "test": (prepared("one", "test"),)})


def run(store: Store, setup: SearchSetup) -> tuple[FinalTable, list[str]]:
    """Run the search; also what was noted."""
    notes: list[str] = []
    if not store.searches():
        register(setup, store)
    return execute(setup, store, Observer(on_note=notes.append), local_pool), [
        each for each in notes if "loggers" in each
    ]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Kept]:
    """The loggers that were made in the place of TensorBoard's."""
    found: list[Kept] = []

    def make(search: LoggedSearch) -> Kept:
        found.append(Kept(search))
        return found[-1]

    monkeypatch.setitem(LOGGERS, "tensorboard", make)
    monkeypatch.setattr(feeding, "_PAUSE_S", 0.0)
    return found


def test_a_logger_gets_all_numbers_once(store: Store, kept: list[Kept]) -> None:
    table, notes = run(store, setup_with(store, "tensorboard"))
    (found,) = kept
    assert (found.search.name, found.search.id, found.search.config["seed"]) == ("lab", "id-lab", 303)
    assert notes == [] and found.search.flat_config()["phases.1.entry_rate"] == "0.1"
    fitness = dict(store.fitness_by_index("id-lab"))
    assert 0 < len(fitness) < 60, "some have failed"
    assert found.steps["fitness"] == {index: 100 * value for index, value in fitness.items()}
    assert list(found.steps["best_fitness"].values())[-1] == 100 * max(fitness.values())
    assert len(set(found.steps["full_fitness"].values())) == 1 and found.steps["best_parameters"]
    assert table.best is not None
    tested = {"test/one": table.best.score("one", "test"), "full_test/one": table.full.score("one", "test")}
    expected = {name: 100 * (each.score or 0.0) for name, each in tested.items() if each is not None}
    assert found.final == expected | {"winner_parameters": table.best.parameters} and len(expected) == 2


def test_a_search_that_has_ended_is_logged_by_a_resume(store: Store, kept: list[Kept]) -> None:
    """With loggers that it was not launched with: they are no part of what it is."""
    before, after = setup_with(store), setup_with(store, "tensorboard")
    table, _ = run(store, before)
    assert before.config.config_hash == after.config.config_hash
    again, _ = run(store, after)
    assert again == table and kept[0].steps["fitness"] == {
        index: 100 * value for index, value in store.fitness_by_index("id-lab")
    }
    assert kept[0].steps.keys() > {"best_fitness", "best_parameters", "full_fitness"}


def test_an_interrupted_search_has_no_final_scores(store: Store, kept: list[Kept]) -> None:
    setup = setup_with(store, "tensorboard")
    register(setup, store)

    def interrupt(progress: Any) -> None:
        if progress.done >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(setup, store, Observer(on_progress=interrupt), local_pool)
    assert kept[0].final is None and len(kept[0].steps["fitness"]) == len(store.fitness_by_index("id-lab"))


@pytest.mark.parametrize("when", ["made", "missing", "log", "close", "hangs", "exits"])
def test_a_failing_logger_is_reported_once_and_stops_nothing(
    store: Store, kept: list[Kept], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    end = threading.Event()

    class Failing(Kept):
        def __init__(self, search: LoggedSearch) -> None:
            if when == "missing":
                import moevolve.none  # type: ignore[import-not-found]  # noqa: F401
            super().__init__(search)
            self._fail("made")

        def log(self, values: Mapping[str, float], step: int) -> None:
            self._fail("log")
            if when == "exits":
                sys.exit("the tracker\nis gone")
            if when == "hangs":
                end.wait()

        def close(self, values: Mapping[str, float] | None) -> None:
            self._fail("close")

        def _fail(self, at: str) -> None:
            if when == at:
                raise ConnectionError("the tracker\nis gone")

    monkeypatch.setitem(LOGGERS, "mlflow", Failing)
    monkeypatch.setattr(feeding, "_WAIT_S", 0.5)
    table, notes = run(store, setup_with(store, "mlflow", "tensorboard"))
    end.set()
    said = {
        "missing": "mlflow can't be imported (No module named 'moevolve.none'): pip install 'moevolve[mlflow]'",
        "hangs": "mlflow has not taken everything before the end",
    }.get(when, "mlflow has failed: the tracker is gone")
    assert notes == [f"loggers: {said}; it gets nothing more, and the search goes on"]
    assert table.winner is not None and isinstance(kept[0].final, dict), "the other one has everything"


def test_loggers_are_named_and_no_part_of_what_a_search_is(tiny: Any, tmp_path: Path) -> None:
    run = tiny.write_run(tmp_path / "run.yaml", "here")
    config = load_run_config(run, ("loggers=[tensorboard, wandb]",))
    assert config.loggers == ("tensorboard", "wandb")
    assert load_run_config(run).loggers == () and load_run_config(run).config_hash == config.config_hash
    with pytest.raises(UserError, match=r"loggers\.0: .*'tensorboard', 'mlflow' or 'wandb'"):
        load_run_config(run, ("loggers=[comet]",))


def test_tensorboard_reads_the_event_files(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    table, notes = run(store, setup_with(store, "tensorboard"))
    assert notes == []
    found = reading.EventAccumulator(str(tmp_path / "lab"))
    found.Reload()
    fitness = {each.step: each.value for each in found.Scalars("fitness")}
    assert fitness == pytest.approx({index: 100 * value for index, value in store.fitness_by_index("id-lab")})
    (test,) = found.Scalars("test/one")
    assert table.best is not None and test.value == pytest.approx(100 * (table.best.score("one", "test").score))
    (text,) = found.Tensors("configuration")
    assert b"    genome.groups: 2\n" in text.tensor_proto.string_val[0]


def test_mlflow_has_one_run_of_a_search(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "small")
    setup = setup_with(store, "mlflow")
    for _ in range(2):
        table, notes = run(store, setup)
        assert notes == []
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("small").experiment_id])
    assert (found.info.run_name, found.info.status, found.data.params["seed"]) == ("lab", "FINISHED", "303")
    fitness = {each.step: each.value for each in client.get_metric_history(found.info.run_id, "fitness")}
    assert fitness == {index: 100 * value for index, value in store.fitness_by_index("id-lab")}
    assert table.best is not None and found.data.metrics["winner_parameters"] == table.best.parameters


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """Records of an offline run's file: LevelDB's log format, with W&B's seven bytes before it."""
    position, found = 7, b""
    while position + 7 <= len(content):
        if position % 32768 > 32768 - 7:  # no record begins in the rest of a block
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        position += 7 + length
        found += content[position - length : position]
        if kind in (1, 4):  # whole, or its last part
            yield found
            found = b""


def test_wandb_keeps_an_offline_run(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_PROJECT", "small")
    setup = setup_with(store, "wandb")
    table, notes = run(store, setup)
    assert notes == []
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    fitness, project = {}, ""
    for data in leveldb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        project = record.run.project or project
        values = {(each.key or each.nested_key[0]): json.loads(each.value_json) for each in record.history.item}
        if "fitness" in values:
            fitness[values["candidate"]] = values["fitness"]
    assert project == "small" and table.winner is not None
    assert fitness == {index: 100 * value for index, value in store.fitness_by_index("id-lab")}
