"""GPUs that estimates know: their memory, and their peak FLOP/s by the makers' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import RunConfig
from moevolve.store.lineage import suggestion

DEFAULT_GPUS = "a100-80g,h100,h200"
UTILISATION = 0.4
"""Default for the share of a GPU's peak FLOP/s that a search is assumed to reach: what plain `transformers` models
commonly reach in batches of thousands of tokens. It isn't measured for searches."""


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of GPU.

    Attributes:
        name: Name on the command line.
        title: The maker's name.
        half_flops: Peak FLOP/s of dense matrix products in bfloat16 and float16, accumulated in float32.
        single_flops: Peak FLOP/s in float32 without TF32, which torch leaves off.
        memory: Bytes of memory.
    """

    name: str
    title: str
    half_flops: float
    single_flops: float
    memory: int

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s in a model's dtype."""
        return self.single_flops if dtype == "float32" else self.half_flops


def _gpu(name: str, title: str, half_tflops: float, single_tflops: float, gigabytes: int) -> Device:
    return Device(name, title, half_tflops * 1e12, single_tflops * 1e12, gigabytes * 10**9)


GPUS: dict[str, Device] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a10", "NVIDIA A10", 125, 31.2, 24),
        _gpu("a6000", "NVIDIA RTX A6000", 154.8, 38.7, 48),
        _gpu("a100-40g", "NVIDIA A100 SXM 40 GB", 312, 19.5, 40),
        _gpu("a100-80g", "NVIDIA A100 SXM 80 GB", 312, 19.5, 80),
        _gpu("a100-80g-pcie", "NVIDIA A100 PCIe 80 GB", 312, 19.5, 80),
        _gpu("b200", "NVIDIA B200", 2250, 75, 180),
        _gpu("h100", "NVIDIA H100 SXM", 989, 67, 80),
        _gpu("h100-pcie", "NVIDIA H100 PCIe", 756, 51, 80),
        _gpu("h200", "NVIDIA H200 SXM", 989, 67, 141),
        _gpu("l4", "NVIDIA L4", 121, 30.3, 24),
        _gpu("l40s", "NVIDIA L40S", 362, 91.6, 48),
        _gpu("rtx3090", "NVIDIA GeForce RTX 3090", 71, 35.6, 24),
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", 165, 82.6, 24),
    )
}
"""Peaks of NVIDIA's data sheets and architecture white papers (A10, A100, H100, H200, L4, L40S, RTX A6000, GA102, Ada,
DGX B200); where they give rates with sparsity, half of that. Memory is taken as 10^9 bytes per GB: what a card has
beyond that is left to the CUDA context and the allocator."""


def gpus_for(config: RunConfig, names: str | None = None) -> tuple[Device, ...]:
    """GPUs to estimate a run for: the named ones, or without names the default ones, or none for a run on the CPU."""
    on_cpu = config.model.device == "cpu" or (config.model.device == "auto" and not config.workers.num_gpus)
    if names is None and on_cpu:
        return ()
    return find_gpus(DEFAULT_GPUS if names is None else names)


def find_gpus(names: str) -> tuple[Device, ...]:
    """Look up a comma-separated list of GPUs; a `UserError` names an unknown one, with similar names."""
    found = []
    for name in (each.strip().lower() for each in names.split(",")):
        if name not in GPUS:
            raise UserError(f"--gpu: {name!r} is unknown; {suggestion(name, GPUS)}")
        found.append(GPUS[name])
    return tuple(found)
