"""Short forms of the matrix: published layouts, narrow layers, small vocabularies, on the metered device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from real_size.checkpoint import write_checkpoint
from real_size.meter import MeteredDevice
from real_size.published import SPECS, Spec
from real_size.runs import write_task
from real_size.verbs import Row, Session

from moevolve.workers.contract.capacity import NeededMemory, NoRoomError
from moevolve.workers.worker import EvaluationWorker

NARROW = {
    "mixtral-8x7b": {"hidden_size": 512, "intermediate_size": 1792, "num_attention_heads": 4, "num_key_value_heads": 1},
    "deepseek-v3": {
        "hidden_size": 256,
        "intermediate_size": 640,
        "moe_intermediate_size": 192,  # no multiple of a block of 128, as the 576 rows of `kv_a_proj_with_mqa` are none
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "n_routed_experts": 32,
        "vocab_size": 32_000,
    },
    "gpt-oss-20b": {
        "hidden_size": 192,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32_000,
    },
}
"""Widths and vocabularies that a test has time for; all else is as published."""
VERBS = ("load", "full", "prune", "merge", "export", "reload")


def narrow(name: str) -> Spec:
    return replace(SPECS[name], changes=NARROW[name])


@pytest.fixture(scope="module", params=NARROW)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Spec, Path, Path]:
    spec = narrow(request.param)
    folder = tmp_path_factory.mktemp(spec.name)
    return spec, write_checkpoint(spec, folder / "model"), write_task(folder / "task", rows=3)


@pytest.fixture
def device() -> Iterator[MeteredDevice]:
    with MeteredDevice(4 << 30).installed() as device:
        yield device


def done(
    spec: Spec, model: Path, task: Path, device: MeteredDevice, originals: str, verbs: tuple[str, ...]
) -> list[Row]:
    rows = list(Session(spec, model, task, originals, device).rows(verbs))
    assert [row.failure for row in rows] == [None] * len(rows)
    return rows


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_the_meter_sees_is_what_plan_says_and_exports_give_the_same_logits(
    checkpoint: tuple[Spec, Path, Path], device: MeteredDevice
) -> None:
    rows = {row.verb: row for row in done(*checkpoint, device, "device", VERBS)}
    load, merge = rows["load"], rows["merge"]
    assert load.planned is not None and abs(load.device - load.planned) <= 0.01 * load.planned
    for verb in ("full", "prune", "merge", "export"):
        planned = rows[verb].planned
        # Compared beside the weights, of which logits are a small part with so small a vocabulary.
        assert planned is not None and rows[verb].device - load.device <= 1.1 * (planned - load.planned), verb
    assert merge.device > rows["prune"].device
    # Written while it is read: never two models, and a half of one at that.
    assert rows["export"].device < load.device + 0.75 * rows["reload"].device


@pytest.mark.timeout(900)
def test_layers_let_go_of_what_they_had_before_they_get_something_else(tmp_path: Path, device: MeteredDevice) -> None:
    spec = replace(narrow("mixtral-8x7b"), retained=6)
    model, task = write_checkpoint(spec, tmp_path / "model"), write_task(tmp_path / "task", rows=3)
    rows = done(spec, model, task, device, "host", ("load", "full", "prune"))
    assert all(row.planned is not None and row.device <= 1.1 * row.planned for row in rows)


def test_a_model_that_does_not_fit_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    spec = narrow("mixtral-8x7b")
    model, task = write_checkpoint(spec, tmp_path / "model", holes=lambda name: True), write_task(tmp_path / "task")
    with MeteredDevice(140 << 20).installed() as device:
        session = Session(spec, model, task, "device", device)
        config = session.config("prune")
        with pytest.raises(NoRoomError, match="a worker takes"):
            EvaluationWorker(
                config.model, config.engine, needed=NeededMemory(session.estimate(config).memory["device"], 1.0)
            )
        assert device.peak == 0


@pytest.mark.timeout(900)
def test_subsets_of_experts_are_tried_in_the_memory_that_plan_says(tmp_path: Path, device: MeteredDevice) -> None:
    """All layers of a group at once; narrow ones, so that samples are larger than anything else beside the weights."""
    changes = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    spec = replace(SPECS["olmoe-1b-7b"], changes=changes)
    model, task = write_checkpoint(spec, tmp_path / "model"), write_task(tmp_path / "task", rows=16)
    load, tried = done(spec, model, task, device, "device", ("load", "calibrate naee"))
    assert load.planned is not None and tried.planned is not None
    beside, planned = tried.device - load.device, tried.planned - load.planned
    assert beside > 10e6 and 0.9 * planned <= beside <= 1.1 * planned


@pytest.mark.timeout(900)
def test_dense_kinds_start_in_the_memory_that_plan_says(tmp_path: Path, device: MeteredDevice) -> None:
    changes = {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 32_000,
    }
    spec = replace(SPECS["llama-3-8b"], changes=changes)
    model, task = write_checkpoint(spec, tmp_path / "model"), write_task(tmp_path / "task", rows=3)
    load, *started = done(
        spec, model, task, device, "device", ("load", "start nanomoe", "start tomoe", "start factorllm")
    )
    for row in started:
        assert load.planned is not None and row.planned is not None
        beside, planned = row.device - load.device, row.planned - load.planned
        assert beside > 40e6 and 0.8 * planned <= beside <= 1.1 * planned, row.verb
