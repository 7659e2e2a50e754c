"""Watches the memory, the reading and the computing of a command and of all processes that it starts."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


class Watch:
    """A process and its descendants, which are looked at twice a second until it has ended.

    Memory is anonymous: pages of mapped files go where memory is short.

    Attributes:
        peak: Largest sum of their memory so far, in bytes.
        largest: Largest memory of one of them so far, in bytes.
    """

    def __init__(self, pid: int) -> None:
        self.peak = self.largest = 0
        self._pid = pid
        self._family = {pid}
        self._read: dict[int, int] = {}
        self._computed: dict[int, float] = {}
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    @property
    def read(self) -> int:
        """Bytes that they have read from the disk."""
        return sum(self._read.values())

    @property
    def computed(self) -> float:
        """Seconds that processor cores have worked for them."""
        return sum(self._computed.values())

    def _look(self) -> None:
        while Path(f"/proc/{self._pid}").exists():
            held = [self._held(process) for process in self._found()]
            self.peak, self.largest = max(self.peak, sum(held)), max(self.largest, *held, 0)
            time.sleep(0.5)

    def _found(self) -> list[int]:
        """Processes of the family that are there; whoever was in it stays, also after its parent has ended."""
        parents = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and (fields := _fields(int(folder.name))):
                parents[int(folder.name)] = int(fields[1])
        while more := {each for each, parent in parents.items() if parent in self._family} - self._family:
            self._family |= more
        return [each for each in self._family if each in parents]

    def _held(self, process: int) -> int:
        """Bytes of memory of a process, whose other figures are kept; 0 if it has ended."""
        try:
            status = Path(f"/proc/{process}/status").read_text()
            io = Path(f"/proc/{process}/io").read_text()
        except OSError:
            return 0
        if fields := _fields(process):
            self._computed[process] = (int(fields[11]) + int(fields[12])) / _TICK
        self._read[process] = int(io.split("\nread_bytes:")[1].split()[0])
        return sum(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


def _fields(process: int) -> list[str]:
    """What the kernel says of a process from its state on, the third field; nothing if it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
