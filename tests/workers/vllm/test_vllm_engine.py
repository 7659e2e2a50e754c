"""vLLM as the generator gives the answers that the engine of `transformers` gives, and its failures are found.

It runs with a fake that keeps vLLM's interface, and with vLLM itself if MOEVOLVE_TEST_VLLM names the Python of an
environment that has it (with the CPU build of vLLM 0.32, the test takes a few minutes).
"""

from __future__ import annotations

import gc
import logging
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_vllm
import numpy as np
import psutil
import pytest
from families import edit_of_kind
from tiny_models import save_tiny_model

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.children.process import _MAIN
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.messages import EvaluationRequest, WorkerFault
from moevolve.workers.contract.settings import EngineConfig, ModelConfig, VllmConfig, engine_fingerprint
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.model.resident import ResidentModel
from moevolve.workers.vllm import child
from moevolve.workers.vllm import engine as vllm_engine
from moevolve.workers.vllm.engine import VllmEngine
from moevolve.workers.vllm.process import VllmProcess
from moevolve.workers.worker import EvaluationWorker

WORDS = [f"w{i}" for i in range(4, 97)]
ENDS = [2, *range(80, 90)]
FULL = IdentityEdit()
ONE, TWO, MERGED = (edit_of_kind(3, 6, *kind) for kind in (("prune", 4), ("prune", 4, 2, "probs", 1), ("merged", 4)))
"""Three candidates of one shape."""


def never(_: int, __: str) -> bool:
    return False


