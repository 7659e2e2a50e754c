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

pytestmark = pytest.mark.bench

# Widths and vocabularies that a test has time for; all else is as published.
MIXTRAL = {
    "hidden_size": 384,
    "intermediate_size": 1344,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}
GPT_OSS = {
    "hidden_size": 192,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8_192,
}
OLMOE = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 8_192,
}
LLAMA = {
    "hidden_size": 768,
    "intermediate_size": 2688,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32_000,
}


@pytest.fixture
def device() -> Iterator[MeteredDevice]:
    with MeteredDevice(4 << 30).installed() as device:
        yield device


def done(
    spec: Spec, folder: Path, device: MeteredDevice, verbs: tuple[str, ...], originals: str = "device", rows: int = 3
) -> dict[str, Row]:
    """What the verbs took on a checkpoint that is written into a folder, by verb; none may have failed."""
    model, task = write_checkpoint(spec, folder / "model"), write_task(folder / "task", rows=rows)
    found = list(Session(spec, model, task, originals, device).rows(verbs))
    assert [row.failure for row in found] == [None] * len(found)
    return {row.verb: row for row in found}


def beside(row: Row, load: Row) -> tuple[int, int]:
    """Bytes of a verb beside the weights, as they are measured and as they are planned."""
    assert row.planned is not None and load.planned is not None
    return row.device - load.device, row.planned - load.planned


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "changes", "verbs"),
    [
        # The first verb takes a card that is too small: the worker refuses before it loads anything.
        ("mixtral-8x7b", MIXTRAL, ("plan", "load", "full", "prune", "merge", "export", "reload")),
        ("gpt-oss-20b", GPT_OSS, ("load", "prune", "export", "reload")),
    ],
    ids=["mixtral", "gpt-oss"],
)
def test_what_the_meter_sees_is_what_plan_says_and_exports_give_the_same_logits(
    name: str, changes: dict[str, int], verbs: tuple[str, ...], tmp_path: Path, device: MeteredDevice
) -> None:
    rows = done(replace(SPECS[name], changes=changes), tmp_path, device, verbs)
    load = rows["load"]
    assert load.planned is not None and abs(load.device - load.planned) <= 0.01 * load.planned
    for verb in {"full", "prune", "merge", "export"} & rows.keys():
        measured, planned = beside(rows[verb], load)
        assert measured <= 1.1 * planned, verb
    if "merge" in rows:
        assert rows["merge"].device > rows["prune"].device
        assert "refused" in rows["plan"].note
    # Written while it is read: never two models, and a half of one at that.
    assert rows["export"].device < load.device + 0.75 * rows["reload"].device


@pytest.mark.timeout(900)
def test_layers_let_go_of_what_they_had_before_they_get_something_else(tmp_path: Path, device: MeteredDevice) -> None:
    spec = replace(SPECS["mixtral-8x7b"], changes=MIXTRAL, retained=6)
    for row in done(spec, tmp_path, device, ("load", "full", "prune"), originals="host").values():
        assert row.planned is not None and row.device <= 1.1 * row.planned


@pytest.mark.timeout(900)
def test_subsets_of_experts_are_tried_in_the_memory_that_plan_says(tmp_path: Path, device: MeteredDevice) -> None:
    """All layers of a group at once; narrow ones, so that samples are larger than anything else beside the weights."""
    spec = replace(SPECS["olmoe-1b-7b"], changes=OLMOE)
    rows = done(spec, tmp_path, device, ("load", "calibrate naee"), rows=16)
    measured, planned = beside(rows["calibrate naee"], rows["load"])
    assert measured > 8e6 and 0.9 * planned <= measured <= 1.1 * planned


@pytest.mark.timeout(900)
def test_dense_kinds_start_in_the_memory_that_plan_says(tmp_path: Path, device: MeteredDevice) -> None:
    spec = replace(SPECS["llama-3-8b"], changes=LLAMA)
    rows = done(spec, tmp_path, device, ("load", "start nanomoe", "start tomoe", "start factorllm"))
    load = rows.pop("load")
    for verb, row in rows.items():
        measured, planned = beside(row, load)
        assert measured > 25e6 and 0.8 * planned <= measured <= 1.1 * planned, verb
