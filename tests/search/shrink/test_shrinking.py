"""One command on the demo model in FP8 and a file of chats: a search, a page, and a pruned checkpoint in FP8."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands_here import run_command, worker_here
from demo_chats import write_chats
from packed_checkpoints import write
from pydantic import TypeAdapter
from safetensors.torch import load_file

import moevolve
from moevolve.search.config.files import load_run_config
from moevolve.search.shrink import guard, shrink
from moevolve.workers.checkpoints.loading import load_model
from moevolve.workers.contract.settings import ModelConfig

DEMO = Path(__file__).parents[3] / "configs" / "demo"
BLOCK = 32
GENERAL = ("questions", "code", "json", "german", "spanish")
SETTINGS = ("engine.chat_template=none", "workers.count=1", "final.random_baselines=1")
SET = tuple(word for setting in SETTINGS[:2] for word in ("--set", setting))
COMMAND = (
    *("shrink", "packed", "--data", "chats.jsonl", "--experts", "50%", "--time", "1s", "-o", "small"),
    "--force",
    *(word for setting in SETTINGS for word in ("--set", setting)),
)


def write_fp8(folder: Path) -> None:
    """The demo model with its layers' matrices in FP8, with a scale per block; the router stays as it is."""
    config = ModelConfig(str(DEMO / "model"), device="cpu")
    packed: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}
    for name, tensor in load_file(DEMO / "model" / "model.safetensors").items():
        if tensor.ndim != 2 or ".layers." not in name or name.endswith("gate.weight"):
            continue
        blocks = tensor.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        scales = blocks.abs().amax(dim=(1, 3)) / 448  # the largest number of E4M3
        codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        packed |= {name: codes.flatten(2).flatten(0, 1), f"{name}_scale_inv": scales}
        plain[name] = (codes.double() * scales[:, None, :, None]).flatten(2).flatten(0, 1).numpy()
    settings = {
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
    }
    model, tokenizer = load_model(config)
    write(model, tokenizer, folder, packed, plain, quantization_config=settings)


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder in which the command has run, with workers in this process, and what it answered."""
    folder = tmp_path_factory.mktemp("shrunk")
    write_fp8(folder)
    write_chats(folder / "chats.jsonl", 100)
    few = [replace(probe, split=probe.split.head(1)) for probe in guard.general_set()]
    with worker_here(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "general_set", lambda: few)
        done = run_command(folder, *COMMAND, "--json")
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout) | {"lines": done.stderr.splitlines()}


def test_the_page_and_the_checkpoint_are_of_one_search(shrunk: tuple[Path, dict[str, Any]]) -> None:
    folder, page = shrunk
    record = page["record"]
    assert (page["experts_full"], page["experts"], record["written"]["form"]) == (8, 4, "source")
    labels = [entry["label"] for entry in page["table"]["entries"]]
    assert labels[0] == "full model" and labels[-1] == "best found"
    assert list(record["seconds"]) == ["data", "settings", "look", "plan", "search", "checks", "export", "speed"]
    kept, choice = record["choices"]
    assert kept == "--experts 50%: every layer keeps 4 of 8 experts"
    assert choice.startswith("--time 1s: 4 candidates, the fewest that there can be, although they take longer")
    best = page["table"]["entries"][-1]
    assert best["parameters"] < page["table"]["parameters_full"]
    (test,) = (score for score in best["scores"] if score["split"] == "test")
    assert test["low"] <= test["score"] <= test["high"]
    (look,) = record["look"]
    assert look["score"] > 0.9 and look["least"] == 0.2 and look["rows"] == 30
    assert len(look["examples"]) == 3
    for line in look["examples"]:
        expected, answered = re.findall("(?:expected|answered) ('.*?')", line)
        assert expected == answered
    check, *general = record["checks"]["tasks"]
    assert check["prompts"] == 7 and check["recovery"] > 0.5
    loops = record["checks"]["loops"]
    assert loops["tokens"] == 16 and loops["prompts"] == sum(each["prompts"] for each in record["checks"]["tasks"])
    assert [each["task"] for each in general] == [f"general {name}" for name in GENERAL]
    assert not any(each["faults"] for each in general)
    card = (folder / "small" / "README.md").read_text()
    assert all(f"| {each['task']}" in card for each in record["checks"]["tasks"])
    assert f"answers of up to 16 tokens to {loops['prompts']} held-out prompts: the full model's 0.0%" in card
    assert (
        check["task"] == "chats" and check["perplexity"] > 0.5 and 0 < check["agreement"] <= 1 and check["faults"] == []
    )
    shown = TypeAdapter(moevolve.ShrinkResult).validate_python(page)
    assert [side["experts"] for side in shown.sides()] == ["8 in each of 5 layers", "4 in each of 5 layers"]
    assert f"small (source checkpoint of {best['ref']})" in " ".join(shown.lines()) and kept in shown.lines()
    source, small = (load_file(folder / name / "model.safetensors") for name in ("packed", "small"))
    assert record["written"]["weight_bytes"] == (folder / "small" / "model.safetensors").stat().st_size
    router = "model.layers.0.block_sparse_moe.gate.weight"
    assert small[router].shape[0] == 4 and source[router].shape[0] == 8
    expert = "model.layers.0.block_sparse_moe.experts.{}.w1.weight"
    assert small[expert.format(0)].dtype == torch.float8_e4m3fn
    kept = [small[expert.format(new)].view(torch.uint8) for new in range(4)]
    there = [source[expert.format(old)].view(torch.uint8) for old in range(8)]
    assert all(any(torch.equal(one, other) for other in there) for one in kept), "byte for byte"


def test_every_step_is_said_from_the_start_and_the_pilots_evaluations_are_kept(
    shrunk: tuple[Path, dict[str, Any]],
) -> None:
    folder, page = shrunk
    lines = iter(page["lines"])
    for said in (
        "shrink: --time 1s: everything is to end by ",
        "shrink: starting",
        "shrink: reading the data",
        "shrink: choosing settings",
        "shrink: starting Ray",
        "shrink: asking the full model",
        "shrink: pilot: evaluating",
        "shrink: --time 1s: 4 candidates, the fewest ",
        "shrink: evaluating",
        "shrink: re-ranking and final scores",
        "shrink: checking the winner's answers: 7 prompts",
        "shrink: writing the checkpoint",
    ):
        assert any(line.startswith(said) for line in lines), said
    with moevolve.open_reader(f"sqlite:///{folder / 'moevolve.db'}") as store:
        begun = store.search("small").created_at
        first = store.individual("small:0").evaluations
    assert begun is not None and first[0].created_at is not None and first[0].created_at < begun


def test_the_same_command_again_prints_what_is_recorded(
    shrunk: tuple[Path, dict[str, Any]], in_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, page = shrunk
    monkeypatch.setattr(shrink, "ModelProbe", None)  # nothing is loaded
    again = in_process(*COMMAND, cwd=folder)
    assert again.returncode == 0, again.stderr
    said = " ".join(again.stdout.split())
    assert page["gain"]["over"].startswith("the best one-shot choice (")
    assert "best found" in said and "small (source checkpoint of small:" in said
    config = load_run_config(folder / "small.shrink" / "run.yaml")
    assert [task.name for task in config.tasks] == [str(folder / "small.shrink" / "tasks" / "chats.yaml")]
    with moevolve.open_reader(f"sqlite:///{folder / 'moevolve.db'}") as store:
        assert store.search("small").config_hash == config.config_hash
        assert len(store.individual(page["table"]["winner"]).exports) == 1


def test_what_is_beyond_the_limits_is_named(
    shrunk: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, page = shrunk
    check = TypeAdapter(moevolve.ShrinkResult).validate_python(page).record.checks.tasks[0]
    monkeypatch.setattr(guard, "_LEAST_RECOVERY", 2.0)
    monkeypatch.setattr(guard, "_MOST_PERPLEXITY", 1.0)
    (fault,) = guard.faults_of(check)
    assert fault == f"keeps {100 * check.recovery:.0f} % of the full model's score, less than 200%"
    assert check.perplexity > 1, "its answers are graded, so that it isn't judged"


def test_another_request_of_the_same_name_is_refused_by_what_differs(
    shrunk: tuple[Path, dict[str, Any]], in_process: Any
) -> None:
    folder, _ = shrunk
    run_file = folder / "small.shrink" / "run.yaml"
    before = run_file.read_bytes()
    other = [word if word != "50%" else "25%" for word in map(str, COMMAND)]
    done = in_process(*other, cwd=folder)
    assert done.returncode == 2 and "--experts was 50%, not 25%" in " ".join(done.stderr.split())
    rows = (folder / "chats.jsonl").read_text()
    (folder / "chats.jsonl").write_text(rows + rows.splitlines()[0] + "\n")
    done = in_process(*COMMAND, cwd=folder)
    (folder / "chats.jsonl").write_text(rows)
    assert done.returncode == 2 and "--data chats.jsonl has changed" in " ".join(done.stderr.split())
    assert run_file.read_bytes() == before


@pytest.mark.parametrize("choices", [False, True])
def test_what_the_full_model_cant_do_is_not_searched_for(tmp_path: Path, in_process: Any, choices: bool) -> None:
    write_chats(tmp_path / "chats.jsonl", 100)
    rows = [json.loads(line)["messages"] for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    wrong = [{"prompt": asked["content"], "answer": f"about {said['content']}"} for asked, said in rows]
    if choices:  # the right answer is there, and is always preferred
        wrong = [
            row | {"choices": [said["content"], row["answer"]]} for row, (_, said) in zip(wrong, rows, strict=True)
        ]
    (tmp_path / "wrong.jsonl").write_text("".join(json.dumps(row) + "\n" for row in wrong))
    command = ("shrink", DEMO / "model", "--data", "wrong.jsonl", "--experts", "4", "-o", "small", *SET)
    done = in_process(*command, cwd=tmp_path)
    said = " ".join(done.stderr.split())
    least = "50.0" if choices else "20.0"
    assert done.returncode == 2, done.stdout
    refused = f"error: wrong: the full model scores 0.0 % on 30 rows of `search` (a search needs {least} %): asked "
    assert refused in said
    assert "expected 'about " in said and "leave the answers out of the file" in said and "--force" in said
    assert said.count("asked ") == 4, "three examples before the message"
    assert [path.name for path in tmp_path.iterdir() if path.name != "chats.jsonl"] == ["wrong.jsonl"]
    earlier = tmp_path / "small.shrink" / "earlier"
    earlier.parent.mkdir()
    earlier.touch()
    assert in_process(*command, cwd=tmp_path).returncode == 2 and earlier.exists(), "what was there before stays"


def test_a_full_model_without_a_right_answer_passes_no_guard(tmp_path: Path, in_process: Any) -> None:
    write_chats(tmp_path / "chats.jsonl", 100)
    text = (tmp_path / "chats.jsonl").read_text()
    (tmp_path / "wrong.jsonl").write_text(text.replace('"assistant", "content": "', '"assistant", "content": "about '))
    limits = ("--repair", "none", "--evaluations", "4", "--set", "final.random_baselines=0")
    command = ("shrink", DEMO / "model", "--data", "wrong.jsonl", "--experts", "4", "-o", "small", *SET, *limits)
    with worker_here():
        done = in_process(*command, "--force", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = "can't be compared with the full model on `test`: the full model's own score is 0"
    assert said in " ".join(done.stdout.split()) and said in (tmp_path / "small" / "README.md").read_text()
    done = in_process(*command, cwd=tmp_path)
    assert done.returncode == 0 and said in " ".join(done.stdout.split()), "what is recorded is printed again"


def test_a_folder_that_is_taken_is_refused_before_anything_runs(tmp_path: Path, in_process: Any) -> None:
    write_chats(tmp_path / "chats.jsonl", 100)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "file").touch()
    command = ("shrink", DEMO / "model", "--data", "chats.jsonl", "--experts", "4", "-o", "small", "--dry-run")
    done = in_process(*command, cwd=tmp_path)
    assert done.returncode == 2 and "error: --output small exists and isn't empty" in done.stderr
    assert not (tmp_path / "small.shrink").exists()
    done = in_process("shrink", DEMO / "model", "--experts", "4", cwd=tmp_path)
    assert done.returncode == 2 and "--data PATH" in done.stderr
