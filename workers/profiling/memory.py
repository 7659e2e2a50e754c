"""Peak memory of a process that holds one model.

On CUDA it is `torch.cuda.max_memory_allocated`, summed over devices: weights, activations and key-value cache. On the
CPU it is the peak of the resident set (`VmHWM` of /proc/self/status, started anew before every run) less the resident
set right before the model was loaded. It includes what the allocator keeps of earlier, smaller runs.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable
from pathlib import Path

import torch

_MEMORY = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class PeakMemory:
    """Measures peaks on one device; made right before the model is loaded."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        _give_back()
        self._baseline = None if self._cuda else _resident("VmRSS")
        self._works = self._cuda

    def loaded(self) -> None:
        """The model is there: give back what only loading it took."""
        _give_back()

    def start(self) -> None:
        """Begin a measurement."""
        if self._cuda:
            for index in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(index)
            return
        try:
            _RESET.write_text(_RESET_PEAK)
            self._works = self._baseline is not None
        except OSError:
            # Without a fresh start the peak would be that of loading.
            self._works = False

    def peak(self) -> int | None:
        """Bytes at the peak since `start`; None where the system can't tell."""
        if self._cuda:
            return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
        highest = _resident("VmHWM") if self._works else None
        # A model smaller than the noise can seem to take less than nothing.
        return None if highest is None or self._baseline is None else max(0, highest - self._baseline)


def free_bytes(devices: Iterable[torch.device]) -> int | None:
    """Bytes that are free on devices, or in the host's memory; None where the system can't tell."""
    gpus = [device for device in devices if device.type == "cuda"]
    if gpus:
        return sum(torch.cuda.mem_get_info(device)[0] for device in gpus)
    return _kibibytes(_MEMORY, "MemAvailable")


def _give_back() -> None:
    """Return freed host memory to the system, where the C library (glibc) knows how."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident(field: str) -> int | None:
    """A field of this process's status in bytes; None on systems that have no such file."""
    return _kibibytes(_STATUS, field)


def _kibibytes(file: Path, field: str) -> int | None:
    """A field of a file of the system in bytes; None on systems that have no such file."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(found[0]) * 1024 if found else None
