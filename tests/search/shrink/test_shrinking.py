"""One command on the demo model in FP8 and a file of chats: a search, a page, and a pruned checkpoint in FP8."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands_here import run_command, worker_here
from demo_chats import write_chats
from packed_checkpoints import write
from safetensors.torch import load_file

import moevolve
from moevolve.search.config.files import load_run_config
from moevolve.search.shrink import guard
from moevolve.workers.checkpoints.loading import load_model
from moevolve.workers.contract.settings import ModelConfig

DEMO = Path(__file__).parents[3] / "configs" / "demo"
BLOCK = 32
GENERAL = ("questions", "code", "json", "german", "spanish")
SETTINGS = ("engine.chat_template=none", "workers.count=1", "final.random_baselines=1")
COMMAND = (
    *("shrink", "packed", "--data", "chats.jsonl", "--experts", "50%", "--time", "1s", "-o", "small"),
    *("--guard-prompts", "2", "--guard-tokens", "16"),
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
    return folder, json.loads(done.stdout)


def test_the_page_and_the_checkpoint_are_of_one_search(shrunk: tuple[Path, dict[str, Any]]) -> None:
    folder, page = shrunk
    assert (page["experts_full"], page["experts"], page["written"]["form"]) == (8, 4, "source")
    labels = [entry["label"] for entry in page["table"]["entries"]]
    assert labels[0] == "full model" and labels[-1] == "best found"
    assert list(page["seconds"]) == ["settings", "routing", "search", "checks", "export"]
    (choice,) = page["choices"]
    assert choice.startswith("--time 1s: 4 candidates, the fewest that there can be, although they take longer")
    best = page["table"]["entries"][-1]
    assert best["parameters"] < page["table"]["parameters_full"]
    (test,) = (score for score in best["scores"] if score["split"] == "test")
    assert test["low"] <= test["score"] <= test["high"]
    (routing,) = page["routing"]
    assert (
        routing["task"] == "chats" and 0.5 < routing["mass"] < 1 and routing["mass"] == pytest.approx(routing["alone"])
    )
    check, *general = page["checks"]
    assert check["prompts"] == 2 and check["recovery"] > 0.5
    assert [each["task"] for each in general] == [f"general {name}" for name in GENERAL]
    assert not any(each["faults"] for each in general)
    card = (folder / "small" / "README.md").read_text()
    assert all(f"| {each['task']}" in card for each in page["checks"])
    assert (
        check["task"] == "chats" and check["perplexity"] > 0.5 and 0 < check["agreement"] <= 1 and check["faults"] == []
    )
    source, small = (load_file(folder / name / "model.safetensors") for name in ("packed", "small"))
    assert page["written"]["weight_bytes"] == (folder / "small" / "model.safetensors").stat().st_size
    router = "model.layers.0.block_sparse_moe.gate.weight"
    assert small[router].shape[0] == 4 and source[router].shape[0] == 8
    expert = "model.layers.0.block_sparse_moe.experts.{}.w1.weight"
    assert small[expert.format(0)].dtype == torch.float8_e4m3fn
    kept = [small[expert.format(new)].view(torch.uint8) for new in range(4)]
    there = [source[expert.format(old)].view(torch.uint8) for old in range(8)]
    assert all(any(torch.equal(one, other) for other in there) for one in kept), "byte for byte"


def test_the_same_command_again_changes_nothing_and_names_what_is_beyond_its_limits(
    shrunk: tuple[Path, dict[str, Any]], in_process: Any
) -> None:
    folder, page = shrunk
    again = in_process(*COMMAND, "--least-recovery", "2", "--most-perplexity", "1", "--force", cwd=folder)
    assert again.returncode == 0, again.stderr
    said = " ".join(again.stdout.split())
    assert "best found" in said and "wrote small (source checkpoint of small:" in said
    kept = f"keeps {100 * page['checks'][0]['recovery']:.0f} % of the full model's score, less than 200%"
    assert f"chats: the candidate {kept}" in said
    assert page["checks"][0]["perplexity"] > 1 and "the full model's perplexity" not in said, "its answers are graded"
    config = load_run_config(folder / "small.shrink" / "run.yaml")
    assert [task.name for task in config.tasks] == [str(folder / "small.shrink" / "tasks" / "chats.yaml")]
    with moevolve.open_reader(f"sqlite:///{folder / 'moevolve.db'}") as store:
        assert store.search("small").config_hash == config.config_hash
        assert len(store.individual(page["table"]["winner"]).exports) == 1


def test_a_folder_that_is_taken_is_refused_before_anything_runs(tmp_path: Path, in_process: Any) -> None:
    write_chats(tmp_path / "chats.jsonl", 100)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "file").touch()
    command = ("shrink", DEMO / "model", "--data", "chats.jsonl", "--experts", "4", "-o", "small", "--dry-run")
    done = in_process(*command, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: --output small: there is something already")
    assert not (tmp_path / "small.shrink").exists()
    done = in_process("shrink", DEMO / "model", "--experts", "4", cwd=tmp_path)
    assert done.returncode == 2 and "--data PATH" in done.stderr
