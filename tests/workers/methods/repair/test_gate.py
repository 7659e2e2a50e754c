"""The gate of a repair: what it compares, how it decides, and a repair that lowers all layers' errors and does harm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edit_checks import logits
from family_samples import edit_of_kind
from repair_samples import rows_of, sequences_of
from torch import Tensor

from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task
from moevolve.workers.contract.edits import Measurement
from moevolve.workers.contract.fitting import FitRows, RowsMeasurement
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.engine.measuring import calibrate
from moevolve.workers.methods.eep.accuracy import scores_with_errors
from moevolve.workers.methods.eep.edit import EepEdit, ExpertsMeasurement
from moevolve.workers.methods.repair.apply import Gate, RepairApplicator, split_places
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.model.resident import ResidentModel

DEMO = Path(__file__).parents[4] / "configs" / "demo"


def divergence(expected: Tensor, found: Tensor) -> float:
    """Mean Kullback-Leibler divergence of next-token distributions, in float64."""
    logs, others = (each.double().log_softmax(dim=-1) for each in (expected, found))
    return float((logs.exp() * (logs - others)).sum(dim=-1).mean())


def gated_by(model: ResidentModel) -> RepairApplicator:
    applicator = model._applicators[RepairedEdit]
    assert isinstance(applicator, RepairApplicator)
    return applicator


@pytest.mark.parametrize("count", [1, 2, 8, 9, 50])
def test_no_sequence_is_fitted_and_compared(count: int) -> None:
    fitted, compared = split_places(count)
    if count == 1:
        assert (list(fitted), list(compared)) == ([0], [0]), "a single one is held out of the fit"
        return
    assert sorted([*fitted, *compared]) == list(range(count)) and len(compared) == -(-(count - 1) // 8)


@pytest.mark.parametrize("answer", [0, 2])
def test_predictions_of_answers_are_compared(answer: int, resident: Callable[..., ResidentModel]) -> None:
    model, sequences = resident("mixtral"), sequences_of([9, 14, 5])
    rows = rows_of(sequences, answer)
    edit = edit_of_kind(3, 6, "prune", 4)
    parts: dict[bool, list[Tensor]] = {False: [], True: []}
    with torch.inference_mode():
        answering = torch.from_numpy(np.concatenate([rows.answering(place) for place in range(3)]))
        gate = Gate(model.model, sequences, answering)
        assert gate.divergence() == 0
        for edited in (False, True):
            for tokens in sequences:
                found = logits(model, edit if edited else None, torch.tensor([tokens]))[0]
                # The last token of the prompt predicts the first one of the answer.
                parts[edited].append(found[len(tokens) - answer - 1 :] if answer else found)
        with model.edited(edit):
            assert gate.divergence() == pytest.approx(divergence(*map(torch.cat, parts.values())), rel=1e-4)


def test_the_best_strength_is_in_place_afterwards(resident: Callable[..., ResidentModel]) -> None:
    model, rows = resident("mixtral"), rows_of(sequences_of([30] * 24), 1)
    ids, base = torch.tensor([sequences_of([20], seed=9)[0]]), edit_of_kind(3, 6, "both", 4)
    before = logits(model, None, ids)
    settings = RepairSettings((0.1,), strength="matched", gate=True)
    edit = RepairedEdit(base, settings, rows)
    found = logits(model, edit, ids)
    with model.edited(edit):
        applicator = gated_by(model)
        divergences = dict(applicator.divergences)
        report = dict(applicator.report())
    assert list(divergences) == ["none", "scalar", "ridge", "matched"]
    assert "matched" in report["gate"] and f"{divergences['none']:.3g}" in report["gate"]
    best = min(divergences, key=divergences.__getitem__)
    fitted, _ = split_places(24)
    sequences = rows.first(10**6)
    alone = rows_of([sequences[place] for place in fitted], 1)
    expected = (
        logits(model, base, ids)
        if best == "none"
        else logits(model, RepairedEdit(base, replace(settings, strength=best, gate=False), alone), ids)  # type: ignore[arg-type]
    )
    assert torch.equal(found, expected)
    assert torch.equal(logits(model, None, ids), before)
    weaker = RepairedEdit(base, replace(settings, strength="scalar"), rows)
    with model.edited(weaker):
        assert list(gated_by(model).divergences) == ["none", "scalar"]


@pytest.fixture(scope="module")
def demo() -> ResidentModel:
    return ResidentModel.load(ModelConfig(path=str(DEMO / "model"), dtype="float32", device="cpu"))


def measured(model: ResidentModel, settings: Measurement) -> dict[str, Any]:
    """A calibration on prompts of the task `calendar`, with the model's greedy answers."""
    split = prepare_split(load_task("demo-calendar"), "calibration")
    engine = GenerationEngine(model.model, model.tokenizer, EngineConfig())
    return dict(calibrate(model, engine, settings, [split]).arrays)


def test_a_repair_on_few_tokens_that_would_do_harm_is_refused(demo: ResidentModel) -> None:
    """Kept experts' parts of an answer aren't certain on few prompts, so least squares shrink them."""
    # REAP's two experts of eight still give more than half of the right answers.
    scores, _ = scores_with_errors(measured(demo, ExpertsMeasurement(("importance",), None, 1000)))
    kept = np.argsort(-scores, axis=1)[:, :2]
    matrices = np.eye(8, dtype=np.float32)[kept]
    base = EepEdit(matrices, matrices, 2)
    rows, few = FitRows.of(measured(demo, RowsMeasurement(1000))), 256
    others = rows.sequences[len(rows.first(few)) :][:24]

    prompts = [torch.tensor([tokens[:-1]]) for tokens in others]  # answers have one token

    @torch.inference_mode()
    def predicted() -> Tensor:
        return torch.cat([demo.model(prompt).logits[0, -1:] for prompt in prompts])

    expected = predicted()

    def off(edit: Any) -> float:
        """Divergence of the answers from the unedited model's on prompts that no repair has seen."""
        with demo.edited(edit):
            return divergence(expected, predicted())

    plain, ridge = off(base), RepairedEdit(base, RepairSettings(tokens=few), rows)
    with demo.edited(ridge):
        outcomes = gated_by(demo).outcomes
    assert all(each is not None and each.after < each.before for each in outcomes), "every layer's error falls"
    harmed = off(ridge)
    gated = RepairedEdit(base, RepairSettings(tokens=few, gate=True), rows)
    with demo.edited(gated):
        divergences = gated_by(demo).divergences
    assert harmed > plain and min(divergences, key=divergences.__getitem__) != "ridge"
    assert off(gated) < harmed
