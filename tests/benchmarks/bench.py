"""What the benchmarks share: the labs on their path, and how their arguments are read."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "labs"))


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser of a benchmark's arguments, whose help is the description as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
