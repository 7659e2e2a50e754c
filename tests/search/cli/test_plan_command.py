"""`moevolve plan` as users run it: what it prints, what it refuses, and what a pilot measures."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from commands_here import refusal
from dense_lab import dense_run
from local_workers import local_pool
from replies import failure
from report_lab import DENSE
from safetensors.torch import load_file
from tokenizers import Tokenizer

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task
from moevolve.search.config.files import load_run_config
from moevolve.search.pools.local import Evaluator
from moevolve.search.running.launch import set_up_new
from moevolve.search.running.plan.counts import final_models
from moevolve.search.running.plan.estimate import estimate
from moevolve.search.running.plan.pilot import measure
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest

RUNS = Path(__file__).parents[3] / "configs" / "runs"
GIVEN = ("--prompt-tokens", "160", "--examples", "256")


def test_a_model_that_is_not_there_is_planned_from_its_config(
    in_process: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    run = RUNS / "mixtral-boolq.yaml"
    asked = ("--model", "mixtral-8x7b", *GIVEN)
    done = in_process("plan", run, *asked, "--json", "--set", "workers.count=8", "--set", "window=32")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [size["title"] for size in found["sizes"]] == ["full model", "prune", "merge"]
    assert found["sizes"][0]["parameters"] == 46_702_792_704
    assert found["memory"]["host"]["device"] < found["memory"]["device"]["device"] / 2
    assert {(s["split"], s["examples"], s["source"]) for s in found["splits"]} == {
        (split, 256, "given") for split in ("search", "dev", "test")
    }
    warned = "warning: phases.0 (prune) makes 200 individuals in 7 rounds of 32, and"
    assert [note.startswith(warned) for note in found["notes"]].count(True) == 1
    assert found["pilot"] is None
    assert not list(tmp_path.iterdir())


def test_a_run_on_the_cpu_is_planned_without_hours_unless_a_pilot_measures(
    in_process: Any, worker_here: None, tiny: Any, tmp_path: Path
) -> None:
    run = tiny.write_run(tmp_path / "run.yaml", "tiny")
    done = in_process("plan", run)
    assert done.returncode == 0, done.stderr
    done = in_process("plan", run, "--pilot", "4")
    assert "the search takes about " in done.stdout
    assert not (tmp_path / "moevolve.db").exists()


@pytest.mark.parametrize("kind", ["eep", "factorllm"])
def test_a_pilot_measures_a_few_individuals_of_every_phase(
    tiny: Any, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kind has two phases, the other one a calibration."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    if kind == "eep":
        tasks = [{"name": str(tiny.task), "counts": {"search": 12}}]  # fewer than the other splits have
        config = load_run_config(tiny.write_run(tmp_path / "run.yaml", kind, tasks=tasks))
    else:
        config = dense_run(tiny, tmp_path, {"kind": kind, **DENSE[kind]}, kind)
    planned = estimate(config)
    stages: list[str] = []
    found = measure(set_up_new(config), 5, local_pool, stages.append)
    assert 4 <= found.individuals <= 6 and found.workers == 1
    assert list(found.seconds) == list(dict.fromkeys(phase.kind for phase in config.phases))
    searched = sum(count.individuals * found.seconds[count.kind] for count in planned.phases)
    tokens = {split.split: split.tokens for split in planned.splits}
    final = 0.0
    for split, phases in final_models(config).items():
        taken = sum(found.full_seconds if phase is None else found.seconds[phase.kind] for phase in phases)
        final += taken * tokens.get(split, 0) / tokens["search"]
    assert [len(each) for each in final_models(config).values()] == [planned.ranked, planned.tested]
    assert all(phase.repair is None for phase in config.phases)
    assert found.final_seconds == pytest.approx(final)
    assert 0 < found.hours == pytest.approx((found.other_seconds + found.full_seconds + searched + final) / 3600)
    assert "pilot: evaluating" in stages
    assert not list((tmp_path / "temporary").iterdir()) and not list(tmp_path.glob("*.db"))


def test_a_pilot_of_what_fails_says_so(tiny: Any, tmp_path: Path) -> None:
    def failing(worker: Evaluator, request: EvaluationRequest, splits: Any) -> EvaluationReply:
        if isinstance(request.edit, IdentityEdit):
            return worker.evaluate(request, splits)
        return failure(request, reason="no luck")

    config = load_run_config(tiny.write_run(tmp_path / "run.yaml", "tiny"))
    with pytest.raises(UserError, match="pilot: no individual could be evaluated"):
        measure(set_up_new(config), 2, lambda setup: local_pool(setup, failing))


def test_the_estimate_for_the_demo_counts_what_its_files_hold() -> None:
    config = load_run_config(RUNS / "demo.yaml")
    found = estimate(config)
    weights = sum(tensor.numel() for tensor in load_file(Path(config.model.path) / "model.safetensors").values())
    # Of five layers: as many neurons as seven of eight experts have, each three 128 x 128 matrices, less.
    pruned = weights - 5 * 7 * 3 * 128 * 128
    assert [size.parameters for size in found.sizes] == [weights, pruned, pruned], "full, searched, repaired anew"
    assert [(split.split, split.examples) for split in found.splits] == [("search", 400), ("dev", 300), ("test", 1000)]
    words = Tokenizer.from_file(str(Path(config.model.path) / "tokenizer.json"))
    examples = prepare_split(load_task("demo-span"), "search").examples
    # Encoded by itself, an answer gets a first token that it hasn't got behind a prompt.
    lengths = [len(words.encode(one.prompt)) + len(words.encode(one.references[0])) - 1 for one in examples]
    assert found.splits[0].tokens == sum(lengths)
    assert [(count.kind, count.individuals) for count in found.phases] == [("prune", 3), ("repair", 1)]
    # The full model, and all four; the full model, the best, and three repaired choices.
    assert (found.ranked, found.tested) == (5, 5)
    assert not found.on_gpu


def test_without_a_tokenizer_lengths_are_to_be_given(tiny: Any, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    shutil.copy(tiny.model / "config.json", folder)
    run = tiny.write_run(tmp_path / "run.yaml", "bare", model={"path": str(folder), "device": "cpu"})
    assert "; say how long prompts are with --prompt-tokens" in refusal("plan", run)


def test_what_is_refused(tiny: Any, tmp_path: Path) -> None:
    run = str(tiny.write_run(tmp_path / "run.yaml", "tiny"))
    assert "mixtral-8x7b" in refusal("plan", run, "--model", "mixtral-8x7")
    assert "--prompt-tokens" in refusal("plan", run, "--examples", "9")
    assert "config.json" in refusal("plan", run, "--model", str(tmp_path))
    assert "genome.experts" in refusal("plan", run, "--set", "genome.experts=40")
    assert "no such file" in refusal("plan", str(tmp_path / "none.yaml"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert "bert" in refusal("plan", run, "--model", str(tmp_path))
