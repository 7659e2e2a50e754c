"""Weights outside of experts that wait on the host: which of them a second device has, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edit_checks import CARD
from families import family_edit
from repair_samples import rows_of, sequences_of
from second_device import DeviceTensor, second_device
from torch import Tensor

from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.contract.edits import Calibration, Edit, IdentityEdit
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.families.layers import linears_outside
from moevolve.workers.methods.eep import apply
from moevolve.workers.methods.eep.edit import ExpertsMeasurement
from moevolve.workers.methods.nanomoe.edit import BlockForm, NanoMoeEdit
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.profiling.outline import outline_model
from moevolve.workers.worker import EvaluationWorker

FAMILY = "deepseek_v3"
"""It has a dense layer before its mixtures, which have shared experts."""
EXAMPLES = tuple(
    Example(f"the fox {' '.join(words)} is larger :", (words[0],), ("fox", "dog", "over"))
    for words in (("fox", "dog"), ("dog",), ("over", "fox", "dog", "over", "dog"))
)
AGREED = PreparedSplit("a", "search", "agreement", "agreement", Matching(), 1, " ", EXAMPLES, "text")
SHORT, LONG = (
    replace(
        AGREED, task=f"{most}", fitness="generate", metric="accuracy", matching=Matching("f1", ()), max_new_tokens=most
    )
    for most in (3, 20)
)
ROWS, PRUNED = rows_of(sequences_of([40] * 12)), family_edit(FAMILY, "prune")
SETTINGS = RepairSettings((1.0,))
EDITS: tuple[Edit, ...] = (
    IdentityEdit(),
    PRUNED,
    RepairedEdit(PRUNED, SETTINGS, ROWS),
    RepairedEdit(family_edit(FAMILY, "prune", seed=1), replace(SETTINGS, neurons=True, input_rounds=1), ROWS),
)


@contextmanager
def watched(worker: EvaluationWorker) -> Iterator[list[tuple[int, set[int]]]]:
    """For every linear layer that runs, its decoder layer, and the decoder layers that have a weight on the device."""
    groups = linears_outside(worker.resident.model, worker.resident.layers)
    seen: list[tuple[int, set[int]]] = []

    def look(index: int) -> None:
        seen.append((index, {place for place, group in enumerate(groups) if any(on(each.weight) for each in group)}))

    with ExitStack() as stack:
        for index, group in enumerate(groups):
            for linear in group:
                hook = linear.register_forward_pre_hook(lambda *_, index=index: look(index))
                stack.callback(hook.remove)
        yield seen


def on(tensor: Tensor) -> bool:
    """Whether a tensor is on the device."""
    return isinstance(tensor.data, DeviceTensor)


def scored(worker: EvaluationWorker, edit: Edit, *splits: PreparedSplit) -> EvaluationReply:
    return worker.evaluate(EvaluationRequest(edit, tuple(split.ref for split in splits)), splits)


def outcomes(reply: EvaluationReply) -> list[Any]:
    assert reply.failure is None
    return [(each.gold_logprob, each.outcomes.tolist()) for each in reply.results.values()]


def test_the_device_has_the_weights_of_the_layer_at_work(
    model_config: Callable[..., ModelConfig], tmp_path: Path
) -> None:
    """While a model is calibrated, candidates take turns, answer, are fitted and scored again, and one is exported."""
    config, splits = replace(model_config(FAMILY), device="cuda"), (AGREED, SHORT)
    measurement = ExpertsMeasurement(("importance",), None, 300)
    with second_device():
        whole, parts = (
            EvaluationWorker(replace(config, expert_offload=each), EngineConfig(batch_tokens=64))
            for each in ("device", "disk")
        )
        with watched(parts) as seen:
            measured = [Calibration.from_bytes(each.calibrate(measurement, (AGREED,))) for each in (whole, parts)]
            requests = [EvaluationRequest(edit, tuple(split.ref for split in splits)) for edit in EDITS]
            expected = [outcomes(scored(whole, edit, *splits)) for edit in EDITS]
            assert expected[1] != expected[2], "a fit changes something"
            assert [outcomes(reply) for reply in parts.evaluate_round(requests, splits)] == expected
            # Fits are those of the first time.
            assert [outcomes(reply) for reply in parts.evaluate_round(requests[2:], splits)] == expected[2:]
            exported = [
                export_model(each.resident, EDITS[2], tmp_path / str(number), CARD).agreement
                for number, each in enumerate((whole, parts))
            ]
        assert len(seen) > 100 and all(found == {own} for own, found in seen)
    assert exported[0] == exported[1]
    for name in measured[0].arrays.keys() - {"seconds"}:
        np.testing.assert_array_equal(measured[0].arrays[name], measured[1].arrays[name])


def test_all_weights_stay_where_long_answers_are_decoded(
    model_config: Callable[..., ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have room beside the experts that stay, which layer by layer they leave again."""
    config, waiting = replace(model_config(FAMILY), device="cuda"), list[int]()
    monkeypatch.setattr(apply, "experts_room", lambda _device, _beside, bytes_: waiting.append(bytes_) or 1 << 30)
    with second_device():
        whole, parts = (
            EvaluationWorker(replace(config, expert_offload=each), EngineConfig()) for each in ("device", "host")
        )
        groups = linears_outside(parts.resident.model, parts.resident.layers)
        size = sum(linear.weight.nbytes for group in groups for linear in group)
        for edit in EDITS[1:3]:
            assert outcomes(scored(parts, edit, LONG)) == outcomes(scored(whole, edit, LONG))
            assert all(on(linear.weight) for group in groups for linear in group)
            assert outcomes(scored(parts, edit, SHORT)) == outcomes(scored(whole, edit, SHORT))
            assert [[on(linear.weight) for linear in group] for group in groups] == [
                [place == 2] * len(group) for place, group in enumerate(groups)
            ]
        experts = {id(each) for layer in parts.resident.layers for each in layer.expert_tensors().values()}
        held = [*parts.resident.model.parameters(), *parts.resident.model.buffers()]
        on_device = sum(each.nbytes for each in held if on(each) and id(each) not in experts)
    assert waiting == [size]
    outline = outline_model(config)
    others = sum(map(sum, outline.linear_bytes[:-1]))
    assert on_device == outline.weight_bytes - outline.experts_bytes - others


def test_linear_layers_that_an_edit_replaces_are_on_the_device(model_config: Callable[..., ModelConfig]) -> None:
    config, form = replace(model_config(FAMILY), device="cuda"), BlockForm("I", 2, 4)
    names = ("layers.0.mlp.up_proj", "layers.2.self_attn.o_proj")
    edit: Any = NanoMoeEdit(form, names, np.full((2, *form.mixing_shape), 0.5, dtype=np.float32))
    with second_device():
        whole, parts = (
            EvaluationWorker(replace(config, expert_offload=each), EngineConfig()) for each in ("device", "disk")
        )
        assert outcomes(scored(parts, edit, AGREED)) == outcomes(scored(whole, edit, AGREED))
