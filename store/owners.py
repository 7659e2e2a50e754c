"""Owners of leases: processes by name, and whether one of this machine is gone."""

from __future__ import annotations

import os
import re
import socket
from functools import cache
from pathlib import Path

_OWNER = re.compile(r"process (?P<process>\d+) on .* \((?P<machine>\S+), (?P<numbering>\S+)\)")


def this_process() -> str:
    """This process as leases name it: the host for people, the boot and the process namespace for `is_gone`."""
    return f"process {os.getpid()} on {socket.gethostname()} ({_machine()}, {_numbering()})"


def is_elsewhere(owner: str) -> bool:
    """Whether an owner is a process of another machine."""
    found = _OWNER.fullmatch(owner)
    return found is not None and found["machine"] != _machine()


def is_gone(owner: str) -> bool:
    """Whether an owner was a process that could be seen from here and has ended, so that its lease need not run out.

    Names of hosts don't tell that: containers have that of their host, and machines that are copies of one another the
    same one, each with processes of its own.
    """
    found = _OWNER.fullmatch(owner)
    here = found is not None and (found["machine"], found["numbering"]) == (_machine(), _numbering())
    return found is not None and here and not _runs(int(found["process"]))


@cache
def _machine() -> str:
    """The machine, since it was started; elsewhere than on Linux by the name of the host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").split("-")[0]
    except OSError:
        return socket.gethostname()


@cache
def _numbering() -> str:
    """The namespace that numbers this process and all that it can see."""
    try:
        return Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        return "all"


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state != "Z"  # ended, but nobody has asked how
