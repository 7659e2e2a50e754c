"""Peak memory of a process that runs one model.

On CUDA it is `torch.cuda.max_memory_allocated`, summed over devices: weights, activations and KV cache. On the CPU it
is the peak resident set (`VmHWM` of /proc/self/status, reset before every run) minus the resident set right before the
model was loaded. It includes memory that the allocator keeps from earlier, smaller runs.
"""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from moevolve.workers.contract.capacity import release_freed_memory

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class PeakMemory:
    """Measures the peak memory on one device. It must be created right before the model is loaded."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.release()
        self._baseline = None if self._cuda else _process_bytes("VmRSS")
        self._works = self._cuda

    def release(self) -> None:
        """Return freed host memory, such as that of loading the model, to the system."""
        gc.collect()
        release_freed_memory()

    def start(self) -> None:
        """Start a measurement."""
        if self._cuda:
            for index in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(index)
            return
        try:
            _RESET.write_text(_RESET_PEAK)
            self._works = self._baseline is not None
        except OSError:
            # Without a reset the peak would be that of loading the model.
            self._works = False

    def peak(self) -> int | None:
        """Return the peak memory since `start` in bytes; None if the system doesn't report it."""
        if self._cuda:
            return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
        highest = _process_bytes("VmHWM") if self._works else None
        # For tiny models noise could make the difference negative.
        return None if highest is None or self._baseline is None else max(0, highest - self._baseline)


def _process_bytes(field: str) -> int | None:
    """Read a field in kB of this process's status in /proc, in bytes; None on systems without it."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(found[0]) * 1024 if found else None
