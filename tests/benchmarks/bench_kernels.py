"""Measures the kernels against what the machine could do: copy the same bytes, or multiply as much. Run it by hand.

    python tests/benchmarks/bench_kernels.py [--threads 1] [--device cpu] [--repeats 9] [--json FILE] [--only merge]

Every measurement alternates with its yardstick, so that other load on the machine falls on both, and medians count. On
one CPU thread the time is the thread's own, which other processes don't add to. `copy` is the time of a copy that moves
as many bytes (read plus written) over the kernel's; `limit` the larger of that and the time of as many multiplications
and additions in a large matrix product of the dtype (float32 for merging) over the kernel's. 1 is as fast as it gets.

- merge: n experts into n'.
- route: logits to weights and indices.
- products: linear layers and whole experts (routing's choice to weighted sum) in float32 on a CPU, in tiles by
  torch and oneDNN, and as torch does by itself.
- experts: whole experts in bfloat16 on a GPU, by torch's grouped products and by a loop over the experts.
- ffn, masks: a dense network whose neurons are divided among experts or masked, half of them active per token, beside
  the whole network.
- mix: a block-mixed linear layer of half the parameters, in each variant, beside the dense layer.

On a GPU shapes are those of Mixtral-8x7B, Qwen3-30B-A3B, GPT-OSS-20B and, where dense, Llama-2-7B.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import bench
import torch
from torch import Tensor

from moevolve.kernels import products as kernel
from moevolve.kernels.block_mix import block_mix
from moevolve.kernels.expert_ffn import NetworkWeights, expert_ffn
from moevolve.kernels.expert_merge import merge_experts
from moevolve.kernels.neuron_mask import ExpertMasks, masked_network
from moevolve.kernels.routing import route_mapped, route_selected
from moevolve.kernels.routing_rule import RoutingRule

# n, n', values per expert
MERGES = ((8, 4, 4 << 20), (8, 2, 4 << 20), (16, 8, 2 << 20), (60, 30, 1 << 19))
PUBLISHED_MERGES = ((8, 4, 28672 * 4096), (128, 64, 1536 * 2048), (32, 16, 5760 * 2880))
# tokens, n, n', k
ROUTES = ((8192, 8, 4, 2), (8192, 60, 30, 4))
PUBLISHED_ROUTES = ((8192, 8, 4, 2), (8192, 128, 64, 8), (8192, 32, 16, 4))
# tokens, features, outputs
LINEARS = ((2048, 128, 256), (1024, 128, 8000), (4096, 1024, 1024))
# tokens, experts, hidden, width, where k is 2
EXPERTS = ((2048, 4, 128, 128), (2048, 8, 512, 1024))
# tokens, experts, k, hidden, width
PUBLISHED_EXPERTS = ((4096, 8, 2, 4096, 14336), (4096, 128, 8, 2048, 768), (4096, 32, 4, 2880, 2880))
# tokens, hidden, width of a dense network; its experts and mixing blocks are 8
NETWORK, PUBLISHED_NETWORK = (2048, 576, 1536), (4096, 4096, 11008)
PARTS = 8

Action = Callable[[], object]
Row = dict[str, str | float]


class Bench:
    """Times kernels on one device beside their yardsticks, prints a line for each and keeps it."""

    def __init__(self, device: str, threads: int, repeats: int) -> None:
        self.device, self.repeats, self.rows = device, repeats, list[Row]()
        self._clock = time.thread_time if device == "cpu" and threads == 1 else time.perf_counter
        self._rates: dict[torch.dtype, float] = {}

    def medians(self, actions: dict[str, Action]) -> dict[str, float]:
        """Seconds of each, timed in turns after one turn to warm up."""
        times: dict[str, list[float]] = {name: [] for name in actions}
        for turn in range(self.repeats + 1):
            for name, action in actions.items():
                start = self._clock()
                action()
                if self.device == "cuda":
                    torch.cuda.synchronize()
                if turn:
                    times[name].append(self._clock() - start)
        return {name: statistics.median(each) for name, each in times.items()}

    def rate(self, dtype: torch.dtype) -> float:
        """Multiplications and additions per second of a large matrix product."""
        if dtype not in self._rates:
            size = 8192 if self.device == "cuda" else 1024
            a, b = (torch.randn((size, size), device=self.device).to(dtype) for _ in range(2))
            self._rates[dtype] = 2 * size**3 / self.medians({"product": lambda: a @ b})["product"]
        return self._rates[dtype]

    def measure(
        self, what: str, nbytes: float, operations: float, dtype: torch.dtype, actions: dict[str, Action]
    ) -> None:
        """Time ways to do the same thing; `nbytes` are read or written and `operations` done in `dtype` at least."""
        source = torch.ones(max(int(nbytes) // 8, 1), dtype=torch.float32, device=self.device)
        target = torch.empty_like(source)
        seconds = self.medians({"copy": lambda: target.copy_(source), **actions})
        copy, arithmetic = seconds.pop("copy"), operations / self.rate(dtype)
        for name, taken in seconds.items():
            row: Row = {"what": what, "by": name, "milliseconds": taken * 1e3}
            row |= {"gigabytes_per_second": nbytes / taken / 1e9, "gigaflops": operations / taken / 1e9}
            row |= {"copy": copy / taken, "limit": max(copy, arithmetic) / taken}
            self.rows.append(row)
            print(
                f"  {what:58} {name:12} {taken * 1e3:9.3f} ms {nbytes / taken / 1e9:8.1f} GB/s "
                f"{operations / taken / 1e9:9.1f} GFLOP/s  copy {copy / taken:5.2f}  limit {row['limit']:5.2f}"
            )


def merged_matrix(retained: int, count: int, density: float, generator: torch.Generator) -> Tensor:
    """A merged candidate's `W_EM`: one-hot rows with some entries perturbed."""
    coefficients = torch.randn((retained, count), generator=generator) * 0.1
    coefficients *= torch.rand((retained, count), generator=generator) < density
    coefficients[torch.arange(retained), torch.randperm(count, generator=generator)[:retained]] += 1
    return coefficients


