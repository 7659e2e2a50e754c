"""The smallest size that keeps a share of the full model's score."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands_here import refusal, run_command, worker_here
from local_workers import interrupted_after, local_pool

import moevolve
from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import load_run_config
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.results.kept import Kept, SizePoint
from moevolve.search.running.launch import set_up_new
from moevolve.search.running.observer import Observer
from moevolve.search.shrink import keeping, shrink
from moevolve.search.shrink.choosing import parsed
from moevolve.search.shrink.dense import narrower_genomes
from moevolve.search.shrink.request import ShrinkRequest
from moevolve.workers.contract.facts import DenseFacts

DEMO = Path(__file__).parents[3] / "configs" / "demo"


def found(
    monkeypatch: pytest.MonkeyPatch, folder: Path, scorer: Callable[[int], float], full: float = 1.0
) -> tuple[dict[str, Any], str, list[int], list[str]]:
    """What is found on the demo's model of 8 experts: settings, the sentence, the sizes tried, and all lines."""
    tried: list[int] = []

    def searched(setup: SearchSetup, *_: Any) -> None:
        config, genome = setup.config, setup.config.genome.model_dump()
        count = genome["experts"]
        assert config.name == f"small-{count}-one-shots" and len(config.phases[0].init) == 4
        assert genome["calibration_most"] == genome["calibration_tokens"], "all sizes share one calibration"
        tried.append(count)

    def kept(*_: Any) -> SizePoint | None:
        score = scorer(tried[-1])
        return SizePoint("", 0.5, Kept(score, score - 0.002, score + 0.002)) if score else None

    monkeypatch.setattr(keeping, "execute", searched)
    monkeypatch.setattr(keeping, "winner_kept", kept)
    monkeypatch.setattr(keeping, "full_kept", lambda *_: Kept(1.0, full, 1.0))
    request = ShrinkRequest(
        str(DEMO / "model"), tasks=("demo-kin",), keep_score="99%", store=f"sqlite:///{folder / 'a.db'}"
    )
    data = {
        "name": "small",
        "model": {"path": str(DEMO / "model"), "device": "cpu"},
        "tasks": [{"name": "demo-kin"}],
        "genome": {"experts": 7},
        "preset": "prune",
    }
    lines: list[str] = []
    probe: Any = SimpleNamespace(call=lambda function, *given: function(*given))
    settings, text = keeping.smallest(request, data, probe, local_pool, Observer(on_note=lines.append))
    return settings, text, tried, lines


def test_sizes_are_bisected_by_one_shots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings, text, tried, lines = found(
        monkeypatch, tmp_path, lambda count: 0.0 if count < 3 else 1.0 if count >= 4 else 0.9
    )
    assert tried == [4, 2, 3] and (settings["name"], settings["genome"]["experts"]) == ("small-4", 4)
    assert text == (
        "--keep-score 99%: 4 of 8 experts keep 100.0 % (99.8 - 100.2) of the full model's score on `dev` by the best "
        "one-shot choice; 3 keep 90.0 % (89.8 - 90.2)"
    )
    assert lines[0].startswith("--keep-score 99%: 1 to 7 of 8 experts, of which at most 3 sizes are tried by one-shot")
    kept = "--keep-score 99%: 4 of 8 experts keep 100.0 % (99.8 - 100.2) by the best one-shot choice, enough"
    assert lines[1] == kept and "2 of 8 experts keep nothing, since all failed" in lines[2] and len(lines) == 4


def test_where_no_one_shot_choice_keeps_enough_the_largest_size_is_searched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings, text, tried, _ = found(monkeypatch, tmp_path, lambda count: 0.9 + count / 100)
    assert tried == [4, 6, 7] and settings["name"] == "small-7" and text.endswith("; 6 keep 96.0 % (95.8 - 96.2)")


@pytest.mark.parametrize(
    ("experts", "advice"), [(3, "the next larger size is 4 of 8 experts, by --experts"), (7, "fewer")]
)
def test_a_winner_that_keeps_too_little_is_refused(monkeypatch: pytest.MonkeyPatch, experts: int, advice: str) -> None:
    settings = {"model": {"path": str(DEMO / "model")}, "tasks": [{"name": "demo-kin"}], "genome": {"experts": experts}}
    setup = set_up_new(parsed(settings | {"name": "small", "preset": "prune"}))
    request = ShrinkRequest(str(DEMO / "model"), tasks=("demo-kin",), keep_score="99%")
    store: Any = SimpleNamespace(search=lambda name: name)
    for low in (0.985, 0.99):
        point = SizePoint("small", 0.5, Kept(0.995, low, 1.0))
        monkeypatch.setattr(keeping, "winner_kept", lambda *_, point=point: point)
        if low < 0.99:
            with pytest.raises(UserError, match=rf"{experts} of 8 experts keep 99.5 % \(98.5 - 100.0\).* and {advice}"):
                keeping.refuse_too_little(request, store, setup)
        else:
            keeping.refuse_too_little(request, store, setup)


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
    ],
)
def test_what_a_share_can_not_be_combined_with_is_refused(options: tuple[str, ...], error: str) -> None:
    assert error in refusal("shrink", DEMO / "model", "--task", "demo-kin", *options)


COMMAND = (
    *("shrink", DEMO / "model", "--task", "demo-kin", "--keep-score", "80%", "--repair", "none", "-o", "small"),
    *("--evaluations", "6", "--force", "--json"),
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
    assert kept[f"small-{count}"]["low"] >= 0.8
    assert (tmp_path / "small.shrink" / "sizes.svg").read_text().count("</svg>") == 1
    assert load_run_config(tmp_path / "small.shrink" / "run.yaml").name == f"small-{count}"
    with moevolve.open_reader(f"sqlite:///{tmp_path / 'moevolve.db'}") as store:
        after = {each.search.name: each.search for each in store.searches()}
    assert all(after[name].id == search.id for name, search in before.items())
    assert {search.status for search in after.values()} == {"finished"}
    report = run_command(tmp_path, "report", f"small-{count}", "-o", "report.html")
    assert report.returncode == 0 and "Score kept against size" in (tmp_path / "report.html").read_text()
