"""The smallest size that keeps a share of the full model's score."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands_here import run_command, worker_here
from local_workers import interrupted_after, local_pool
from shrink_samples import shrink_record

import moevolve
from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import load_run_config, parse_run_config, with_preset
from moevolve.search.config.run import RunConfig
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.results.kept import Kept
from moevolve.search.running.observer import Observer
from moevolve.search.shrink import keeping, shrink
from moevolve.search.shrink.dense import narrower_genomes
from moevolve.search.shrink.goal import Amount
from moevolve.search.shrink.record import Journal, ShrinkRecord, SizeTrial, find_shrink
from moevolve.store.repository import Store
from moevolve.workers.contract.facts import DenseFacts

DEMO = Path(__file__).parents[3] / "configs" / "demo"


SETTINGS: dict[str, Any] = {
    "name": "small",
    "model": {"path": str(DEMO / "model"), "device": "cpu"},
    "tasks": [{"name": "demo-kin"}],
}
SHARE = Amount("keep_score", "99%", 0.99)


def settings(preset: str, experts: int, **changes: Any) -> RunConfig:
    given = SETTINGS | {"genome": {"experts": experts}, "preset": preset} | changes
    return parse_run_config(with_preset(given, "test"), "test")


def begun(folder: Path, store: Store) -> Journal:
    """The record of a shrink whose size is to be found."""
    return Journal(store, Observer(), shrink_record(folder))


def found(
    monkeypatch: pytest.MonkeyPatch, folder: Path, scorer: Callable[[int], float], full: float = 1.0
) -> tuple[RunConfig, str, list[int], list[str], ShrinkRecord]:
    """What is found on the demo's model of 8 experts: settings, a sentence, sizes tried, all lines and the record."""
    tried: list[int] = []

    def searched(setup: SearchSetup, *_: Any) -> None:
        config, genome = setup.config, setup.config.genome.model_dump()
        count = genome["experts"]
        assert config.name == f"small-{count}-one-shots" and len(config.phases[0].init) == 4
        assert genome["calibration_most"] == genome["calibration_tokens"], "all sizes share one calibration"
        tried.append(count)

    def kept(*_: Any) -> Kept | None:
        score = scorer(tried[-1])
        return Kept(score, score - 0.002, score + 0.002) if score else None

    monkeypatch.setattr(keeping, "execute", searched)
    monkeypatch.setattr(keeping, "winner_kept", kept)
    monkeypatch.setattr(keeping, "full_kept", lambda *_: Kept(1.0, full, 1.0))
    lines: list[str] = []
    probe: Any = SimpleNamespace(call=lambda function, *given: function(*given))
    workers: Any = SimpleNamespace(lend=local_pool)
    with Store.open(f"sqlite:///{folder / 'a.db'}") as store:
        journal, observer = begun(folder, store), Observer(on_note=lines.append)
        config, text = keeping.smallest(SHARE, settings("prune", 7), store, journal, probe, workers, observer)
        stored = find_shrink(store, "small")
    assert stored == journal.record
    return config, text, tried, lines, stored


def test_sizes_are_bisected_by_one_shots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config, text, tried, lines, record = found(
        monkeypatch, tmp_path, lambda count: 0.0 if count < 3 else 1.0 if count >= 4 else 0.9
    )
    assert tried == [4, 2, 3] and (config.name, config.genome.model_dump()["experts"]) == ("small-4", 4)
    assert "4 of 8 experts keep 100.0 % (99.8 - 100.2)" in text and len(lines) >= 4
    assert record.unit == "of 8 experts"
    assert [(trial.size, trial.enough, trial.searched) for trial in record.sizes] == [
        (4, True, False),
        (2, False, False),
        (3, False, False),
    ]
    assert record.sizes[1].kept is None, "all failed"


def test_a_share_that_no_size_keeps_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"7 of 8 experts keep .* give a smaller share"):
        found(monkeypatch, tmp_path, lambda count: 0.9 + count / 100)


