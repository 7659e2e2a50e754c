"""Measures applying edits to a resident model, a random Mixtral of 32 layers (hidden 64, 8 experts). Run it by hand.

    python tests/benchmarks/bench_edits.py [--threads 1] [--device cpu] [--repeats 15]

A fresh edit each time; medians. How fast merging itself is, bench_kernels.py measures.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import bench
import numpy as np
import torch
from edit_checks import addresses
from tiny_models import MIXTRAL, WORDS, save_tiny_model

from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.methods.eep.edit import EepEdit


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    measure_apply(options.device, options.repeats)


def timed(action: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    action()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_apply(device: str, repeats: int) -> None:
    from moevolve.workers.model.resident import ResidentModel

    layers, count, retained = 32, 8, 4
    sizes = MIXTRAL | {"hidden_size": 64, "intermediate_size": 128, "num_local_experts": count}
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(Path(folder), "mixtral", WORDS, 0, num_hidden_layers=layers, **sizes)
        resident = ResidentModel.load(ModelConfig(path=folder, device=device))
    rng = np.random.default_rng(0)
    for kind in ("prune", "merge"):
        times = []
        for _ in range(repeats + 2):
            matrices = np.eye(count, dtype=np.float32)[
                np.stack([rng.permutation(count)[:retained] for _ in range(layers)])
            ]
            if kind == "merge":
                matrices = matrices + rng.normal(0, 0.1, matrices.shape).astype(np.float32)
            edit = EepEdit(matrices, matrices.copy(), 2)
            before = addresses(resident)
            times.append(timed(partial(resident.apply, edit), device))
            copied = kind == "merge" or addresses(resident) != before
        where = "weights written to buffers" if copied else "no weights copied"
        print(f"  apply {kind}, {layers} layers: {statistics.median(times[2:]) * 1e3:.3f} ms, {where}")


if __name__ == "__main__":
    main()