def bench_merge(bench: Bench) -> None:
    on_gpu = bench.device == "cuda"
    for dtype in (torch.bfloat16,) if on_gpu else (torch.float32, torch.bfloat16):
        for count, retained, size in PUBLISHED_MERGES if on_gpu else MERGES:
            generator = torch.Generator().manual_seed(0)
            experts = torch.randn((count, size), device=bench.device, dtype=dtype)
            out = torch.empty((retained, size), dtype=dtype, device=bench.device)
            for density in (1.0, 0.35):
                coefficients = merged_matrix(retained, count, density, generator)
                used = int(coefficients.count_nonzero())
                what = f"merge {str(dtype)[6:]} {count} -> {retained}, {used} coefficients"
                nbytes = (count + retained) * size * experts.element_size()
                actions: dict[str, Action] = {"merge": partial(merge_experts, coefficients, experts, out)}
                if on_gpu:
                    actions["torch"] = partial(torch.mm, coefficients.to(experts), experts, out=out)
                bench.measure(what, nbytes, 2.0 * used * size, torch.float32, actions)


def bench_route(bench: Bench) -> None:
    rule = RoutingRule(True)
    for tokens, count, retained, active in PUBLISHED_ROUTES if bench.device == "cuda" else ROUTES:
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn((tokens, count), generator=generator).to(bench.device, torch.bfloat16)
        mapping = merged_matrix(retained, count, 0.35, generator).to(bench.device)
        selected = mapping.argmax(dim=1)
        nbytes = tokens * (count * 2 + active * 12)
        for name, operations, route in (
            ("mapping", 2.0 * tokens * count * retained, partial(route_mapped, logits, mapping, active, rule)),
            ("one-hot", 0.0, partial(route_selected, logits, selected, active, rule, False)),
        ):
            what = f"route {tokens} tokens, {count} -> {retained}, {name}"
            bench.measure(what, nbytes, operations, torch.float32, {"route": route})


