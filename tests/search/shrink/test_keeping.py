"""The smallest size that keeps a share of the full model's score."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from commands_here import refusal, run_command, worker_here
from local_workers import interrupted_after, local_pool

import moevolve
from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import load_run_config
from moevolve.search.config.run import RunConfig
from moevolve.search.results.kept import Kept
from moevolve.search.running.observer import Observer
from moevolve.search.shrink import keeping, shrink
from moevolve.search.shrink.choosing import parsed
from moevolve.search.shrink.dense import narrower_genomes
from moevolve.search.shrink.request import ShrinkRequest
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Calibration
from moevolve.workers.contract.facts import DenseFacts

DEMO = Path(__file__).parents[3] / "configs" / "demo"
COUNTS = list(range(1, 32))


@pytest.mark.parametrize("start", [0, 5, 20, 30])
@pytest.mark.parametrize("fewest", [1, 6, 21, 31])
def test_a_size_is_settled_by_going_down_while_enough_is_kept_or_up_until_it_is(start: int, fewest: int) -> None:
    place = keeping.settled(COUNTS, start, lambda count: count >= fewest)
    assert place is not None and COUNTS[place] == fewest


def test_without_time_no_smaller_size_is_tried_and_a_larger_one_is() -> None:
    tried: list[int] = []

    def keeps(count: int) -> bool:
        tried.append(count)
        return count >= 9

    assert keeping.settled(COUNTS, 19, keeps, is_time=lambda: False) == 19 and tried == [20]
    assert keeping.settled(COUNTS, 5, keeps, is_time=lambda: False) == 8
    assert keeping.settled(COUNTS, 5, lambda _: False) is None


def found(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    scorer: Callable[[int, bool], float],
    full: float = 1.0,
    preset: str = "prune",
) -> tuple[dict[str, Any], str, list[tuple[int, bool]], list[str]]:
    """What is found on the demo's model of 8 experts: settings, the sentence, what was tried, and all lines."""
    tried: list[tuple[int, bool]] = []

    def scored(_: Any, count: int, config: RunConfig) -> Kept | None:
        searched, genome = not config.name.endswith("-one-shots"), config.genome.model_dump()
        assert config.name == f"small-{count}" + "-one-shots" * (not searched) and genome["experts"] == count
        assert len(config.phases[0].init) == (5 if searched and preset == "prune" else 4)
        assert genome["calibration_most"] == genome["calibration_tokens"], "all sizes share one calibration"
        tried.append((count, searched))
        score = scorer(count, searched)
        return Kept(score, score - 0.002, score + 0.002) if score else None

    monkeypatch.setattr(keeping.SizeTrials, "_winner_kept", scored)
    monkeypatch.setattr(keeping, "full_kept", lambda *_: Kept(1.0, full, 1.0))
    monkeypatch.setattr("moevolve.store.reader.StoreReader.search", lambda *_: None)
    request = ShrinkRequest(
        str(DEMO / "model"), tasks=("demo-kin",), keep_score="99%", store=f"sqlite:///{folder / 'a.db'}"
    )
    data = {
        "name": "small",
        "model": {"path": str(DEMO / "model"), "device": "cpu"},
        "tasks": [{"name": "demo-kin"}],
        "genome": {"experts": 7},
        "preset": preset,
    }
    lines: list[str] = []
    probe: Any = SimpleNamespace(call=lambda function, *given: function(*given))
    workers: Any = SimpleNamespace(lend=None)
    settings, text = keeping.smallest(request, data, probe, workers, Observer(on_note=lines.append), monotonic())
    return settings, text, tried, lines


