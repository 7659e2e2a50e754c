"""A shrink of a model whose experts stay on the disk: the same winner and checkpoint, which alone answers the guard."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from commands_here import run_command, worker_here
from safetensors.torch import load_file

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.fitness.base import SHORT_ANSWER
from moevolve.search.config.run import TaskSection
from moevolve.search.shrink import checkpoint, guard
from moevolve.search.shrink.places import refuse_decoding

DEMO = Path(__file__).parents[3] / "configs" / "demo"
COUNTS = "tasks.0.counts={calibration: 8, search: 4, dev: 4, test: 4}"


def shrunk(folder: Path, place: Literal["device", "disk"]) -> dict[str, Any]:
    """Shrink the demo's model, whose experts are in this place, to a folder of the same name."""
    asked = ("--task", "demo-span", "--neurons", "50%", "--evaluations", "4", "-o", place, "--force")
    settings = (COUNTS, "workers.count=1", "final.random_baselines=1", f"model.expert_offload={place}")
    few = [replace(probe, split=probe.split.head(1)) for probe in guard.general_set()]
    with worker_here(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "general_set", lambda: few)
        # Otherwise the length of answers depends on how fast the machine is at the moment, and with it what is a loop.
        patch.setattr(guard, "_affordable", lambda *_: (SHORT_ANSWER + 4, len(few)))
        patch.setattr(checkpoint, "measured_speed", lambda *_: None)
        done = run_command(
            folder,
            "shrink",
            str(DEMO / "model"),
            *asked,
            *(word for each in settings for word in ("--set", each)),
            "--json",
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_where_experts_are_changes_nothing_but_the_guard(tmp_path: Path) -> None:
    """The task's answers are generated, in up to 12 tokens."""
    pages = [shrunk(tmp_path, each) for each in ("device", "disk")]
    looks = [page["record"]["look"] for page in pages]
    assert looks[0] == looks[1]
    said = ["layer by layer" in " ".join(page["record"]["choices"]) for page in pages]
    assert said == [False, True]
    tables = [[entry["scores"] for entry in page["table"]["entries"]] for page in pages]
    assert tables[0] == tables[1]
    written = [load_file(tmp_path / name / "model.safetensors") for name in ("device", "disk")]
    assert written[0].keys() == written[1].keys()
    assert all(tensor.equal(written[1][name]) for name, tensor in written[0].items())
    checks = [page["record"]["checks"] for page in pages]
    for one, other in zip(*(each["tasks"] for each in checks), strict=True):
        assert (one["task"], one["agreement"], one["perplexity"]) == (
            other["task"],
            other["agreement"],
            other["perplexity"],
        )
    both, alone = (each["loops"] for each in checks)
    assert both["full"] is not None and alone["full"] is None
    assert (both["prompts"], both["shrunk"]) == (alone["prompts"], alone["shrunk"]) and alone["prompts"] > 0
    card = " ".join((tmp_path / "disk" / "README.md").read_text(encoding="utf-8").split())
    assert "The full model did not answer, since it doesn't fit on the device; limits are fixed." in card


@pytest.mark.parametrize(
    ("task", "decoded"),
    [("squad2", True), ("demo-span", False), ("text-manual", False), ("text-manual@agreement", False)],
)
def test_long_answers_to_generate_are_refused(task: str, decoded: bool) -> None:
    section = TaskSection(name=task)
    if decoded:
        with pytest.raises(
            UserError, match=rf"task {task}: models have to generate answers of up to 32 tokens .* at most 16"
        ):
            refuse_decoding([section])
    else:
        refuse_decoding([section])
