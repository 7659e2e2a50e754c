"""How much memory a worker needs, how much is available, and refusing a model that doesn't fit before loading it."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import computed_field

from moevolve.evaluators.errors import UserError

if TYPE_CHECKING:
    import torch

# Environment variable: upper bound on the device memory that a worker may use, in units of 10^9 bytes.
CAPACITY = "MOEVOLVE_DEVICE_GB"

# Share of the free device memory that experts may take when the memory of a forward pass is unknown; the rest is left
# for the KV cache, activations and logits.
_EXPERTS_SHARE = 0.75

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60

# Share of the free device memory that is handed out; the allocator can't use every byte.
_USABLE_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """Bytes that one part of a worker takes on the device and on the host. On a CPU both are the same memory."""

    title: str
    device: int
    host: int


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """The predicted memory of one worker, in bytes.

    Attributes:
        items: Parts that add up to the total.
        loading: Peak host memory while the model is loaded, including what stays on the host afterwards.
        beside: Device memory besides weights and experts: KV cache, activations and closed-form fits.
        experts: Experts of all layers that candidates run on. With `expert_offload: host` as many of them as fit stay
            on the device; they aren't part of `items`.
        exporting: Peak device memory of exporting a candidate, which runs in a process of its own; 0 if unknown.
    """

    items: tuple[MemoryItem, ...]
    loading: int
    beside: int = 0
    experts: int = 0
    exporting: int = 0

    @computed_field  # type: ignore[prop-decorator]
    @property
    def device(self) -> int:
        return sum(item.device for item in self.items)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def host(self) -> int:
        return sum(item.host for item in self.items)

    @property
    def host_peak(self) -> int:
        return max(self.host, self.loading)


@dataclass(frozen=True, slots=True)
class SmallerSettings:
    """Settings under which a worker takes less memory, as text for users.

    Attributes:
        device, host: Bytes that one worker then takes on each of its devices and on the host.
    """

    settings: str
    device: int
    host: int


@dataclass(frozen=True, slots=True)
class NeededMemory:
    """The memory that must be available before a worker loads its model.

    Attributes:
        gpus: Value of `workers.num_gpus`: the number of devices that `device_map` spreads the model over, or the
            fraction of one device.
        alternatives: Settings that take less memory, best first.
    """

    memory: WorkerMemory
    gpus: float
    alternatives: tuple[SmallerSettings, ...] = field(default=(), repr=False)


class NoRoomError(UserError):
    """The model doesn't fit into the memory of the device or host."""


def check_room(needed: NeededMemory, device: torch.device) -> None:
    """Check that a worker's model fits into the available memory.

    If the model is spread over several GPUs, `device` is one of them.

    Raises:
        NoRoomError: The model doesn't fit. The message lists the parts with their sizes and a setting that would fit.
    """
    memory, host = needed.memory, available_host_bytes()
    if device.type != "cuda":
        free = min(host, _device_limit())
        if memory.device + memory.host_peak > free:
            raise NoRoomError(_refusal(needed, memory.device + memory.host_peak, "this machine", free, 0, free))
        return
    count = max(needed.gpus, 1.0)
    free = int(free_bytes(device) * count)
    if memory.device > free:
        where = str(device) if count == 1 else f"{count:g} GPUs"
        raise NoRoomError(_refusal(needed, memory.device, where, free, host, free))
    if memory.host_peak > host:
        raise NoRoomError(_refusal(needed, memory.host_peak, "the host", host, host, free))


def _refusal(needed: NeededMemory, takes: int, where: str, free: int, host: int, device: int) -> str:
    """Say in one line why a model is refused that `takes` more bytes than are `free` in a place, `where`.

    `host` and `device` are free there, to find settings that fit; on a CPU all bytes count as the device's.
    """
    on_device = where != "the host"
    items = needed.memory.items
    parts = sorted(((item.device if on_device else item.host, item.title) for item in items), reverse=True)
    named = ", ".join(f"{title} {_gigabytes(size)}" for size, title in parts if size)
    if needed.memory.loading > needed.memory.host and (host == 0 or not on_device):
        named += f", loading {_gigabytes(needed.memory.loading)} of host memory"
    fitting = next((each for each in needed.alternatives if each.device <= device and each.host <= host), None)
    advice = f"it fits with {fitting.settings}" if fitting else "none of its settings makes it fit: give it more memory"
    return (
        f"a worker takes {_gigabytes(takes)} of memory, and {where} has {_gigabytes(free)} free ({named}); {advice}; "
        "`moevolve plan` has the table"
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.3g} GB"


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a device, or on the host if the device is a CPU."""
    if device.type != "cuda":
        return min(available_host_bytes(), _device_limit())
    import torch

    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    # Memory that torch's caching allocator has reserved but doesn't use is available to this process.
    free += torch.cuda.memory_reserved(device) - allocated
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free, limit - allocated, _device_limit() - allocated)


def experts_room(device: torch.device, pass_bytes: int | None = None) -> int:
    """Bytes that experts may take on a device that already holds the rest of the model; see `experts_share`."""
    return experts_share(free_bytes(device), pass_bytes)


def experts_share(free: int, pass_bytes: int | None) -> int:
    """Bytes that experts may take out of `free` bytes, if forward passes need `pass_bytes` (None if unknown)."""
    return int(_EXPERTS_SHARE * free) if pass_bytes is None else max(0, int(_USABLE_SHARE * free) - pass_bytes)


def available_host_bytes() -> int:
    """Bytes of host memory that this process can allocate: those free on the machine or within its cgroup's limit."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except OSError:  # not Linux
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(0, min(free, _free_in_cgroup()))


def _free_in_cgroup() -> int:
    """Bytes within the limit of this process's cgroup (version 2 or 1)."""
    version_1 = _CGROUP / "memory" / "memory.limit_in_bytes", "memory.usage_in_bytes"
    for limit_file, usage_name in ((_CGROUP / "memory.max", "memory.current"), version_1):
        try:
            limit = limit_file.read_text(encoding="ascii").strip()
            used = int(limit_file.with_name(usage_name).read_text(encoding="ascii"))
            stat = limit_file.with_name("memory.stat").read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        if limit.isdigit():
            # Cached pages of files count as used, but the kernel drops them when memory runs short.
            cached = sum(int(line.split()[1]) for line in stat if line.startswith(("inactive_file ", "active_file ")))
            return int(limit) - max(0, used - cached)
    return _UNLIMITED


def _device_limit() -> int:
    limit = os.environ.get(CAPACITY)
    return _UNLIMITED if limit is None else int(float(limit) * 1e9)


def release_freed_memory() -> None:
    """Return freed host memory to the system, where the C library (glibc) can.

    Otherwise worker processes keep it (`moevolve.workers.contract.settings.WORKER_ENV`).
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