def bench_experts(bench: Bench) -> None:
    if bench.device != "cuda":
        return
    for tokens, count, active, hidden, width in PUBLISHED_EXPERTS:
        drawn = partial(torch.randn, device=bench.device, dtype=torch.bfloat16)
        inputs, weights = drawn(tokens, hidden), drawn(tokens, active)
        gate_up, down = drawn(count, 2 * width, hidden), drawn(count, hidden, width)
        chosen = torch.rand(tokens, count, device=bench.device).topk(active).indices
        ways: dict[str, Action] = {
            "grouped": partial(torch_experts, inputs, chosen, weights, gate_up, down),
            "loop": partial(looped_experts, inputs, chosen, weights, gate_up, down),
        }
        nbytes = 2.0 * (gate_up.numel() + down.numel() + 2 * inputs.numel())
        what = f"experts, {tokens} tokens, {active} of {count} experts {hidden} x {width}"
        bench.measure(what, nbytes, 6.0 * active * tokens * hidden * width, torch.bfloat16, ways)


def dense_network(bench: Bench) -> tuple[Tensor, NetworkWeights]:
    """Hidden states and a gated network, in float32 on a CPU and in bfloat16 on a GPU."""
    tokens, hidden, width = PUBLISHED_NETWORK if bench.device == "cuda" else NETWORK
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    drawn = partial(torch.randn, device=bench.device, dtype=dtype)
    weights = drawn(width, hidden), drawn(width, hidden), drawn(hidden, width)
    return drawn(tokens, hidden), NetworkWeights(*weights, None, None, None, torch.nn.functional.silu)


def bench_network(bench: Bench, what: str, run: Callable[[Tensor, NetworkWeights], Action]) -> None:
    """A way to run half of a network's neurons for a token, beside the whole network."""
    hidden, network = dense_network(bench)
    everywhere = torch.ones(len(hidden), 1, dtype=torch.bool, device=bench.device)
    actions: dict[str, Action] = {what: run(hidden, network), "dense": partial(expert_ffn, hidden, everywhere, network)}
    width, size = network.up.shape
    nbytes = (3.0 * width * size + 2 * hidden.numel()) * hidden.element_size()
    operations = 3.0 * len(hidden) * width * size
    bench.measure(f"{what}, {len(hidden)} tokens, {size} x {width}", nbytes, operations, hidden.dtype, actions)


