"""What a masked feed-forward network costs beside the whole one, in both forms of the kernel. Run it by hand.

    python tests/benchmarks/bench_tomoe.py [--experts 8] [--threads 1]

Processor time, gated networks in float32, the shortest of a few runs. `chosen` is the form that the kernel takes; ideal
is the share of neurons itself.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn.functional import linear, silu

from moevolve.kernels import neuron_mask
from moevolve.kernels.expert_ffn import NetworkWeights
from moevolve.kernels.neuron_mask import ExpertMasks, masked_network

SIZES = ((128, 1024), (512, 2048), (1024, 4096))
SHARES = (0.25, 0.5, 0.75)
TOKENS = (16, 64, 256, 1024, 4096)
LARGEST = 1 << 32
"""Multiplications of one matrix: larger cases are left out."""


def shortest(run: Callable[[], object], runs: int = 5) -> float:
    """Seconds of processor time."""
    run()
    times = []
    for _ in range(runs):
        started = time.process_time()
        run()
        times.append(time.process_time() - started)
    return min(times)


def timed(tokens: int, masks: ExpertMasks, network: NetworkWeights) -> tuple[float, float, float]:
    """Seconds of the chosen form, of the sliced and of the masked one."""
    hidden = torch.randn(tokens, network.up.shape[1])
    chosen = torch.randint(0, len(masks.kept), (tokens,))
    default, found = neuron_mask._COPY_COST, []
    for cost in (default, 0, 1 << 40):
        neuron_mask._COPY_COST = cost
        found.append(shortest(lambda: masked_network(hidden, chosen, masks, network)))
    neuron_mask._COPY_COST = default
    return found[0], found[1], found[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(
        f"{'hidden':>6} {'width':>6} {'share':>6} {'tokens':>7} {'chosen':>7} {'sliced':>7} {'masked':>7}  of the whole"
    )
    for hidden, width in SIZES:
        network = NetworkWeights(
            torch.randn(width, hidden), torch.randn(width, hidden), torch.randn(hidden, width), None, None, None, silu
        )
        for share in SHARES:
            masks = ExpertMasks.of(torch.rand(options.experts, width).argsort(dim=1) < int(share * width))
            for tokens in TOKENS:
                if hidden * width * tokens > LARGEST:
                    continue
                states = torch.randn(tokens, hidden)
                whole = shortest(lambda: whole_network(states, network))  # noqa: B023
                chosen, sliced, masked = (each / whole for each in timed(tokens, masks, network))
                print(f"{hidden:6} {width:6} {share:6} {tokens:7} {chosen:7.2f} {sliced:7.2f} {masked:7.2f}")


def whole_network(hidden: torch.Tensor, network: NetworkWeights) -> torch.Tensor:
    """The unmasked network's output."""
    assert network.gate is not None
    return linear(silu(linear(hidden, network.gate)) * linear(hidden, network.up), network.down)


if __name__ == "__main__":
    main()