def test_a_winner_that_keeps_too_little_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trials = tuple(SizeTrial(size, f"small-{size}-one-shots", False, None, size > 2) for size in (4, 2, 3))
    for low in (0.985, 0.99):
        kept = Kept(0.995, low, 1.0)
        monkeypatch.setattr(keeping, "winner_kept", lambda *_, kept=kept: kept)
        with Store.open(f"sqlite:///{tmp_path / 'a.db'}") as opened:
            journal = begun(tmp_path, opened)
            journal.note(sizes=trials, unit="of 8 experts")
            store: Any = SimpleNamespace(search=lambda name: name)
            if low < 0.99:
                with pytest.raises(UserError, match=r"3 of 8 experts keeps 99.5 % \(98.5 - 100.0\).* give 4"):
                    keeping.refuse_losing(journal, store, SHARE, settings("prune", 3))
            else:
                keeping.refuse_losing(journal, store, SHARE, settings("prune", 3))
            assert journal.record.sizes[-1].searched and journal.record.sizes[-1].enough == (low >= 0.99)


def test_the_best_one_shot_choice_alone_is_repaired_as_a_searchs_best_are() -> None:
    """What is repaired at length takes longest, and a search of few candidates evaluates none of it again."""
    searched = settings("repaired", 4)
    assert keeping.one_shots(searched).phases == searched.phases
    phases = [
        {"kind": "prune", "evaluations": 30, "initial": 8, "init": ["hope", "random"], "repair": {}},
        {"kind": "repair", "evaluations": 6},
    ]
    longer = keeping.one_shots(settings("repaired", 4, phases=phases))
    assert [(one.kind, one.evaluations) for one in longer.phases] == [("prune", 1), ("repair", 1)]


def test_too_few_rows_are_said_after_the_first_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`dev` has so few rows that .* only known to keep 91.6 % with"):
        found(monkeypatch, tmp_path, lambda *_: 1.0, full=0.916)


def test_networks_of_a_dense_model_become_narrower_by_equal_steps() -> None:
    genomes = narrower_genomes(DenseFacts(5, 128, 1024, True, False, 4, 2, 32, 32))
    assert list(genomes) == list(range(32, 1024, 32)), "as layers divide their neurons evenly"
    assert genomes[512] == {"kind": "tomoe", "budget": 0.5}


COMMAND = (
    *("shrink", DEMO / "model", "--task", "demo-kin", "--keep-score", "80%", "--repair", "none", "-o", "small"),
    *("--evaluations", "6", "--force", "--json"),
    *("--set", "workers.count=1", "--set", "final.random_baselines=0"),
    *("--set", "skip_phases_at=0.99"),  # as presets of repaired searches have it
    *("--set", "tasks.0.counts={calibration: 16, search: 16, dev: 100, test: 16}"),
)


@pytest.mark.slow
def test_the_command_goes_on_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with worker_here():
        monkeypatch.setattr(shrink, "ray_pool", lambda setup, **_: local_pool(setup, interrupted_after(7)))
        done = run_command(tmp_path, *COMMAND)
        assert done.returncode == 130 and "give the same command again" in done.stderr, done.stderr
        with moevolve.open_reader(f"sqlite:///{tmp_path / 'moevolve.db'}") as store:
            before = {each.search.name: each.search for each in store.searches()}
        assert list(before) == ["small-4-one-shots", "small-2-one-shots"]
        monkeypatch.setattr(shrink, "ray_pool", lambda setup, **_: local_pool(setup))
        done = run_command(tmp_path, *COMMAND)
    assert done.returncode == 0, done.stderr
    page = json.loads(done.stdout)
    record, count = page["record"], page["experts"]
    (choice,) = record["choices"]
    assert choice.startswith(f"--keep-score 80%: {count} of 8 experts keep ")
    assert page["table"]["search"] == record["search"] == f"small-{count}"
    assert {"settings", "look", "sizes", "search", "checks", "export"} <= record["seconds"].keys()
    kept = {each["search"]: each["kept"] for each in record["sizes"]}
    assert kept[f"small-{count}"]["low"] >= 0.8
    assert load_run_config(tmp_path / "small.shrink" / "run.yaml").name == f"small-{count}"
    with moevolve.open_reader(f"sqlite:///{tmp_path / 'moevolve.db'}") as store:
        after = {each.search.name: each.search for each in store.searches()}
    assert all(after[name].id == search.id for name, search in before.items())
    assert {search.status for search in after.values()} == {"finished"}
