"""What fitting takes: one layer of Mixtral-8x7B's shape, a narrow layer, and the demo model beside an evaluation.

    python tests/benchmarks/bench_repair.py [--threads 2] [--tokens 4096] [--device cpu] [--memory-mb 8192]

The layer has 4 kept experts of 14,336 neurons with weights and tokens drawn at random, in float32 (2.6 GiB): more
features than tokens, so the dual form; one lambda is tried. The narrow layer has more tokens than features, so the
primal form, and four lambdas. Memory is what the process holds beyond what it held before; what is stated is
`fit_bytes`, and what blocks of features may take beside it.
"""

from __future__ import annotations

import statistics
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, Self

import bench
import numpy as np
import torch

from moevolve.search.config.files import load_run_config
from moevolve.search.running.set_up import set_up
from moevolve.workers.contract.edits import Calibration
from moevolve.workers.contract.fitting import FitRows, RowsMeasurement
from moevolve.workers.contract.messages import EvaluationRequest
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.neurons import ExpertNeurons
from moevolve.workers.methods.eep.outputs import ExpertFeatures
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.methods.repair.ridge import LayerSystem, fit_bytes, fit_ridge
from moevolve.workers.worker import EvaluationWorker

DEMO = Path(__file__).parents[2] / "configs" / "runs" / "demo.yaml"
PAGE = 4096


class Peak:
    """The most memory that this process, or the device, holds within a `with` block beyond what it held before."""

    def __init__(self, device: str) -> None:
        self._device, self._ends = device, threading.Event()
        self.bytes = 0

    def __enter__(self) -> Self:
        self._before = self._held()
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()
        if self._device == "cuda":
            self.bytes = torch.cuda.max_memory_allocated() - self._before

    def _watch(self) -> None:
        while not self._ends.wait(0.002):
            self.bytes = max(self.bytes, self._held() - self._before)

    def _held(self) -> int:
        if self._device == "cuda":
            return torch.cuda.memory_allocated()
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--memory-mb", type=int, default=8192)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("repair of one layer, 4 experts of which 2 are active, random weights and tokens")
    memory = options.memory_mb << 20
    fit_layer("Mixtral-8x7B", 4096, 14336, options.tokens, (0.01,), memory, options.device)
    fit_layer("narrow", 256, 512, 16384, (1e-3, 1e-2, 1e-1, 1.0), memory, options.device)
    beside_an_evaluation()


@torch.inference_mode()
def fit_layer(
    name: str, hidden: int, width: int, tokens: int, ridge_lambdas: tuple[float, ...], memory: int, device: str
) -> None:
    """Fit one layer and apply what was fitted."""
    features = random_features(hidden, width, tokens, device)
    # What some columns account for, so that there is something to find.
    block = next(iter(features.blocks(memory)))
    residual = torch.randn(tokens, hidden, device=device)
    residual[block.tokens] += block.values @ torch.randn(block.values.shape[1], hidden, device=device)
    del block
    checked = torch.arange(tokens, device=device) % 8 == 7
    with Peak(device) as peak:
        started = time.perf_counter()
        layer = LayerSystem(
            features, lambda columns: residual.new_zeros(columns.stop - columns.start, hidden), residual, checked
        )
        fit = fit_ridge(layer, ridge_lambdas, memory)
        fitted = time.perf_counter() - started
        assert fit is not None
        for block in features.blocks(memory // 2):
            residual[block.tokens] -= block.values @ fit.change(block, layer.present)
        if device == "cuda":
            torch.cuda.synchronize()
        whole = time.perf_counter() - started
    system = fit_bytes(features.width, tokens, hidden)
    print(
        f"  {name}: {features.width:,} features of {hidden:,}, {tokens:,} tokens, {len(ridge_lambdas)} ridge_lambdas\n"
        f"    fitted in {fitted:.1f} s, with applying {whole:.1f} s\n"
        f"    peak {peak.bytes / 2**20:,.0f} MiB; stated: {system / 2**20:,.0f} MiB and blocks, in all {memory >> 20:,}"
    )


def random_features(hidden: int, width: int, tokens: int, device: str) -> ExpertFeatures:
    """Of a Mixtral layer of 4 experts, 2 active."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=hidden, intermediate_size=width, num_local_experts=4)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        module: Any = MixtralExperts(config)
    generator = torch.Generator(device).manual_seed(0)
    drawn = partial(torch.randn, generator=generator, device=device)
    shapes = {"gate_up_proj": (4, 2 * width, hidden), "down_proj": (4, hidden, width)}
    tensors = {name: drawn(shape).mul_(shape[2] ** -0.5) for name, shape in shapes.items()}
    weights, chosen = drawn(tokens, 4).softmax(dim=1).topk(2)
    return ExpertFeatures(ExpertNeurons(module, tensors), drawn(tokens, hidden), weights, chosen, None)


def beside_an_evaluation() -> None:
    """The demo's model: random subsets of experts, evaluated on the search split, and repaired before that."""
    setup = set_up(load_run_config(DEMO), "repair")
    config = setup.config
    assert config.model is not None
    worker = EvaluationWorker(config.model, config.engine)
    (ref,) = setup.splits("search")
    split = setup.all_prepared[ref.fingerprint]
    rows = FitRows.of(Calibration.from_bytes(worker.calibrate(RowsMeasurement(16384), (split,))).arrays)
    plain, repaired = ([], [])
    for seed in range(4):
        edit = random_subset(worker, seed)
        for times, each in ((plain, edit), (repaired, RepairedEdit(edit, RepairSettings(tokens=8192), rows))):
            reply = worker.evaluate(EvaluationRequest(each, (ref,)), (split,))
            assert reply.failure is None, reply.failure
            times.append(reply.seconds)
    evaluation = statistics.median(plain[1:])
    fits = statistics.median(repaired[1:]) - evaluation
    tokens = min(8192, len(rows.tokens))
    print(
        f"  the demo's model, {tokens:,} tokens, 4 lambdas: {fits:.2f} s beside {evaluation:.2f} s for an evaluation "
        f"({fits / evaluation:.1f} times); the first one {repaired[0] - plain[0]:.2f} s, with the unedited model's pass"
    )


def random_subset(worker: EvaluationWorker, seed: int) -> EepEdit:
    rng, layers = np.random.default_rng(seed), worker.resident.layers
    kept = np.stack([rng.permutation(layers[0].count)[:4] for _ in layers])
    matrices = np.eye(layers[0].count, dtype=np.float32)[kept]
    return EepEdit(matrices, matrices, 2)


if __name__ == "__main__":
    main()
