"""Short forms of what `bench_formats.py` measures: narrow layers, few experts, small vocabularies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from real_size.quantised import FORMATS, ask, verbs_of, write_model, write_run
from real_size.runs import write_task

from moevolve.workers.contract.capacity import CAPACITY

NARROW = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8192}
SMALL = {
    "int4": replace(
        FORMATS["int4"],
        layers=1,
        retained=8,
        changes=FORMATS["int4"].changes | NARROW | {"num_experts": 16, "moe_intermediate_size": 128},
    ),
    "gguf": replace(FORMATS["gguf"], layers=1, changes=NARROW | {"intermediate_size": 256}),
}


@pytest.mark.parametrize("kind", SMALL)
def test_every_verb_is_done(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, kind, SMALL[kind])
    monkeypatch.setenv(CAPACITY, "4")
    model = write_model(kind, tmp_path / "model")
    write_run(kind, model, write_task(tmp_path / "task", later=4), tmp_path)
    notes = {verb: ask(verb, str(tmp_path), str(model))["note"] for verb in verbs_of(kind)}
    assert notes["search"] == "5 individuals"
    # Of int4's 8 experts three matrices with packed values, scales and shape; GGUF stacks experts.
    assert f"{72 if kind == 'int4' else 3} tensors of experts equal, byte for byte" in notes["export"]
    assert notes["reload"] == "logits equal"
    if kind == "int4":
        assert "tensors anew: " in notes["requantise"] and "up to" in notes["requantise"]
