"""How much memory a worker takes, how much there is, and what is refused before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import computed_field

from moevolve.evaluators.errors import UserError

if TYPE_CHECKING:
    import torch

CAPACITY = "MOEVOLVE_DEVICE_GB"
"""Environment variable: 10^9 bytes that a worker may take of its device, where that is less than there is."""

_EXPERTS_SHARE = 0.75
"""Of what is free on a device once the rest of a model is there, experts take so much where nobody knows what passes
need: the rest is for keys and values, activations and logits."""

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_OLD = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_UNLIMITED = 1 << 60


_SPARE = 0.95
"""Of what is free on a device, so much is given out: its allocator can't use every byte."""


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One thing that takes memory: bytes on the device and on the host (both the same memory on a CPU)."""

    title: str
    device: int
    host: int


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """One worker's memory.

    Attributes:
        items: that add up to what it needs.
        loading: bytes of host memory at the most that loading takes, what stays there included.
        beside: bytes on the device that are for neither weights nor experts: keys and values, activations, fits.
        experts: bytes of what all layers run on at once; where the originals are on the host, as much of it as there is
            room for stays on the device, beyond what is needed.
        exporting: bytes on the device that exporting a candidate takes at the most, which is done by a process of its
            own; 0 where that isn't known.
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
class Way:
    """Settings under which a worker takes less.

    Attributes:
        settings: what is to be set, for people.
        device, host: bytes that one worker takes then, of one of its devices and of the host.
    """

    settings: str
    device: int
    host: int


@dataclass(frozen=True, slots=True)
class NeededMemory:
    """What a worker has to find before it loads anything.

    Attributes:
        memory: what it takes.
        gpus: of `workers.num_gpus`: devices over which a `device_map` spreads the model, or the part of one.
        ways: what could be set otherwise, the best first.
    """

    memory: WorkerMemory
    gpus: float
    ways: tuple[Way, ...] = field(default=(), repr=False)


class NoRoomError(UserError):
    """A model doesn't fit where it was to be loaded."""


def check_room(needed: NeededMemory, device: torch.device) -> None:
    """Refuse a model that doesn't fit.

    Args:
        needed: what one worker takes.
        device: where its model goes; with several GPUs one of them.

    Raises:
        NoRoomError: it doesn't fit; the message says what takes how much, and which setting would fit.
    """
    memory, host = needed.memory, available_host_bytes()
    if device.type != "cuda":
        has = min(host, _allowed() or _UNLIMITED)
        if memory.device + memory.host_peak > has:
            raise NoRoomError(_refusal(needed, memory.device + memory.host_peak, "this machine", has, 0, has))
        return
    count = max(needed.gpus, 1.0)
    has = int(free_bytes(device) * count)
    if memory.device > has:
        where = str(device) if count == 1 else f"{count:g} GPUs"
        raise NoRoomError(_refusal(needed, memory.device, where, has, host, has))
    if memory.host_peak > host:
        raise NoRoomError(_refusal(needed, memory.host_peak, "the host", host, host, has))


def _refusal(needed: NeededMemory, takes: int, where: str, has: int, host: int, device: int) -> str:
    """Why a model is refused, in one line.

    Args:
        needed: what one worker takes.
        takes: bytes that are too many.
        where: they would have to be.
        has: bytes that there are.
        host, device: bytes that there are of both; on a CPU all of them are the device's.
    """
    on_device = where != "the host"
    items = needed.memory.items
    parts = sorted(((item.device if on_device else item.host, item.title) for item in items), reverse=True)
    named = ", ".join(f"{title} {_gigabytes(size)}" for size, title in parts if size)
    if needed.memory.loading > needed.memory.host and (host == 0 or not on_device):
        named += f", loading {_gigabytes(needed.memory.loading)} of host memory"
    fitting = next((way for way in needed.ways if way.device <= device and way.host <= host), None)
    advice = f"it fits with {fitting.settings}" if fitting else "none of its settings makes it fit: give it more memory"
    return (
        f"a worker takes {_gigabytes(takes)} of memory, and {where} has {_gigabytes(has)} free ({named}); {advice}; "
        "`moevolve plan` has the table"
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.3g} GB"


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still take on a device; on a CPU those of `available_host_bytes`."""
    if device.type != "cuda":
        return min(available_host_bytes(), _allowed() or _UNLIMITED)
    import torch

    free, total = torch.cuda.mem_get_info(device)
    taken = torch.cuda.memory_allocated(device)
    # What torch's allocator holds without using it is free to us.
    free += torch.cuda.memory_reserved(device) - taken
    part = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free, part - taken, (_allowed() or _UNLIMITED) - taken)


def experts_room(device: torch.device, beside: int | None = None) -> int:
    """Bytes on a device that experts may take, beside the rest of a model, which is there.

    Args:
        device: where the model runs.
        beside: what passes need, if that is known.
    """
    return experts_share(free_bytes(device), beside)


def experts_share(free: int, beside: int | None) -> int:
    """See `experts_room`: of so many free bytes."""
    return int(_EXPERTS_SHARE * free) if beside is None else max(0, int(_SPARE * free) - beside)


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
    limit, used = _limit()
    return limit - used


def _limit() -> tuple[int, int]:
    """The cgroup's limit and what is used of it; version 2 or 1, as a container's processes see their own."""
    for most, used in ((_CGROUP / "memory.max", "memory.current"), (_CGROUP / "memory" / _OLD[0], _OLD[1])):
        try:
            limit, now = most.read_text(encoding="ascii").strip(), int(most.with_name(used).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        if limit.isdigit():
            return int(limit), max(0, now - _cached(most.with_name("memory.stat")))
    return _UNLIMITED, 0


def _cached(stat: Path) -> int:
    """Pages of files, which the kernel gives up when memory is short, though they count as used."""
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
