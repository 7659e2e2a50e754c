"""Searches on models of the lab: a task of a few questions, and a run's configuration for every verb."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moevolve.search.config.run import RunConfig
from real_size.published import Spec

_MONTHS = ("January", "March", "May", "July", "August", "October", "November", "December")
_PROMPT = "{{ passage }}\\nQuestion: {{ question }}\\nAnswer:"
_EXPERTS_PHASES: dict[str, list[dict[str, Any]]] = {
    "prune": [{"kind": "prune"}],
    "merge": [{"kind": "prune"}, {"kind": "merge", "group_rate": 1, "entry_rate": 0.5}],
    "repair": [{"kind": "prune", "repair": {"tokens": 256, "ridge_lambdas": [0.01]}}],
    "tune": [{"kind": "tune", "init": ["start"], "initial": 2}],
}


def write_task(directory: Path, rows: int = 8) -> Path:
    """A task of as many questions per split, with its data; returns its file.

    What is measured on is few long texts: they run one by one, and each takes a pass over all weights.

    Args:
        directory: its folder.
        rows: questions of a split.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for position, split in enumerate(("calibration", "search", "test")):
        lines = []
        for row in range(rows):
            name = _MONTHS[(row + 3 * position) % len(_MONTHS)]
            longer = "later " * (85 if split == "calibration" else row % 4)
            passage = f"{name} is when the {row + position} of them came back, {longer}than was expected."
            lines.append({"passage": passage, "question": f"When did the {row} come back?", "answer": name})
        (directory / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = "".join(f"    {split}: {split}.jsonl\n" for split in ("calibration", "search", "test"))
    splits = "".join(f"  {split}: {{from: {split}}}\n" for split in ("calibration", "search", "test"))
    text = f"description: questions of the lab\nsource:\n  files:\n{files}splits:\n{splits}"
    text += f'prompt: "{_PROMPT}"\nanswer: "{{{{ answer }}}}"\nmatching: {{kind: exact}}\nmax_new_tokens: 2\n'
    path = directory / "lab.yaml"
    path.write_text(text)
    return path


def run_config(
    spec: Spec,
    model: Path,
    task: Path,
    genome: dict[str, Any],
    phases: str = "prune",
    init: tuple[str, ...] = (),
    originals: str = "device",
    batch: int = 2048,
) -> RunConfig:
    """A search on a model of the lab.

    Args:
        spec: which.
        model: its folder.
        task: from `write_task`.
        genome: the section.
        phases: `prune`, `merge` (after pruning), `repair` or `tune`.
        init: baselines that the last phase begins with.
        originals: where original experts stay.
        batch: tokens of a forward pass.
    """
    made = [{"evaluations": 2, "initial": 0, **phase} for phase in _EXPERTS_PHASES[phases]]
    if init:
        made[-1] |= {"init": [*init], "initial": len(init)}
        made[-1]["evaluations"] = max(2, len(init))
    settings: dict[str, Any] = {
        "name": "lab",
        "model": {"path": str(model), "dtype": spec.published["dtype"], "device": "cuda", "expert_offload": originals},
        "tasks": [{"name": str(task)}],
        "genome": genome,
        "phases": made,
        "window": 1,
        "workers": {"num_gpus": 1},
        "engine": {"threads": 1, "batch_tokens": batch},
        "final": {"rerank": 0, "test": False},
    }
    return RunConfig.model_validate(settings)
