"""Names of the processes that own leases, and whether such a process has ended."""

from __future__ import annotations

import os
import re
import socket
from functools import cache
from pathlib import Path

_OWNER = re.compile(r"process (?P<process>\d+) on .* \((?P<machine>\S+), (?P<numbering>\S+)\)")


def this_process() -> str:
    """The name of this process as an owner: its host for users, its boot id and process namespace for `is_gone`."""
    return f"process {os.getpid()} on {socket.gethostname()} ({_machine()}, {_numbering()})"


def is_on_another_machine(owner: str) -> bool:
    """Whether an owner is a process on another machine."""
    found = _OWNER.fullmatch(owner)
    return found is not None and found["machine"] != _machine()


def is_gone(owner: str) -> bool:
    """Whether an owner was a process on this machine that has ended, so that its lease need not expire.

    False if the owner's process can't be seen from here.
    """
    # Host names can't tell: a container may share its host's name, and copies of one machine image have equal names.
    found = _OWNER.fullmatch(owner)
    here = found is not None and (found["machine"], found["numbering"]) == (_machine(), _numbering())
    return found is not None and here and not _runs(int(found["process"]))


@cache
def _machine() -> str:
    """The first part of this machine's boot id; the host's name on systems other than Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").split("-")[0]
    except OSError:
        return socket.gethostname()


@cache
def _numbering() -> str:
    """The namespace of this process's number."""
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
    return state != "Z"  # a zombie has ended
