"""What it takes to import drivers and the command line, which are started often."""

from __future__ import annotations

import subprocess
import sys

MODULES = ("moevolve.search.pools.ray_pool", "moevolve.search.running.execute", "moevolve.search.cli")


def test_what_only_workers_need_is_imported_by_workers() -> None:
    """A driver's whole search does without it too, see `test_submitting`, and a server, see `test_light_server`."""
    wanted = {"torch", "transformers", "scipy", "alembic"}
    program = f"import sys, {', '.join(MODULES)}; print(*{wanted} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
