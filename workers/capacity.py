"""How much memory there is: of a device, of the host, and for experts whose originals stay on the host."""

from __future__ import annotations

import os
from pathlib import Path

import torch

CAPACITY = "MOEVOLVE_DEVICE_GB"
"""Environment variable: 10^9 bytes that a worker may take of its device, where that is less than there is."""

_EXPERTS_SHARE = 0.75
"""Of what is free on a device once the rest of a model is there, experts take so much where nobody knows what passes
need: the rest is for keys and values, activations and logits."""

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still take on a device; on a CPU those of `available_host_bytes`."""
    if device.type != "cuda":
        return min(available_host_bytes(), _allowed() or _UNLIMITED)
    free, _ = torch.cuda.mem_get_info(device)
    # What torch's allocator holds without using it is free to us.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    allowed = _allowed()
    return free if allowed is None else min(free, allowed - torch.cuda.memory_allocated(device))


def experts_room(device: torch.device) -> int:
    """Bytes on a device that experts may take, beside the rest of a model, which is there."""
    return int(_EXPERTS_SHARE * free_bytes(device))


def available_host_bytes() -> int:
    """Bytes of host memory that this process can take: what the machine has, or what its cgroup leaves it."""
    return max(0, min(_machine(), _within_cgroup()))


def _allowed() -> int | None:
    given = os.environ.get(CAPACITY)
    return None if given is None else int(float(given) * 1e9)


def _machine() -> int:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _within_cgroup() -> int:
    """Of version 2, or 1, as the process's own hierarchy shows it in a container."""
    for most, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            limit, now = ((_CGROUP / name).read_text(encoding="ascii").strip() for name in (most, used))
        except OSError:
            continue
        if limit.isdigit():
            return int(limit) - int(now) + _cache(most)
    return _UNLIMITED


def _cache(limit: str) -> int:
    """Pages of files that the kernel gives up when memory is short; they count as used."""
    try:
        lines = (_CGROUP / limit).with_name("memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
