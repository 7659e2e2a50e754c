"""Experts that are as narrow as a speed needs, and the check of what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands_here import worker_here
from demo_chats import write_chats

from moevolve.evaluators.errors import UserError
from moevolve.search.shrink.budget import SpeedBudget, budget_of
from moevolve.search.shrink.guard import Checks
from moevolve.search.shrink.loops import Loops
from moevolve.search.shrink.page import Speed, Written
from moevolve.search.shrink.request import ShrinkRequest
from moevolve.search.shrink.run_file import choices_of
from moevolve.search.shrink.speed import SHARES, chosen_share, measured_speed, slower_than_asked
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.profiling.report import ProfiledModel

DEMO = Path(__file__).parents[3] / "configs" / "demo"


def asked(times: float, sequences: int = 1) -> SpeedBudget:
    return SpeedBudget(f"{times}x", times, sequences, None)


def speed(shrunk: float) -> Speed:
    return Speed(1, "a device", 100.0, shrunk, 3000, None)


def seconds(fixed: float, experts: float) -> dict[float, float]:
    """Seconds per token of a model whose experts take time in proportion to their width."""
    return {share: fixed + share * experts for share in SHARES}


def test_the_share_is_the_largest_that_is_fast_enough() -> None:
    for times in (1.1, 3.0):
        share, _ = chosen_share(asked(times), seconds(1.0, 4.0))
        assert 5.0 / (1.0 + 4.0 * share) == pytest.approx(1.03 * times, rel=1e-3)


def test_a_width_that_seems_slower_than_a_wider_one_is_taken_for_as_fast() -> None:
    found = {1.0: 4.0, 0.5: 3.0, 0.25: 3.5, 0.125: 1.0}
    share, said = chosen_share(asked(2.0, sequences=8), found)
    assert share == pytest.approx(0.125 + 0.125 * (4 / 2.06 - 1) / (3 - 1), abs=1e-4)
    assert "generates 2 tokens/s with 8 sequences at once" in said and "2.06 times as many" in said


def test_a_speed_out_of_reach_is_refused_with_what_is_reachable() -> None:
    with pytest.raises(UserError, match=r"--speed 4.0x: with 12.5% of their neurons.* 3.33 times as fast with one"):
        chosen_share(asked(4.0), seconds(1.0, 4.0))


def test_a_checkpoint_may_be_slower_by_what_timings_differ() -> None:
    assert slower_than_asked(asked(1.5), speed(146.0)) is None
    said = "it generates 1.40 times as many tokens/s as the full model, fewer than --speed 1.5x"
    assert slower_than_asked(asked(1.5), speed(140.0)) == said


def test_a_speed_is_a_factor_above_one() -> None:
    request = ShrinkRequest("model", data=("chats.jsonl",), speed="1.5x", batch=8, context="1k")
    assert budget_of(request) == SpeedBudget("1.5x", 1.5, 8, 1024)
    for wrong in ("fast", "1x", "0.5x", "2"):
        with pytest.raises(UserError, match=f"--speed {wrong}: give a factor above 1, such as 1.5x"):
            budget_of(ShrinkRequest("model", data=("chats.jsonl",), speed=wrong))
    with pytest.raises(UserError, match="give one of --experts"):
        budget_of(ShrinkRequest("model", data=("chats.jsonl",), speed="2x", experts="50%"))


def test_only_code_that_an_export_has_written_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copied checkpoint may bring code of others, which the request hasn't trusted."""

    trusted: list[bool] = []

    def profiled(models: list[ProfiledModel], *_: Any) -> Any:
        trusted.extend(model.trust_remote_code for model in models)
        raise UserError("seen")

    monkeypatch.setattr("moevolve.workers.profiling.run.profile_models", profiled)
    model = ModelConfig(str(DEMO / "model"), device="cpu")
    for form in ("native", "stock"):
        with pytest.raises(UserError, match="seen"):
            measured_speed(model, Written(tmp_path, form, 1, ()), 1, None, lambda _: None)  # type: ignore[arg-type]
    assert trusted == [False, True, False, False]


def test_a_task_that_there_isnt_is_said_at_once(in_process: Any) -> None:
    done = in_process("shrink", DEMO / "model", "--task", "nonexistent", "--speed=2x", "-o", "small", "--dry-run")
    assert done.returncode == 2 and "nonexistent" in done.stderr


def measured(config: Any, budget: SpeedBudget) -> dict[float, float]:
    """In place of `seconds_by_share`: the demo's experts are too small to make a difference."""
    return seconds(0.01, 0.09)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moevolve.search.shrink.choosing.seconds_by_share", measured)


@pytest.mark.usefixtures("timed")
def test_a_dry_run_has_the_width_and_says_why(tmp_path: Path, in_process: Any) -> None:
    write_chats(tmp_path / "chats.jsonl", 100)
    command = (
        "shrink",
        DEMO / "model",
        "--data",
        "chats.jsonl",
        "--speed",
        "1.5x",
        "-o",
        "small",
        "--dry-run",
    )
    done = in_process(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "experts: 8\n  neuron_share: 0.6081\n" in done.stdout and "preset: counts\n" in done.stdout
    (choice,) = choices_of(tmp_path / "small.shrink" / "run.yaml")
    assert (
        choice.startswith("--speed 1.5x: the full model generates 10 tokens/s with one sequence") and "60.8%" in choice
    )
    done = in_process(*command, "--repair", "none", cwd=tmp_path)
    assert done.returncode == 2 and "--speed 1.5x: narrower experts need a repair" in done.stderr


@pytest.mark.usefixtures("timed")
def test_a_checkpoint_that_turns_out_slower_is_an_error_unless_forced(
    tmp_path: Path, in_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(*_: Any) -> Checks:
        return (), Loops(1, 16, full=0, shrunk=0, low=0.0, high=0.1, p=1.0, power=0.0)

    def timed(config: Any, written: Written, *_: Any) -> Speed:
        assert json.loads((written.directory / "config.json").read_text())["num_local_experts"] == 8
        return speed(110.0)

    monkeypatch.setattr("moevolve.search.shrink.shrink.check_winner", checked)
    monkeypatch.setattr("moevolve.search.shrink.shrink.measured_speed", timed)
    write_chats(tmp_path / "chats.jsonl", 100)
    phase = "{kind: capacity, evaluations: 1, initial: 1, init: [equal], repair: {neurons: true, tokens: 256}}"
    wanted = (f"phases=[{phase}]", "engine.chat_template=none", "final.random_baselines=0")
    settings = (word for each in wanted for word in ("--set", each))
    command = ("shrink", DEMO / "model", "--data", "chats.jsonl", "--speed", "3x", "-o", "small")
    command = (*command, *settings)
    with worker_here():
        done = in_process(*command, "--force", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = json.loads(done.stdout)
    assert page["experts"] == page["experts_full"] == 8 and page["first_look"]["routing"] == []
    assert (page["speed"]["full"], page["speed"]["shrunk"]) == (100.0, 110.0)
    best = page["table"]["entries"][-1]
    # A share of 0.25 of the experts' neurons, which are most of the parameters.
    assert 0.3 < best["parameters"] / page["table"]["parameters_full"] < 0.45
    done = in_process(*command, cwd=tmp_path)
    said = "it generates 1.10 times as many tokens/s as the full model, fewer than --speed 3x"
    assert done.returncode == 1 and f"{said}; give the same command again" in " ".join(done.stderr.split())
    assert (tmp_path / "small" / "config.json").is_file()
