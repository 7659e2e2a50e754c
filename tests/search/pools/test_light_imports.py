"""What it takes to import drivers and servers, which are started often."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moevolve.search.running.observer import Observer

DEMO = Path(__file__).parents[3] / "configs" / "runs" / "demo.yaml"
LOADED = "print(*sorted({'torch', 'transformers', 'scipy'} & sys.modules.keys()))"
DRIVER = f"""
import sys
import moevolve
from {Observer.__module__} import Observer

def stop(progress):
    if progress.evaluated:
        {LOADED}
        raise KeyboardInterrupt

one = {{"workers.count": 1}}
try:
    moevolve.launch(sys.argv[1], store=sys.argv[2], overrides=one, observer=Observer(on_progress=stop))
except KeyboardInterrupt:
    print("stopped")
"""


def run(program: str, *arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    "modules",
    [
        ("moevolve.search.pools.ray_pool", "moevolve.search.pools.local", "moevolve.search.running.execute"),
        ("moevolve.search.server.app",),
        ("moevolve.search.cli",),
    ],
)
def test_what_only_workers_need_is_imported_by_workers(modules: tuple[str, ...]) -> None:
    assert run(f"import sys, {', '.join(modules)}; {LOADED}; print(*{{'alembic'}} & sys.modules.keys())") == []


@pytest.mark.slow
def test_a_driver_does_without_torch(tmp_path: Path) -> None:
    assert run(DRIVER, str(DEMO), f"sqlite:///{tmp_path / 'store.db'}") == ["stopped"]
