"""A short form of what `bench_formats.py` measures: narrow layers, few experts, a small vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from real_size.quantised import FORMATS, ask, verbs_of, write_model, write_run
from real_size.runs import write_task

from moevolve.workers.contract.capacity import CAPACITY

pytestmark = pytest.mark.bench

NARROW = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8192}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def test_every_verb_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    int4 = FORMATS["int4"]
    small = replace(int4, layers=1, retained=4, changes=int4.changes | NARROW | EXPERTS)
    monkeypatch.setitem(FORMATS, "int4", small)
    monkeypatch.setenv(CAPACITY, "4")
    model = write_model("int4", tmp_path / "model")
    write_run("int4", model, write_task(tmp_path / "task", later=4), tmp_path)
    notes = {verb: ask(verb, str(tmp_path), str(model))["note"] for verb in verbs_of("int4")}
    assert notes["search"] == "5 individuals"
    # Four experts have three matrices each, with packed values, scales and a shape.
    assert "36 tensors of experts equal, byte for byte" in notes["export"]
    assert notes["reload"] == "logits equal"
    assert "tensors anew: " in notes["requantise"] and "up to" in notes["requantise"]
