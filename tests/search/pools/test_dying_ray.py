"""A Ray on this machine that is killed ends the driver with a line and an exit code of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from moevolve.search.pools.ray_cluster import RAYLET_DIED

# A process in the place of the raylet, which ends in the first case while Ray is in use, and in the second after that.
DRIVER = """
import subprocess, sys, time
from types import SimpleNamespace
from moevolve.search.pools import ray_cluster
raylet = SimpleNamespace(process=subprocess.Popen(["true"]))
ray_cluster.ray_worker._global_node = SimpleNamespace(all_processes={"raylet": [raylet]})
ray_cluster.ray.is_initialized = lambda: sys.argv[1] == "used"
ray_cluster._end_with_raylet()
"""


def test_a_raylet_that_is_killed_is_told_and_one_that_is_shut_down_is_not() -> None:
    for state, code in (("used", RAYLET_DIED), ("shut down", 0)):
        command = [sys.executable, "-c", DRIVER, state]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert ("error: Ray's raylet on this machine was killed" in done.stderr) == (state == "used")
