"""Block-mixed linear layers against low rank: NanoMoE's Figures 2 and 3 on weights of our own. Run it by hand.

    python tests/benchmarks/bench_nanomoe.py [--rounds 10] [--weights FILE --tensor NAME]

The paper fits a layer's outputs on isotropic random inputs, so its loss is, up to a factor, the squared Frobenius norm
of the weight's error; here that is minimised itself, by alternating least squares on U, V and M from the truncated
singular value decomposition. Two weights: a random one of the shape of OPT-13B's first fully connected layer over 20,
with the paper's K and its r over 20, and a layer of the demo model. Forms larger than the weight are left out.
Against (d1 + d2) r, the K^2 r multiplies of M weigh 20 times as much as in the paper's layer: K = 4 costs here what 18
does there.

Every (K, r) is held against plain low rank of as many parameters, and of as many operations, at most. Then the lower
envelopes: the best of each variant within a budget.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from moevolve.kernels.block_mix import block_mix
from moevolve.workers.methods.nanomoe.edit import BlockForm, Variant
from moevolve.workers.methods.nanomoe.mixing import fit_layer

VARIANTS: tuple[Variant, ...] = ("I", "II", "III")
BLOCKS = (2, 4, 8, 16, 32, 64, 128)
DEMO = Path(__file__).parents[2] / "configs" / "demo"
BUDGETS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True)
class Point:
    """One form fitted to a weight: its costs, and the relative error in the Frobenius norm."""

    form: BlockForm
    parameters: int
    flops: int
    error: float


class LowRank:
    """The best error of plain low rank at any budget."""

    def __init__(self, weight: Tensor) -> None:
        self.outputs, self.inputs = weight.shape
        squares = torch.linalg.svdvals(weight).square()
        rests = squares.flip(0).cumsum(0).flip(0).tolist()
        self._errors = [(rest / rests[0]) ** 0.5 for rest in (*rests, 0.0)]

    def at(self, parameters: float) -> float:
        """Relative error at the largest rank within a number of parameters; operations are two each."""
        rank = int(parameters // (self.outputs + self.inputs))
        return self._errors[min(rank, len(self._errors) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="of least squares on V, U and M")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--weights", type=Path, help="a safetensors file, instead of the demo model's")
    parser.add_argument("--tensor", help="a linear layer's weight in it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    title, weight = layer(options.weights, options.tensor)
    random = torch.randn((1024, 256), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    measure("random [1024, 256]", random, (128, 64, 32, 16, 8, 4, 2), options.rounds)
    ranks = tuple(rank for rank in (64, 48, 32, 24, 16, 8, 4, 2) if rank <= min(weight.shape) // 2)
    measure(title, weight, ranks, options.rounds)


def layer(file: Path | None, tensor: str | None) -> tuple[str, Tensor]:
    """The weight asked for, or one of the demo model: of its dense form if that is there."""
    if file is None:
        dense = DEMO / "dense" / "model.safetensors"
        file = dense if dense.exists() else DEMO / "model" / "model.safetensors"
        part = "mlp.up_proj" if dense.exists() else "self_attn.o_proj"
        tensor = tensor or f"model.layers.1.{part}.weight"
    with safe_open(str(file), "pt") as tensors:
        name = tensor or next(each for each in tensors.keys() if each.endswith("proj.weight"))  # noqa: SIM118
        weight = tensors.get_tensor(name).double()
    return f"{name} {list(weight.shape)}", weight


def measure(title: str, weight: Tensor, ranks: tuple[int, ...], rounds: int) -> None:
    started = time.perf_counter()
    low_rank = LowRank(weight)
    points = []
    print(f"\n{title}, {rounds} rounds")
    print("  variant    K    r  parameters      FLOPs   error | low rank: same parameters, same FLOPs")
    for form in forms(weight, ranks):
        points.append(fitted(weight, form, rounds))
        show(points[-1], low_rank)
    dense = weight.numel()
    print(f"  fitted {len(points)} forms in {time.perf_counter() - started:.0f} s; the dense layer: {dense} parameters")
    tally(points, low_rank)
    envelope("parameters", points, low_rank, dense, lambda point: point.parameters)
    envelope("FLOPs", points, low_rank, dense, lambda point: point.flops / 2)


def forms(weight: Tensor, ranks: tuple[int, ...]) -> Iterator[BlockForm]:
    outputs, inputs = weight.shape
    for variant in VARIANTS:
        for blocks in BLOCKS:
            for rank in ranks:
                form = BlockForm(variant, blocks, rank)
                divides = outputs % blocks == 0 and inputs % blocks == 0
                if divides and form.parameters(outputs, inputs) < weight.numel():
                    yield form


def fitted(weight: Tensor, form: BlockForm, rounds: int) -> Point:
    found = fit_layer(weight, form.rank, form.blocks, torch.from_numpy(form.unmixed), rounds)
    product = block_mix(torch.eye(weight.shape[1], dtype=found[0].dtype), *found).t()
    error = float((weight - product).norm() / weight.norm())
    return Point(form, form.parameters(*weight.shape), form.flops(*weight.shape), error)


def show(point: Point, low_rank: LowRank) -> None:
    form = point.form
    print(
        f"  {form.variant:7} {form.blocks:4} {form.rank:4} {point.parameters:11} {point.flops:10} {point.error:7.4f} | "
        f"{low_rank.at(point.parameters):27.4f} {low_rank.at(point.flops / 2):11.4f}"
    )


def tally(points: list[Point], low_rank: LowRank) -> None:
    for variant in VARIANTS:
        own = [point for point in points if point.form.variant == variant]
        same_parameters = sum(point.error < low_rank.at(point.parameters) for point in own)
        same_flops = sum(point.error < low_rank.at(point.flops / 2) for point in own)
        print(
            f"  {variant:3}: better than low rank of the same parameters in {same_parameters} of {len(own)} forms, of "
            f"the same FLOPs in {same_flops}"
        )


def envelope(
    cost_title: str, points: list[Point], low_rank: LowRank, dense: int, cost: Callable[[Point], float]
) -> None:
    """Best error of each variant within a budget, given as a share of the dense layer's cost."""
    print(f"  lower envelopes by {cost_title}, as a share of the dense layer's: error (K, r)")
    print("  budget  low rank  " + "".join(f"{variant:>20}" for variant in VARIANTS))
    for budget in BUDGETS:
        cells = []
        for variant in VARIANTS:
            within = [p for p in points if p.form.variant == variant and cost(p) <= budget * dense]
            best = min(within, key=lambda point: point.error, default=None)
            cell = "-" if best is None else f"{best.error:.4f} ({best.form.blocks:3}, {best.form.rank:3})"
            cells.append(f"{cell:>20}")
        print(f"  {budget:6.2f}  {low_rank.at(budget * dense):8.4f}  " + "".join(cells))


if __name__ == "__main__":
    main()
