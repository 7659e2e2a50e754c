"""The number of threads of a worker's process."""

from __future__ import annotations

import torch

from moevolve.evaluators.errors import UserError


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
