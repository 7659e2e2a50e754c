"""One command on the demo's dense model: a mixture of experts, or a narrower model, with half of its neurons."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands_here import run_command, worker_here
from transformers import AutoModelForCausalLM

from moevolve.search.config.files import load_run_config
from moevolve.search.shrink import guard
from moevolve.search.strategies.schedule import rounds_notes
from moevolve.workers.methods.repair.edit import RepairSettings

DEMO = Path(__file__).parents[3] / "configs" / "demo"
SET = ("--set", "engine.chat_template=none", "--set", "workers.count=1")
DRY_RUN = (
    *("shrink", DEMO / "dense", "--data", "questions.jsonl", "--active", "25%", "--custom-code", "--dry-run"),
    *SET,
)
SHORT = ("--evaluations", "4")


def write_questions(path: Path) -> None:
    """Questions that the dense model knows, with their answers."""
    lines = (DEMO / "data" / "relation" / "search.jsonl").read_text().splitlines()[:100]
    with path.open("w") as file:
        for row in map(json.loads, lines):
            prompt = f"{row['passage']}\nQuestion: {row['question']}\nAnswer:"
            file.write(json.dumps({"prompt": prompt, "answer": row["answer"]}) + "\n")


def shrunk(folder: Path, *options: str) -> dict[str, Any]:
    """The page of a short search on the dense model."""
    write_questions(folder / "questions.jsonl")
    few = [replace(probe, split=probe.split.head(1)) for probe in guard.general_set()]
    with worker_here(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "general_set", lambda: few)
        command = (
            "shrink",
            DEMO / "dense",
            "--data",
            "questions.jsonl",
            *options,
            "-o",
            "small",
            *SET,
            *SHORT,
            "--json",
        )
        done = run_command(folder, *command)
    assert done.returncode == 0, done.stderr
    page: dict[str, Any] = json.loads(done.stdout)
    return page


def test_a_dense_model_becomes_a_mixture_of_experts(tmp_path: Path) -> None:
    page = shrunk(tmp_path, "--active", "50%", "--custom-code")
    assert (page["experts_full"], page["experts"], page["layers"]) == (0, 8, 5)
    (choice,) = page["record"]["choices"]
    assert choice.startswith("--active 50%: 8 overlapping masks")
    assert page["record"]["written"]["form"] == "native"
    best, networks = page["table"]["entries"][-1], 5 * 3 * 128 * 1024
    routers = 5 * 8 * 128
    idle = page["table"]["parameters_full"] + routers - best["active_parameters"]
    assert networks / 2 <= idle < networks / 2 + 3 * 128
    (check,) = page["record"]["checks"]["tasks"][:1]
    assert check["recovery"] > 0.9
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small", trust_remote_code=True)
    assert sum(each.numel() for each in model.parameters()) == best["parameters"]
    with torch.no_grad():
        assert model(torch.tensor([[1, 5, 9]])).logits.isfinite().all()


def test_a_dense_model_becomes_a_narrower_one_that_needs_no_code(tmp_path: Path) -> None:
    (tmp_path / "checked.yaml").write_text("extends: demo-span\nsplits: {test: {from: test, count: 20}}\n")
    options = ("--neurons", "50%", "--set", "final.held_out=[checked.yaml]")
    page = shrunk(tmp_path, *options)
    assert (page["experts_full"], page["experts"], page["record"]["written"]["form"]) == (0, 1, "stock")
    assert page["record"]["written"]["loads_in"][:3] == ["transformers", "vLLM", "SGLang"]
    assert page["record"]["choices"] == ["--neurons 50%: every feed-forward network keeps 512 of 1024 neurons"]
    best = page["table"]["entries"][-1]
    saved = 5 * 3 * 128 * 512
    assert best["parameters"] == best["active_parameters"] == page["table"]["parameters_full"] - saved
    assert page["record"]["checks"]["tasks"][0]["recovery"] > 0.9
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.intermediate_size == 512
    assert sum(each.numel() for each in model.parameters()) == best["parameters"]
    settings = [json.loads((folder / "config.json").read_text()) for folder in (DEMO / "dense", tmp_path / "small")]
    assert settings[0] | {"intermediate_size": 512, "transformers_version": ""} == settings[1] | {
        "transformers_version": ""
    }
    again = ("shrink", DEMO / "dense", "--data", "questions.jsonl", *options, "-o", "small", *SET, *SHORT)
    said = run_command(tmp_path, *again).stdout
    assert page["table"]["others"] == ["checked"], "which nothing was chosen on"
    entries = page["table"]["entries"]
    splits = [[score["split"] for score in row["scores"] if score["task"] == "checked"] for row in entries]
    assert splits[0] == splits[-1] == ["test"], "of the full model and the winner"
    run_file = load_run_config(tmp_path / "small.shrink" / "run.yaml")
    assert run_file.final.held_out == (str(tmp_path / "checked.yaml"),), "from any folder"
    assert "small on questions, checked:" in " ".join(said.split())
    assert "oneshot(model='" in said and "small.gguf" in said
    assert "dense, narrower" in said and "loads in: transformers, vLLM, SGLang, llama.cpp" in said
    card = (tmp_path / "small" / "README.md").read_text()
    assert "whose feed-forward networks have 512 of 1024 neurons" in card and "mixture" not in card
    assert "Loads in: transformers, vLLM, SGLang, llama.cpp" in card


def test_a_dry_run_writes_settings_and_none_repairs_nothing(tmp_path: Path, in_process: Any) -> None:
    write_questions(tmp_path / "questions.jsonl")
    for repair in ("auto", "none"):
        done = in_process(*DRY_RUN, "-o", repair, "--repair", repair, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        config = load_run_config(tmp_path / f"{repair}.shrink" / "run.yaml")
        genome = config.genome.model_dump()
        assert (genome["kind"], genome["budget"], genome["attention"]) == ("tomoe", 0.25, False)
        assert [phase.repair is None for phase in config.phases] == [repair == "none"] * 2
        assert not rounds_notes(config), "defaults don't warn of themselves"


def test_settings_of_the_presets_phases_are_overridden(tmp_path: Path, in_process: Any) -> None:
    write_questions(tmp_path / "questions.jsonl")
    done = in_process(*DRY_RUN, "--set", "phases.0.repair.tokens=2048", "-o", "small", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = load_run_config(tmp_path / "small.shrink" / "run.yaml").phases
    assert first.repair is not None and first.repair.tokens == 2048
    assert second.repair is not None and second.repair.tokens == RepairSettings().tokens
    assert first.repair.continuations == second.repair.continuations == 7, "the full model is on the device"
    assert (first.init, second.init) == (("start",), ("random",))
    own = "phases=[{kind: tune, evaluations: 4, initial: 1, init: [start], repair: true}]"
    done = in_process(*DRY_RUN, "--set", own, "-o", "own", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (only,) = load_run_config(tmp_path / "own.shrink" / "run.yaml").phases
    assert only.repair == RepairSettings(), "own phases stay as they are"


@pytest.mark.parametrize(
    ("model", "options", "error"),
    [
        ("dense", ("--neurons", "0.1%"), "--neurons 0.1% keeps too little of 1024 neurons"),
        (
            "dense",
            ("--experts", "50%"),
            "this model is dense, and --experts is for mixtures of experts; give --neurons",
        ),
        ("dense", ("--size", "1MiB"), "--size 1MiB: this model is dense, and --size is for mixtures"),
        ("dense", ("--active", "100%"), "--active 100% keeps everything"),
        ("dense", ("--active", "half"), "--active half: give a share such as 12.5%"),
        (
            "dense",
            ("--active", "50%"),
            "--active 50% makes a mixture of experts with its own code, which servers",
        ),
        ("model", ("--active", "50%"), "a token uses 2 of 8; give --experts or --neurons"),
    ],
)
def test_what_suits_other_models_is_refused(
    tmp_path: Path, in_process: Any, model: str, options: tuple[str, ...], error: str
) -> None:
    write_questions(tmp_path / "questions.jsonl")
    done = in_process("shrink", DEMO / model, "--data", "questions.jsonl", *options, "--dry-run", *SET, cwd=tmp_path)
    assert done.returncode == 2 and error in " ".join(done.stderr.split())
