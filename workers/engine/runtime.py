"""Process-wide settings of a worker: threads, and an allocator that keeps what it freed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from moevolve.evaluators.errors import UserError

WORKER_ENV: Mapping[str, str] = MappingProxyType(
    {
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
        "TOKENIZERS_PARALLELISM": "false",
    }
)
"""Environment of a worker process; read when it starts, so it must be set by whoever starts it.

A forward pass allocates and frees the same activations again and again. glibc by default gives large blocks back to
the kernel at once, and every following pass pays for page faults and zeroing. With both thresholds out of reach freed
memory stays with the process. Other C libraries ignore the variables. Threads are set by `configure_runtime`.
"""


def configure_runtime(threads: int) -> None:
    """Fix the number of threads of torch's operators in this process.

    The number is configuration, because the order of floating-point sums, and with it the last digits of a score, may
    depend on it. It overrides `OMP_NUM_THREADS`, which Ray sets to the CPUs an actor reserves.

    Args:
        threads: intra-op threads, at least 1.

    Raises:
        UserError: `threads` is below 1.
    """
    if threads < 1:
        raise UserError(f"engine.threads is {threads}; give the torch threads per worker, at least 1")
    torch.set_num_threads(threads)
