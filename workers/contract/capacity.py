"""How much memory a worker needs, how much is available, and refusing a model that doesn't fit before loading it."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Collection, Mapping
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
    """

    items: tuple[MemoryItem, ...]
    loading: int
    beside: int = 0

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
class NeededMemory:
    """The memory that must be available before a worker loads its model.

    Attributes:
        gpus: Value of `workers.num_gpus`: the number of devices that `device_map` spreads the model over, or the
            fraction of one device.
        smaller: Settings that take less memory, as text for users, with what they take, best first.
    """

    memory: WorkerMemory
    gpus: float
    smaller: tuple[tuple[str, WorkerMemory], ...] = field(default=(), repr=False)


class NoRoomError(UserError):
    """The model doesn't fit into the memory of the device or host."""


def check_room(needed: NeededMemory, device: torch.device) -> None:
    """Check that a worker's model fits into the available memory.

    If the model is spread over several GPUs, `device` is one of them.

    Raises:
        NoRoomError: The model doesn't fit. The message lists the parts with their sizes and a setting that would fit.
    """
    if device.type == "cuda":
        count = max(needed.gpus, 1.0)
        where = str(device) if count == 1 else f"{count:g} GPUs"
        room = {where: int(free_bytes(device) * count), "the host": available_host_bytes()}
    else:
        room = {"this machine": free_bytes(device)}
    takes = _taken(needed.memory, room)
    short = next((place for place, free in room.items() if takes[place] > free), None)
    if short is not None:
        raise NoRoomError(_refusal(needed, short, room))


def _taken(memory: WorkerMemory, room: Collection[str]) -> dict[str, int]:
    """Bytes that a worker takes in each place: on the device and on the host, or in the one memory of a machine."""
    parts = (memory.device, memory.host_peak)
    return dict(zip(room, parts if len(room) == len(parts) else (sum(parts),), strict=True))


def _refusal(needed: NeededMemory, short: str, room: Mapping[str, int]) -> str:
    """Say in one line why a model is refused that takes more bytes than a place, `short`, has free."""
    on_device, memory = short != "the host", needed.memory
    on_host = not on_device or len(room) == 1
    sizes = [(item.device * on_device + item.host * on_host, item.title) for item in memory.items]
    named = ", ".join(f"{title} {_gigabytes(size)}" for size, title in sorted(sizes, reverse=True) if size)
    if on_host and memory.loading > memory.host:
        named += f", loading {_gigabytes(memory.loading)} of host memory"
    fitting = [
        settings
        for settings, smaller in needed.smaller
        if all(size <= room[place] for place, size in _taken(smaller, room).items())
    ]
    advice = (
        f"it fits with {fitting[0]}"
        if fitting
        else "none of its settings makes it fit: give it more memory, or spread it over GPUs "
        "(workers.num_gpus, model.device_map=balanced)"
    )
    return (
        f"a worker takes {_gigabytes(_taken(memory, room)[short])} of memory, and {short} has "
        f"{_gigabytes(room[short])} free ({named}); {advice}; `moevolve plan` has the table"
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


def experts_room(device: torch.device, pass_bytes: int | None = None, waiting: int = 0) -> int:
    """Bytes that experts may take on a device that holds the rest of the model, but for weights of `waiting` bytes.

    Forward passes need `pass_bytes`; None if that is unknown.
    """
    free = free_bytes(device) - waiting
    room = _EXPERTS_SHARE * free if pass_bytes is None else _USABLE_SHARE * free - pass_bytes
    return max(0, int(room))


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


def release_unused_models() -> None:
    """Free models that nothing uses any more, whose parts refer to one another, and return their memory."""
    gc.collect()
    release_freed_memory()
