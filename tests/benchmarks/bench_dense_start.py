"""What dense kinds take before their first score, at a published width: operations, and one layer's processor time.

    python tests/benchmarks/bench_dense_start.py [--hidden 4096] [--width 11008] [--layers 32] [--before]

Every step is run for one layer of random numbers with decaying spectra, on the CPU; operations are counted by formula.
For the whole model they are turned into seconds of a GPU with `--peak` float64 operations a second, of which matrix
products reach `--products` and eigendecompositions `--eigen`. `--before` also runs what each step replaced: whole
decompositions in float64 on the host.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moevolve.workers.methods.factorllm.balanced_clusters import balanced_kmeans
from moevolve.workers.methods.factorllm.calibrate import logit_scale, unit_rows
from moevolve.workers.methods.factorllm.calibrate_baselines import partition_neurons
from moevolve.workers.methods.nanomoe.mixing import Metric, fit_factors, fit_mixing, low_rank_factors, split_factors
from moevolve.workers.methods.shared.input_statistics import InputStatistics
from moevolve.workers.methods.tomoe.calibrate import input_directions

EXPERTS, COMPONENTS, BLOCKS = 8, 8, 4


@dataclass(frozen=True, slots=True)
class Step:
    """One step for one layer.

    Attributes:
        name: of the step.
        times: how often a model's layer takes it.
        products: operations in matrix products and factorisations made of them.
        eigen: operations in eigendecompositions.
        run: does it.
        before: what it replaced; None where that is the same.
        on_host: whether it runs on the host whatever the model's device.
    """

    name: str
    times: int
    products: float
    eigen: float
    run: Callable[[], object]
    before: Callable[[], object] | None = None
    on_host: bool = False


def covariance(size: int) -> Tensor:
    """Of inputs whose variances fall as one over their number, in no particular directions."""
    drawn = torch.randn(size, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    return (drawn / torch.arange(1, size + 1)) @ drawn.t() / size


def weight_of(outputs: int, inputs: int) -> Tensor:
    """A random weight times a decaying spectrum, float32."""
    drawn = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1))
    return drawn * torch.arange(1, inputs + 1) ** -0.3 / inputs**0.5


def counts_of(width: int, tokens: int = 4096) -> np.ndarray:
    """How often two neurons fire together, where some fire a lot more often than others."""
    rng = np.random.default_rng(0)
    rates = rng.beta(0.5, 4.0, width)
    groups = rng.integers(EXPERTS, size=width)
    topics = rng.integers(EXPERTS, size=tokens)
    chance = rates * np.where(topics[:, None] == groups, 3.0, 0.7)
    fires = torch.from_numpy((rng.random((tokens, width)) < chance).astype(np.float32))
    return (fires.t() @ fires).numpy().astype(np.float64)


def direction_steps(hidden: int) -> list[Step]:
    square, mean = covariance(hidden), torch.linspace(-1, 1, hidden, dtype=torch.float64)
    block = COMPONENTS + 16
    iterated = 8 * (2 * hidden**2 * block + 4 * hidden * block**2) + 2 * hidden**2 * block

    def whole() -> None:
        across = np.eye(hidden) - np.outer(mean / mean.norm(), mean / mean.norm())
        np.linalg.eigh(across @ square.numpy() @ across)

    def ridge() -> None:
        statistics = InputStatistics(hidden, EXPERTS, torch.device("cpu"))
        statistics._products, statistics.count = square.clone(), 1
        weight, _ = statistics.ridge(1e-3, intercept=True)
        logit_scale(weight, square)

    return [
        Step(
            "ToMoE, FactorLLM: directions", 2, iterated, 9 * block**3, lambda: input_directions(mean, square, 8), whole
        ),
        Step("FactorLLM, CMoE: routers", 1, 2 * hidden**3 / 3, 0, ridge),
    ]


def division_steps(hidden: int, width: int) -> list[Step]:
    def clusters() -> None:
        rows = np.random.default_rng(0).standard_normal((width, hidden), dtype=np.float32)
        balanced_kmeans(unit_rows(rows), EXPERTS, np.random.default_rng(0))

    counts: list[np.ndarray] = []

    def cmoe() -> None:
        partition_neurons(counts[0], EXPERTS, 2)

    counts.append(counts_of(width))
    kmeans = 38 * 2 * width * hidden * EXPERTS
    return [
        Step("MoEfication, FactorLLM: k-means", 1, kmeans, 0, clusters, on_host=True),
        Step("CMoE: division", 1, 10 * (width**2 + width * 2000), 0, cmoe, on_host=True),
    ]


def factor_steps(hidden: int, width: int) -> list[Step]:
    """Of a gate or up layer [width, hidden] and a down layer [hidden, width], at half of their parameters."""
    half, tenth = (width * hidden * share // (10 * (width + hidden)) for share in (5, 1))
    up, down = weight_of(width, hidden), weight_of(hidden, width)
    narrow, wide = Metric.of(covariance(hidden)), Metric.of(torch.diag(torch.linspace(3, 0.1, width)))
    gram, project = 2 * hidden**2 * width, 2 * hidden * width * half
    block = tenth + 16
    iterated = 8 * (2 * hidden**2 * block + 4 * hidden * block**2) + 2 * hidden**2 * block
    eigen = 9 * hidden**3

    def svd() -> None:
        torch.linalg.svd(up.double(), full_matrices=False)

    u, v = split_factors(torch.randn(width, half).double(), torch.randn(half, hidden).double(), BLOCKS)
    mixing = torch.ones(BLOCKS, BLOCKS, dtype=torch.float64)
    both = 2 * BLOCKS * (width + hidden) * half**2 + 4 * width * hidden * half + 2 * BLOCKS * half**3 / 3
    return [
        Step(f"NanoMoE: factors, rank {half}", 3, gram + project, eigen, lambda: low_rank_factors(up, half), svd),
        Step(
            f"NanoMoE: factors, rank {tenth}",
            3,
            gram + 2 * hidden * width * tenth + iterated,
            9 * block**3,
            lambda: low_rank_factors(up, tenth),
        ),
        Step(
            f"  by outputs, gate and up, rank {half}",
            2,
            2 * gram + project + hidden**3 / 3 + hidden**2 * half,
            eigen,
            lambda: low_rank_factors(up, half, narrow),
        ),
        Step(
            f"  by outputs, down, rank {half}",
            1,
            2 * hidden * width**2 + gram + project,
            eigen,
            lambda: low_rank_factors(down, half, wide),
        ),
        Step("NanoMoE: a round of least squares", 3, both, 0, lambda: fit_factors(up, u, v, mixing)),
        Step(
            "NanoMoE: mixing I, given factors",
            3,
            2 * width * hidden * half + 2 * (BLOCKS * hidden + width) * half**2,
            0,
            lambda: fit_mixing(up.double(), u, v, mixing),
        ),
    ]


def seconds_of(run: Callable[[], object]) -> float:
    """Of processor time."""
    started = time.process_time()
    run()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--width", type=int, default=11008)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--before", action="store_true")
    parser.add_argument("--peak", type=float, default=19.5e12, help="float64 operations per second (A100: 19.5e12)")
    parser.add_argument("--products", type=float, default=0.3, help="share of the peak that products reach")
    parser.add_argument("--eigen", type=float, default=0.02, help="share of the peak that eigendecompositions reach")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"one layer of {options.hidden} x {options.width}; model: {options.layers} layers")
    print(f"{'step':40} {'GFLOP':>8} {'CPU s':>8} {'before':>8} {'model, CPU h':>13} {'before':>8} {'model, s':>9}")
    makers = (
        lambda: direction_steps(options.hidden),
        lambda: factor_steps(options.hidden, options.width),
        lambda: division_steps(options.hidden, options.width),
    )
    for make in makers:
        for step in make():
            count = step.times * options.layers
            here = seconds_of(step.run)
            before = seconds_of(step.before) if step.before is not None and options.before else None
            device = step.products / options.products / options.peak + step.eigen / options.eigen / options.peak
            cells = ["-" if before is None else f"{each:.1f}" for each in (before, (before or 0) * count / 3600)]
            print(
                f"{step.name:40} {(step.products + step.eigen) / 1e9:8.0f} {here:8.1f} {cells[0]:>8} "
                f"{here * count / 3600:13.2f} {cells[1]:>8} {count * (here if step.on_host else device):9.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
