"""Owners of leases: which processes are known to be gone."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from store_samples import gone_owner
from waiting import PATIENT_S

from moevolve.store.leases import is_gone, is_on_another_machine, this_process


def test_processes_of_this_machine_are_known_to_be_gone() -> None:
    mine = this_process()
    assert not is_gone(mine) and not is_on_another_machine(mine)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        # It ends in a moment, and nobody has waited for it yet.
        deadline = time.monotonic() + PATIENT_S
        while not is_gone(mine.replace(f" {os.getpid()} ", f" {child.pid} ")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    ended = gone_owner()
    assert is_gone(ended)
    machine, numbering = ended.rpartition(" (")[2].rstrip(")").split(", ")
    for elsewhere in (ended.replace(machine, "0"), ended.replace(numbering, "0"), "somebody else"):
        assert not is_gone(elsewhere), "a copy of this machine, or a container on it, has other processes"
    assert is_on_another_machine(ended.replace(machine, "0")) and not is_on_another_machine(
        ended.replace(numbering, "0")
    )


def test_an_owner_in_a_container_is_not_taken_for_gone() -> None:
    code = "import sys, moevolve.store.leases as o; print(o.is_gone(sys.argv[1]))"
    asked = [sys.executable, "-c", code, this_process()]
    done = subprocess.run(["unshare", "--pid", "--fork", *asked], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"processes can't be set apart here: {done.stderr.strip()}")
    assert done.stdout == "False\n"
