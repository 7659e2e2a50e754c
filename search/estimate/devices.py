"""What devices can do at best, by their makers' data sheets, and what a search is assumed to get of it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from moevolve.evaluators.errors import UserError


@dataclass(frozen=True, slots=True)
class Device:
    """One device that a worker runs on.

    Attributes:
        name: what it is called on the command line.
        title: what its maker calls it.
        half_flops: most operations/s in matrix products of bfloat16 and float16, dense, sums in float32.
        single_flops: the same in float32 (no TF32: torch leaves it off).
        bandwidth: bytes/s between its memory and its processors.
        memory: bytes; 0 where it is the host's.
        link: bytes/s from pinned host memory; 0 where there is no way to go.
        layer_seconds: what a decoder layer takes however little it computes.
    """

    name: str
    title: str
    half_flops: float
    single_flops: float
    bandwidth: float
    memory: int
    link: float
    layer_seconds: float

    def flops(self, dtype: str) -> float:
        """Operations/s at best in a dtype of a model."""
        return self.single_flops if dtype == "float32" else self.half_flops


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Which share of a device's best a search is assumed to get.

    Attributes:
        compute: of the operations/s, in passes that are bound by them.
        memory: of the memory's bandwidth, in passes and merges that are bound by it.
        link: of the bandwidth from the host.
    """

    compute: float
    memory: float
    link: float


GPU_UTILISATION = Utilisation(compute=0.4, memory=0.6, link=0.8)
"""Not measured by us: what is commonly got of plain `transformers` models with batches of thousands of tokens."""

GPU_LAYER_SECONDS = 5e-4
"""Some forty kernels per layer, launched one by one from Python at about ten microseconds each, and synchronisation."""

_GIGA, _TERA = 10**9, 10**12
_PCIE4, _PCIE5 = 32 * _GIGA, 64 * _GIGA


def _gpu(
    name: str, title: str, half: float, single: float, bandwidth: float, memory: int, link: int = _PCIE4
) -> Device:
    return Device(name, title, half * _TERA, single * _TERA, bandwidth * _GIGA, memory * _GIGA, link, GPU_LAYER_SECONDS)


GPUS: dict[str, Device] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a10", "NVIDIA A10", 125, 31.2, 600, 24),
        _gpu("a6000", "NVIDIA RTX A6000", 154.8, 38.7, 768, 48),
        _gpu("a100-40g", "NVIDIA A100 SXM 40 GB", 312, 19.5, 1555, 40),
        _gpu("a100-80g", "NVIDIA A100 SXM 80 GB", 312, 19.5, 2039, 80),
        _gpu("a100-80g-pcie", "NVIDIA A100 PCIe 80 GB", 312, 19.5, 1935, 80),
        _gpu("b200", "NVIDIA B200", 2250, 75, 8000, 180, _PCIE5),
        _gpu("h100", "NVIDIA H100 SXM", 989, 67, 3350, 80, _PCIE5),
        _gpu("h100-pcie", "NVIDIA H100 PCIe", 756, 51, 2000, 80, _PCIE5),
        _gpu("h200", "NVIDIA H200 SXM", 989, 67, 4800, 141, _PCIE5),
        _gpu("l4", "NVIDIA L4", 121, 30.3, 300, 24),
        _gpu("l40s", "NVIDIA L40S", 362, 91.6, 864, 48),
        _gpu("rtx3090", "NVIDIA GeForce RTX 3090", 71, 35.6, 936, 24),
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", 165, 82.6, 1008, 24),
    )
}
"""Peaks of NVIDIA's data sheets and architecture white papers (A10, A100, H100, H200, L4, L40S, RTX A6000, GA102, Ada,
DGX B200); where they give rates with sparsity, half of that. The link is PCIe 4 or 5 x16 in one direction. Memory is
taken as 10^9 bytes per GB: what a card has beyond that is left to the CUDA context and the allocator."""


def find_gpus(names: str) -> tuple[Device, ...]:
    """The devices of a comma-separated list.

    Raises:
        UserError: one is unknown; the message has near names.
    """
    return tuple(_find(name.strip().lower()) for name in names.split(","))


def _find(name: str) -> Device:
    if name in GPUS:
        return GPUS[name]
    near = difflib.get_close_matches(name, GPUS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(GPUS)}"
    raise UserError(f"--gpu: {name!r} is unknown; {hint}")
