"""Experts that aren't on the device: splits are scored one layer at a time, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import numpy as np
import pytest
from families import VARIANTS, edit_of_kind, representatives
from repair_samples import rows_of, sequences_of

from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.checkpoints.stored_experts import StoredExperts
from moevolve.workers.contract.edits import Calibration, Edit, IdentityEdit
from moevolve.workers.contract.fitting import RowsMeasurement
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.methods.repair import fits
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.worker import EvaluationWorker

EXAMPLES = tuple(
    Example(f"the fox {' '.join(words)} is larger :", (words[0],), ("fox", "dog", "cat"))
    for words in (("fox", "dog"), ("dog",), ("cat", "fox", "dog", "cat", "dog"), ("cat",), ("dog", "cat", "cat"))
)
RANKED = PreparedSplit("a", "search", "rank", "accuracy", Matching(), 1, " ", EXAMPLES)
TEXTS = replace(RANKED, task="b", fitness="perplexity", metric="inverse_perplexity", positions="text")
AGREED = replace(RANKED, task="c", fitness="agreement", metric="agreement", positions="text")
# Answers are decided as soon as they can't become the expected one, or only at their end.
EXACT, WHOLE = (
    replace(RANKED, task=kind, fitness="generate", matching=Matching(kind, ()), max_new_tokens=tokens)
    for kind, tokens in (("exact", 3), ("f1", 5))
)
SPLITS = (RANKED, TEXTS, AGREED, EXACT, WHOLE)


def scored(worker: EvaluationWorker, edit: Edit, splits: tuple[PreparedSplit, ...] = SPLITS) -> EvaluationReply:
    return worker.evaluate(EvaluationRequest(edit, tuple(split.ref for split in splits)), splits)


def expecting_part(worker: EvaluationWorker, edit: Edit) -> PreparedSplit:
    """Prompts with expected answers that a model leaves after two words of its own."""
    answers = worker.answer(edit, WHOLE)[0]
    references = [" ".join((*(answer.text or "").split()[:2], "fox")) for answer in answers]
    examples = tuple(replace(each, references=(one,)) for each, one in zip(EXAMPLES, references, strict=True))
    return replace(WHOLE, task="left", examples=examples)


# The tokenizer that transformers takes for qwen3_5_moe_text has none of these words.
@pytest.mark.parametrize("family", representatives(("qwen2_moe", "gpt_oss"), VARIANTS.keys() - {"qwen3_5_moe_text"}))
def test_scores_are_those_of_a_model_on_the_device(family: str, checkpoint: Callable[[str], Path]) -> None:
    config = ModelConfig(str(checkpoint(family)), device="cpu", dtype="float32")
    # As many columns as several passes take.
    engine = EngineConfig(batch_tokens=16)
    whole = EvaluationWorker(config, engine)
    parts = EvaluationWorker(replace(config, expert_offload="disk"), engine)
    layers = whole.resident.layers
    retained = 4 if layers[0].rule.groups.fault(3) else 3
    space = "probs" if layers[0].rule.has_scores else "logits"
    pruned = edit_of_kind(len(layers), layers[0].count, "prune", retained, space=space)
    rows = rows_of(sequences_of((9, 14, 11, 17)))
    edits: list[Edit] = [IdentityEdit(), pruned]
    if layers[0].unrepairable is None:
        edits += [RepairedEdit(pruned, RepairSettings((0.1,), neurons=neurons), rows) for neurons in (False, True)]
    for edit in edits:
        left = expecting_part(whole, edit)
        splits = (*SPLITS, left)
        expected, found = scored(whole, edit, splits), scored(parts, edit, splits)
        assert expected.failure is None and found.failure is None
        for split in splits:
            one, other = (each.results[split.fingerprint] for each in (expected, found))
            assert one.gold_logprob == other.gold_logprob
            np.testing.assert_array_equal(one.outcomes, other.outcomes)
        answered = (EXACT, WHOLE, left)
        assert whole.answer(edit, *answered) == parts.answer(edit, *answered)
        if parts.resident.one_layer_at_a_time:
            assert isinstance(parts.resident.applied, IdentityEdit)


@pytest.mark.parametrize(("family", "place"), [("qwen2_moe", "disk"), ("gpt_oss", "host")])
def test_the_model_writes_the_same_wherever_its_experts_are(
    family: str, place: Literal["host", "disk"], checkpoint: Callable[[str], Path]
) -> None:
    config = ModelConfig(str(checkpoint(family)), device="cpu", dtype="float32")
    text = " ".join(["the quick brown fox is larger than the lazy dog"] * 3)
    rows = replace(TEXTS, split="calibration", examples=(Example(text, ()), Example(f"a red cat : {text}", ())))
    found = [
        EvaluationWorker(replace(config, expert_offload=each), EngineConfig()).calibrate(
            RowsMeasurement(10**4, continuations=2), (rows,)
        )
        for each in ("device", place)
    ]
    one, other = (Calibration.from_bytes(each).arrays for each in found)
    assert one["repair_written"].sum() > 0 and len(one["repair_lengths"]) == 6
    for name in ("tokens", "lengths", "prompts", "written"):
        np.testing.assert_array_equal(one[f"repair_{name}"], other[f"repair_{name}"])


@pytest.mark.parametrize(("family", "place"), [("qwen2_moe", "disk"), ("gpt_oss", "host")])
def test_candidates_that_take_turns_have_the_scores_that_they_have_alone(
    family: str, place: Literal["host", "disk"], checkpoint: Callable[[str], Path]
) -> None:
    """The full model, unrepaired, fitted, merged and filled ones, and one that is wrong from the start."""
    config = ModelConfig(str(checkpoint(family)), device="cpu", dtype="float32", expert_offload=place)
    alone, together = (EvaluationWorker(config, EngineConfig(batch_tokens=16)) for _ in range(2))
    layers, count = len(alone.resident.layers), alone.resident.layers[0].count
    space = "probs" if alone.resident.layers[0].rule.has_scores else "logits"
    pruned, merged, other = (
        edit_of_kind(layers, count, kind, 3, space=space, seed=seed)
        for kind, seed in (("prune", 0), ("merged", 1), ("prune", 2))
    )
    wrong = replace(pruned, expert_merging=np.full_like(pruned.expert_merging, np.nan))
    rows, settings = rows_of(sequences_of((40,) * 24)), RepairSettings()
    fitted, filled = RepairedEdit(pruned, settings, rows), RepairedEdit(other, replace(settings, neurons=True), rows)
    everything = RepairedEdit(merged, replace(settings, input_rounds=1), rows)
    edits = (pruned, fitted, wrong, merged, filled, IdentityEdit(), everything)
    requests = [EvaluationRequest(edit, (), ticket=str(place)) for place, edit in enumerate(edits)]
    engine = together._engine
    assert isinstance(engine, GenerationEngine)
    with patch.object(engine.forward, "through_layers", side_effect=engine.forward.through_layers) as run:
        replies = together.evaluate_round(requests, SPLITS)
    assert [len(call.args[1]) for call in run.call_args_list][:2] == [1, len(edits)]
    assert [reply.ticket for reply in replies] == [request.ticket for request in requests]
    assert replies[0].results[TEXTS.fingerprint].score != replies[1].results[TEXTS.fingerprint].score
    for edit, found in zip(edits, replies, strict=True):
        expected = scored(alone, edit)
        assert (found.failure, found.failed_on) == (expected.failure, expected.failed_on)
        assert (found.failure is None) == (edit is not wrong)
        assert found.results.keys() == expected.results.keys()
        for key, one in expected.results.items():
            assert one.gold_logprob == found.results[key].gold_logprob
            np.testing.assert_array_equal(one.outcomes, found.results[key].outcomes)


def test_candidates_that_take_turns_read_every_layer_once(checkpoint: Callable[[str], Path]) -> None:
    config = ModelConfig(str(checkpoint("mixtral")), device="cpu", dtype="float32", expert_offload="disk")
    worker = EvaluationWorker(config, EngineConfig(batch_tokens=16))
    edits = [edit_of_kind(3, 6, "prune", 3, seed=seed) for seed in range(4)]
    requests = [EvaluationRequest(edit, ()) for edit in edits]
    with patch.object(StoredExperts, "read", autospec=True, side_effect=StoredExperts.read) as read:
        assert all(reply.failure is None for reply in worker.evaluate_round(requests, (RANKED,)))
    # The first candidate begins before the others.
    assert [(call.args[1], len(call.args[2])) for call in read.call_args_list] == [(0, 3), (0, 6), (1, 6), (2, 6)]


def test_a_layers_experts_are_read_once_for_all_splits(checkpoint: Callable[[str], Path]) -> None:
    config = ModelConfig(str(checkpoint("mixtral")), device="cpu", dtype="float32", expert_offload="disk")
    worker = EvaluationWorker(config, EngineConfig(batch_tokens=16))
    edit = edit_of_kind(3, 6, "prune", 3)
    texts = (RANKED, TEXTS, AGREED)
    scored(worker, edit, texts)
    with patch.object(StoredExperts, "read", autospec=True, side_effect=StoredExperts.read) as read:
        scored(worker, edit, texts)
    assert [call.args[1] for call in read.call_args_list] == [0, 1, 2]


def test_a_token_of_all_undecided_answers_takes_one_more_pass_through_the_layers(
    checkpoint: Callable[[str], Path],
) -> None:
    config = ModelConfig(str(checkpoint("mixtral")), device="cpu", dtype="float32", expert_offload="disk")
    worker = EvaluationWorker(config, EngineConfig(batch_tokens=16))
    edit = edit_of_kind(3, 6, "prune", 3)
    for split, times in ((replace(WHOLE, max_new_tokens=1), 1), (WHOLE, 5)):
        with patch.object(StoredExperts, "read", autospec=True, side_effect=StoredExperts.read) as read:
            scored(worker, edit, (split,))
        assert [call.args[1] for call in read.call_args_list] == [0, 1, 2] * times


def test_a_candidate_is_fitted_once_for_all_its_requests(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(str(checkpoint("mixtral")), device="cpu", dtype="float32", expert_offload="disk")
    worker = EvaluationWorker(config, EngineConfig())
    settings = RepairSettings((0.1,), neurons=True, input_rounds=1)
    edit = RepairedEdit(edit_of_kind(3, 6, "prune", 3), settings, rows_of(sequences_of((9, 14, 11, 17))))
    first = scored(worker, edit)
    monkeypatch.setattr(fits, "fit_ridge", None)
    again = scored(worker, edit)
    assert first.failure is None and again.failure is None
    assert [each.score for each in again.results.values()] == [each.score for each in first.results.values()]
