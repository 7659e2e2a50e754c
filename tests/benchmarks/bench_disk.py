"""A checkpoint four times as large as the memory that a process may take: its search, its exports, and their pace.

    python tests/benchmarks/bench_disk.py

The model has 1.6 GB of experts (float32), and the kernel refuses more than a quarter of that as private memory beyond
what the libraries take. 30 individuals are searched, repairs among them, and the best pruned and the best repaired one
are exported, with `expert_offload: disk` under the limit, and with `expert_offload: host` without it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import bench
import yaml
from real_size.children import in_child
from tiny_models import WORDS, save_tiny_model

LAYERS, WIDTH, NEURONS, EXPERTS = 64, 1024, 32, 64
SIZE = 3 * WIDTH * NEURONS * EXPERTS * LAYERS * 4
ROOM, OWN_GB = SIZE // 4, 0.03


def main() -> None:
    bench.arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny_model(
            folder / "model",
            "qwen3_moe",
            WORDS,
            seed=3,
            num_hidden_layers=LAYERS,
            hidden_size=WIDTH,
            head_dim=32,
            moe_intermediate_size=NEURONS,
            num_experts=EXPERTS,
            num_experts_per_tok=2,
            norm_topk_prob=True,
        )
        found = {place: measured(folder, place, room) for place, room in (("disk", ROOM), ("host", None))}
    print(f"experts: {SIZE / 1e6:.0f} MB; private memory that `expert_offload: disk` may take: {ROOM / 1e6:.0f} MB")
    for place, one in found.items():
        print(
            f"expert_offload: {place}: {one['individuals']} individuals in {one['seconds']:.1f} s, "
            f"{one['failures']} failed"
        )
    same = all(found["disk"][key] == found["host"][key] for key in ("population", "exports"))
    print(f"population and exported bytes are {'equal' if same else 'different'}; pace of disk beside host:", end=" ")
    print(f"{found['host']['seconds'] / found['disk']['seconds']:.2f}")


def measured(folder: Path, place: str, room: int | None) -> dict[str, Any]:
    """A search and two exports with the originals in a place."""
    here = folder / place
    here.mkdir()
    limits = {"folder": str(here), "room": room, "experts_gb": OWN_GB}
    outcome = in_child(
        "larger_than_memory:search", {"run_file": str(write_run(here, folder / "model", place)), **limits}
    )
    if outcome.failure is not None:
        raise SystemExit(f"expert_offload: {place}: {outcome.failure}")
    found: dict[str, Any] = outcome.result
    exports = [
        in_child("larger_than_memory:export_one", {"individual": found["best"][phase], **limits})
        for phase in ("prune", "repair")
    ]
    return found | {"exports": [each.result or each.failure for each in exports], "failures": len(found["failures"])}


def write_run(folder: Path, model: Path, place: str) -> Path:
    """Write a run of 30 individuals, and a task of 108 prompts about colours and animals."""
    rows = [
        f'{{"text": "the {animal} is {colour} a {other}", "label": "{"ABCD"[(i + 3 * j + k) % 4]}"}}\n'
        for i, animal in enumerate(WORDS[3:6])
        for j, colour in enumerate(WORDS[:3])
        for k, other in enumerate(WORDS[:12])
    ]
    (folder / "pick.jsonl").write_text("".join(rows))
    task = {
        "source": {"files": {"all": "pick.jsonl"}},
        "splits": {
            "search": {"from": "all", "seed": 1, "count": 40},
            "dev": {"from": "all", "seed": 1, "offset": 40, "count": 20},
            "calibration": {"from": "all", "seed": 1, "offset": 60, "count": 30},
            "test": {"from": "all", "seed": 1, "offset": 90},
        },
        "prompt": "{{ text }} which Answer :",
        "answer": "{{ label }}",
        "choices": ["A", "B", "C", "D"],
        "fitness": "rank",
    }
    (folder / "pick.yaml").write_text(yaml.safe_dump(task))
    run = {
        "name": "large",
        "model": {"path": str(model), "device": "cpu", "dtype": "float32", "expert_offload": place},
        "tasks": [str(folder / "pick.yaml")],
        "genome": {"kind": "eep", "experts": 2, "groups": 2},
        "phases": [
            {"kind": "prune", "evaluations": 18, "initial": 8, "init": ["reap"]},
            {"kind": "merge", "evaluations": 8},
            {"kind": "repair", "evaluations": 4, "repair": {"tokens": 96}},
        ],
        "workers": {"count": 1, "num_gpus": 0},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder / "run.yaml"


if __name__ == "__main__":
    main()
