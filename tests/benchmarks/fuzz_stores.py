"""Damages SQLite stores in seeded ways, checks each, and asks a server for all of its pages and routes.

    .venv/bin/python tests/benchmarks/fuzz_stores.py --cases 60 --first 0

A case whose damage `moevolve db check` doesn't name, or which is answered with 500, is printed, and the exit code is 1.
Seconds of the slowest case are printed too.
"""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path

import bench
import damaged_stores


def main() -> int:
    """Run the cases; returns the exit code."""
    parser = bench.arguments(__doc__)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    logging.disable(logging.ERROR)
    wrong, slowest = 0, 0.0
    with tempfile.TemporaryDirectory() as root:
        sound = Path(root) / "sound.db"
        damaged_stores.write_sound(sound)
        for case in range(asked.first, asked.first + asked.cases):
            begun = time.monotonic()
            found = damaged_stores.faults(sound, Path(root), case)
            slowest = max(slowest, time.monotonic() - begun)
            wrong += bool(found)
            if found:
                print(case, "\n    ".join(found), flush=True)
    print(f"{asked.cases} stores, {wrong} wrong, the slowest in {slowest:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