def test_sizes_are_bisected_by_one_shots_then_searched_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One-shot choices keep enough with 4 experts, and a search with 3."""
    settings, text, tried, lines = found(
        monkeypatch, tmp_path, lambda count, searched: 1.0 if count >= 4 - searched else 0.9 + count / 100
    )
    assert tried == [(4, False), (2, False), (3, False), (4, True), (3, True), (2, True)]
    assert (settings["name"], settings["genome"]["experts"]) == ("small-3", 3)
    assert text == (
        "--keep-score 99%: 3 of 8 experts keep 100.0 % (99.8 - 100.2) of the full model's score on `dev`; "
        "2 keep 92.0 % (91.8 - 92.2)"
    )
    assert lines[0].startswith("--keep-score 99%: 1 to 7 of 8 experts, of which at most 3 sizes are tried by one-shot")
    assert (
        lines[1] == "--keep-score 99%: 4 of 8 experts keep 100.0 % (99.8 - 100.2) by the best one-shot choice, enough"
    )
    assert lines[2].startswith("--keep-score 99%: 2 more by one-shot choices until about ")


def test_a_time_is_said_without_what_calibrating_took(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = count()
    monkeypatch.setattr(keeping, "time", SimpleNamespace(monotonic=lambda: 1000.0 * next(calls)))
    monkeypatch.setattr(keeping, "clock", lambda seconds: f"{seconds:.0f} s")

    def scorer(*_: Any) -> float:
        with Store.open(f"sqlite:///{tmp_path / 'a.db'}") as store:
            store.add_calibration("one", Calibration({}).with_cost(1, 700.0).to_bytes())
        return 1.0

    *_, lines = found(monkeypatch, tmp_path, scorer)
    assert [line.rpartition("until about ")[2] for line in lines if "until about" in line] == ["600 s", "1000 s"]


def test_a_size_whose_search_has_only_the_one_shots_that_keep_too_little_is_not_searched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings, _, tried, _ = found(
        monkeypatch, tmp_path, lambda count, _: 1.0 if count >= 4 else 0.9 + count / 100, preset="repaired"
    )
    assert tried == [(4, False), (2, False), (3, False), (4, True)] and settings["name"] == "small-4"


def test_candidates_that_all_fail_keep_too_little_and_a_searched_one_may_be_worse_than_a_one_shot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings, text, tried, _ = found(
        monkeypatch, tmp_path, lambda count, searched: 0.0 if count < 5 else 1.0 if count > 5 or not searched else 0.9
    )
    assert tried[-2:] == [(5, True), (6, True)] and settings["name"] == "small-6"
    assert text.endswith("; 5 keep 90.0 % (89.8 - 90.2)")


def test_the_best_one_shot_choice_alone_is_repaired_as_a_searchs_best_are() -> None:
    """What is repaired at length takes longest, and a search of few candidates evaluates none of it again."""
    settings = {"model": {"path": str(DEMO / "model")}, "tasks": [{"name": "demo-kin"}], "genome": {"experts": 4}}
    searched = parsed(settings | {"name": "small", "preset": "repaired"})
    assert keeping.one_shots(searched).phases == searched.phases
    longer = parsed(
        settings
        | {
            "name": "small",
            "preset": "repaired",
            "phases": [
                {"kind": "prune", "evaluations": 30, "initial": 8, "init": ["hope", "random"], "repair": {}},
                {"kind": "repair", "evaluations": 6},
            ],
        }
    )
    assert [(one.kind, one.evaluations) for one in keeping.one_shots(longer).phases] == [("prune", 1), ("repair", 1)]


def test_what_no_size_keeps_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--keep-score 99%: 7 of 8 experts keep 97.0 % \(96.8 - 97.2\), and fewer"):
        found(monkeypatch, tmp_path, lambda count, _: 0.9 + count / 100)


def test_too_few_rows_are_said_after_the_first_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`dev` has so few rows that .* only known to keep 91.6 % with"):
        found(monkeypatch, tmp_path, lambda *_: 1.0, full=0.916)


def test_networks_of_a_dense_model_become_narrower_by_equal_steps() -> None:
    genomes = narrower_genomes(DenseFacts(5, 128, 1024, True, False, 4, 2, 32, 32))
    assert list(genomes) == list(range(32, 1024, 32)), "as layers divide their neurons evenly"
    assert genomes[512] == {"kind": "tomoe", "budget": 0.5}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--keep-score", "99%", "--experts", "4"), "give one of --experts"),
        (("--keep-score", "100%"), "--keep-score 100%: give a share below 100%, such as 99%"),
        (("--keep-score", "most"), "--keep-score most: give a share below 100%"),
        (("--keep-score", "99%", "--dry-run"), "there is no --dry-run"),
        (("--keep-score", "99%", "--batch", "2"), "--context and --batch are of --size and --speed"),
    ],
)
def test_what_a_share_can_not_be_combined_with_is_refused(options: tuple[str, ...], error: str) -> None:
    assert error in refusal("shrink", DEMO / "model", "--task", "demo-kin", *options)


COMMAND = (
    *("shrink", DEMO / "model", "--task", "demo-kin", "--keep-score", "80%", "--repair", "none", "-o", "small"),
    *("--evaluations", "6", "--guard-prompts", "7", "--guard-tokens", "16", "--force", "--json"),
    *("--set", "workers.count=1", "--set", "final.random_baselines=0"),
    *("--set", "skip_phases_at=0.99"),  # as presets of repaired searches have it
    *("--set", "tasks.0.counts={calibration: 16, search: 16, dev: 100, test: 16}"),
)


@pytest.mark.slow
def test_the_command_goes_on_after_an_interruption_and_shows_the_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    (choice,) = page["choices"]
    count = page["experts"]
    assert choice.startswith(f"--keep-score 80%: {count} of 8 experts keep ")
    assert page["table"]["search"] == f"small-{count}" and page["sizes"]
    assert list(page["seconds"])[:2] == ["sizes", "first look"]
    kept = {each["search"]: each["kept"] for each in page["sizes"]}
    assert kept[f"small-{count}"]["low"] >= 0.8 > kept[f"small-{count - 1}"]["low"]
    assert (tmp_path / "small.shrink" / "sizes.svg").read_text().count("</svg>") == 1
    assert load_run_config(tmp_path / "small.shrink" / "run.yaml").name == f"small-{count}"
    with moevolve.open_reader(f"sqlite:///{tmp_path / 'moevolve.db'}") as store:
        after = {each.search.name: each.search for each in store.searches()}
    assert all(after[name].id == search.id for name, search in before.items())
    assert {search.status for search in after.values()} == {"finished"}
    report = run_command(tmp_path, "report", f"small-{count}", "-o", "report.html")
    assert report.returncode == 0 and "Score kept against size" in (tmp_path / "report.html").read_text()
