"""What the benchmarks share: the labs on their path, and how their arguments are read."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DOMAINS: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "runs" / "domains.yaml").read_text())
"""The run of the demo's text model on three domains at once."""
sys.path.insert(0, str(ROOT / "tests" / "labs"))


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser of a benchmark's arguments, whose help is the description as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