def split_of(stop: tuple[str, ...] = ("\n",)) -> PreparedSplit:
    rng = np.random.default_rng(3)
    prompts = [" ".join(rng.choice(WORDS, size=size)) for size in range(3, 15)]
    examples = tuple(Example(prompt, ("w7 w8",) if row % 3 else ()) for row, prompt in enumerate(prompts))
    return PreparedSplit("words", "search", "generate", "accuracy", Matching("exact", stop), 9, " ", examples)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """A checkpoint whose attention has heads as wide as vLLM's kernels need."""
    folder = tmp_path_factory.mktemp("mixtral")
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "head_dim": 32, "intermediate_size": 32}
    experts = {"num_local_experts": 6, "num_experts_per_tok": 2, "eos_token_id": ENDS}
    save_tiny_model(folder, "mixtral", WORDS, 5, **sizes, **experts)
    return ModelConfig(str(folder), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def resident(model: ModelConfig) -> ResidentModel:
    return ResidentModel.load(model)


@pytest.fixture
def fake(tmp_path: Path) -> Callable[[str], str]:
    """Write a Python executable that finds the fake, with a fault."""

    def write(fault: str = "") -> str:
        found = Path(next(iter(fake_vllm.__path__)))
        program = tmp_path / f"python-{fault}"
        variables = f"PYTHONPATH={shlex.quote(str(found))} FAKE_VLLM_FAULT={fault}"
        program.write_text(f'#!/bin/sh\n{variables} exec {shlex.quote(sys.executable)} "$@"\n')
        program.chmod(0o755)
        return str(program)

    return write


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the requests to vLLM that load weights."""
    names: list[str] = []
    call = VllmProcess.call

    def note(process: VllmProcess, function: Callable[..., Any], *arguments: Any) -> Any:
        if function in (child.start, child.reload):
            names.append(function.__name__)
        return call(process, function, *arguments)

    monkeypatch.setattr(VllmProcess, "call", note)
    return names


def running() -> set[int]:
    """Processes of this one that run vLLM."""
    return {each.pid for each in psutil.Process().children() if _MAIN in each.cmdline()}


def engine_of(resident: ResidentModel, python: str, **settings: Any) -> VllmEngine:
    vllm = VllmConfig(python, {"enforce_eager": True}, **settings)
    return VllmEngine(resident, EngineConfig(vllm=vllm), vllm)


def assert_same_answers(resident: ResidentModel, engine: VllmEngine, edit: Edit, split: PreparedSplit) -> None:
    with resident.edited(edit):
        expected = GenerationEngine(resident.model, resident.tokenizer, EngineConfig()).generate(split, never)
        found = engine.generate(split, never)
    assert found.texts == expected.texts and len(set(found.texts)) > 3
    np.testing.assert_allclose(found.gold_logprobs, expected.gold_logprobs, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fake", "vllm"])
def test_answers_are_those_of_transformers(
    resident: ResidentModel, fake: Callable[[str], str], asked: list[str], kind: str
) -> None:
    python = os.environ.get("MOEVOLVE_TEST_VLLM", "") if kind == "vllm" else fake("")
    if not python:
        pytest.skip("MOEVOLVE_TEST_VLLM doesn't name the Python of an environment that has vLLM")
    engine = engine_of(resident, python)
    for edit in (FULL, ONE, ONE, TWO, MERGED):
        assert_same_answers(resident, engine, edit, split_of())
    # Answers that `transformers` ends at a stop string, or doesn't since it stands before the answer.
    ending = next(word for text in GenerationEngine.generate(engine, split_of(), never).texts for word in text.split())
    for stop in ((ending,), (f" {ending}", "w5")):
        assert_same_answers(resident, engine, MERGED, split_of(stop))
    if kind == "fake":
        assert asked == ["start", "start", "reload", "reload"]


@pytest.mark.parametrize(("fault", "edits"), [("stale", (ONE, TWO)), ("raises", (ONE, TWO, MERGED))])
def test_weights_that_cannot_be_loaded_in_place_are_loaded_anew(
    resident: ResidentModel,
    fake: Callable[[str], str],
    asked: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    edits: tuple[Edit, ...],
) -> None:
    monkeypatch.setattr(vllm_engine, "_TOLERANCE", 50.0)
    engine = engine_of(resident, fake(fault))
    with caplog.at_level(logging.WARNING):
        for edit in edits:
            assert_same_answers(resident, engine, edit, split_of())
    assert asked == ["start", "reload", "start", "start"][: len(edits) + 1]
    (message,) = caplog.messages
    reason = {"stale": "are those of the candidate before", "raises": "vLLM: KeyError: 'layers.0.experts'"}[fault]
    assert message.startswith("vLLM is started anew for every candidate") and reason in message


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("wrong", r"differ by up to [\d.]+ nats .*0.1 are accepted"),
        ("dies", "ended with exit code 7; see the worker's log"),
    ],
)
def test_what_vllm_does_wrong_is_not_the_candidates_fault(
    model: ModelConfig, fake: Callable[[str], str], fault: str, reason: str
) -> None:
    worker = EvaluationWorker(model, EngineConfig(vllm=VllmConfig(fake(fault))))
    split = split_of()
    with pytest.raises(WorkerFault, match=reason):
        worker.evaluate(EvaluationRequest(ONE, (split.ref,)), (split,))


def test_a_worker_scores_candidates_with_it(model: ModelConfig, fake: Callable[[str], str], tmp_path: Path) -> None:
    """Candidates without a stock checkpoint fail with the reason, and no weights stay on the disk."""
    before, weights = running(), tmp_path / "weights"
    weights.mkdir()
    settings = VllmConfig(fake(""), folder=str(weights))
    worker = EvaluationWorker(model, EngineConfig(vllm=settings))
    split = split_of()
    splits = (split, replace(split, split="dev"))
    request = EvaluationRequest(ONE, tuple(each.ref for each in splits))
    found, expected = (each.evaluate(request, splits) for each in (worker, EvaluationWorker(model, EngineConfig())))
    assert found.failure is expected.failure is None
    for each in splits:
        ours, theirs = found.results[each.fingerprint], expected.results[each.fingerprint]
        assert ours.score == theirs.score and ours.gold_logprob == pytest.approx(theirs.gold_logprob, abs=1e-4)
    mixed = worker.evaluate(EvaluationRequest(edit_of_kind(3, 6, "mixed"), (split.ref,)), (split,))
    assert mixed.kind == "candidate" and mixed.failure and "no stock checkpoint" in mixed.failure
    assert not list(weights.iterdir())
    assert len(running() - before) == 1
    del worker
    gc.collect()
    assert not running() - before


def test_settings_name_an_environment_that_has_vllm(
    resident: ResidentModel, fake: Callable[[str], str], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"^engine.vllm.python: .*/none can't be run: .*No such file"):
        engine_of(resident, str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"^engine.vllm.python: .* has no vLLM; give the Python of an environment"):
        engine_of(resident, sys.executable)
    with pytest.raises(UserError, match=r"^engine.vllm.folder: .*/none is no directory; make it"):
        engine_of(resident, fake(""), folder=str(tmp_path / "none"))


def test_only_what_changes_scores_is_part_of_the_fingerprint(model: ModelConfig) -> None:
    def fingerprint(vllm: VllmConfig | None) -> str:
        return engine_fingerprint(model, EngineConfig(vllm=vllm))

    one = VllmConfig("a/python", {"quantization": "fp8"})
    assert fingerprint(one) == fingerprint(replace(one, python="b/python", folder="/dev/shm"))
    assert len({fingerprint(None), fingerprint(one), fingerprint(VllmConfig("a/python"))}) == 3
