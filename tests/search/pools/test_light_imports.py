"""What it takes to import drivers and servers, which are started often."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "modules",
    [
        ("moevolve.search.pools.ray_pool", "moevolve.search.pools.local", "moevolve.search.running.execute"),
        ("moevolve.search.server.app",),
    ],
)
def test_what_only_workers_need_is_imported_by_workers(modules: tuple[str, ...]) -> None:
    loaded = "sorted({'torch', 'transformers', 'scipy'} & sys.modules.keys())"
    program = f"import sys, {', '.join(modules)}; print(*{loaded})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