def bench_ffn(bench: Bench) -> None:
    def run(hidden: Tensor, network: NetworkWeights) -> Action:
        picks = torch.rand(len(hidden), PARTS, device=bench.device).topk(PARTS // 2).indices
        chosen = torch.zeros(len(hidden), PARTS, dtype=torch.bool, device=bench.device).scatter_(1, picks, True)
        return partial(expert_ffn, hidden, chosen, network)

    bench_network(bench, "ffn", run)


def bench_masks(bench: Bench) -> None:
    def run(hidden: Tensor, network: NetworkWeights) -> Action:
        width = len(network.up)
        picks = torch.rand(PARTS, width, device=bench.device).topk(width // 2).indices
        kept = torch.zeros(PARTS, width, dtype=torch.bool, device=bench.device).scatter_(1, picks, True)
        chosen = torch.randint(PARTS, (len(hidden),), device=bench.device)
        return partial(masked_network, hidden, chosen, ExpertMasks.of(kept), network)

    bench_network(bench, "masks", run)


def bench_mix(bench: Bench) -> None:
    hidden, network = dense_network(bench)
    dense = network.up
    outputs, inputs = dense.shape
    rank = outputs * inputs // 2 // (outputs + inputs)
    drawn = partial(torch.randn, device=bench.device, dtype=dense.dtype)
    u, v = drawn(PARTS, outputs // PARTS, rank), drawn(PARTS, rank, inputs // PARTS)
    mixings = {"I": drawn(PARTS, PARTS), "II": drawn(PARTS, PARTS, rank), "III": drawn(3, PARTS, PARTS, rank)}
    ways: dict[str, Action] = {name: partial(block_mix, hidden, u, v, mixing) for name, mixing in mixings.items()}
    ways["dense"] = partial(torch.nn.functional.linear, hidden, dense)
    nbytes = float(u.numel() + v.numel() + len(hidden) * (inputs + outputs)) * dense.element_size()
    operations = 2.0 * len(hidden) * rank * (inputs + outputs)
    bench.measure(f"mix, {len(hidden)} tokens, {inputs} -> {outputs}", nbytes, operations, dense.dtype, ways)


def bench_products(bench: Bench) -> None:
    if bench.device != "cpu" or not kernel.onednn_available():
        return
    default = "onednn" if kernel.onednn_preferred() else "torch"
    for tokens, features, outputs in LINEARS:
        inputs, weight = torch.randn(tokens, features), torch.randn(outputs, features)
        linears: dict[str, Action] = {
            "untiled": partial(torch.nn.functional.linear, inputs, weight),
            "torch": partial(kernel.linear, inputs, weight),
            "onednn": partial(kernel.linear, inputs, weight, use_onednn=True),
        }
        operations = 2.0 * tokens * features * outputs
        nbytes = 4.0 * (inputs.numel() + weight.numel() + tokens * outputs)
        measured = {name + " *" * (name == default): action for name, action in linears.items()}
        bench.measure(f"linear {tokens} x {features} -> {outputs}", nbytes, operations, torch.float32, measured)
    for tokens, experts, hidden, width in EXPERTS:
        inputs, weights = torch.randn(tokens, hidden), torch.rand(tokens, 2)
        gate_up, down = torch.randn(experts, 2 * width, hidden), torch.randn(experts, hidden, width)
        chosen = torch.rand(tokens, experts).topk(2).indices
        run = partial(kernel.experts, inputs, chosen, weights, gate_up, down, torch.nn.functional.silu)
        ways: dict[str, Action] = {
            "untiled": partial(torch_experts, inputs, chosen, weights, gate_up, down),
            "torch": run,
            "onednn": partial(run, use_onednn=True),
        }
        nbytes = 4.0 * (gate_up.numel() + down.numel() + 6 * inputs.numel())
        measured = {name + " *" * (name == default): action for name, action in ways.items()}
        what = f"experts, {tokens} tokens, {experts} experts {hidden} x {width}"
        bench.measure(what, nbytes, 12.0 * tokens * hidden * width, torch.float32, measured)


def torch_experts(inputs: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Torch's grouped products over tokens sorted by expert, which `transformers` runs by default."""
    order = chosen.flatten().argsort(stable=True)
    ends = torch.bincount(chosen.flatten(), minlength=len(gate_up)).cumsum(0).to(torch.int32)
    rows = order // chosen.shape[1]
    gate, up = torch.nn.functional.grouped_mm(inputs[rows], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    activated = torch.nn.functional.silu(gate) * up
    outputs = torch.nn.functional.grouped_mm(activated, down.transpose(1, 2), offs=ends)
    return torch.zeros_like(inputs).index_add_(0, rows, outputs * weights.flatten()[order, None])


def looped_experts(inputs: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One product after the other."""
    outputs = torch.zeros_like(inputs)
    for expert, (first, second) in enumerate(zip(gate_up, down, strict=True)):
        rows, rank = (chosen == expert).nonzero(as_tuple=True)
        gate, up = torch.nn.functional.linear(inputs[rows], first).chunk(2, dim=-1)
        activated = torch.nn.functional.silu(gate) * up
        outputs.index_add_(0, rows, torch.nn.functional.linear(activated, second) * weights[rows, rank, None])
    return outputs


def main() -> None:
    parts = {"merge": bench_merge, "route": bench_route, "products": bench_products, "experts": bench_experts}
    parts |= {"ffn": bench_ffn, "masks": bench_masks, "mix": bench_mix}
    parser = bench.arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write all rows here")
    parser.add_argument("--only", choices=tuple(parts))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    timer = Bench(options.device, options.threads, options.repeats)
    print(f"kernels on {options.device}, {options.threads} thread(s); * is what runs by default")
    with torch.inference_mode():
        for name, part in parts.items():
            if options.only in (None, name):
                part(timer)
    if options.json:
        options.json.write_text(json.dumps({"device": options.device, "rows": timer.rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
