"""Damages a small checkpoint in seeded ways, and counts what is refused in one line and what is computed rightly.

    .venv/bin/python tests/benchmarks/fuzz_folders.py --cases 400 --first 0
    .venv/bin/python tests/benchmarks/fuzz_folders.py --cases 300 --valid

With `--valid` checkpoints are quantised with all settings that their formats have, and their numbers are compared.
Any other outcome is printed, and the exit code is 1.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import bench
import drawn_checkpoints
import fuzzed_folders


def main() -> int:
    """Run the cases; returns the exit code."""
    parser = bench.arguments(__doc__)
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--valid", action="store_true", help="draw valid quantised checkpoints")
    parser.add_argument("--verbose", action="store_true", help="print every case's outcome")
    asked = parser.parse_args()
    begun, counts = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as root:
        source = Path(root) / "model"
        if asked.valid:
            drawn_checkpoints.write_plain(source)
            outcome, kinds = drawn_checkpoints.outcome, list(drawn_checkpoints.FORMATS)
        else:
            fuzzed_folders.write_model(source)
            outcome, kinds = fuzzed_folders.outcome, [change.__name__ for change in fuzzed_folders.CHANGES]
        for case in range(asked.first, asked.first + asked.cases):
            try:
                found = outcome(source, Path(root) / str(case), case)
                kind = "right" if found == "right" else "refused"
            except Exception as error:  # noqa: BLE001 - whatever it is, it is what this program looks for
                kind, found = "wrong", f"{type(error).__name__}: {error}"
            counts[kind] += 1
            if asked.verbose or kind == "wrong":
                print(f"{case} {kinds[case % len(kinds)]}: {found.replace(root, '')}")
    print(f"{dict(counts)} in {time.monotonic() - begun:.0f} s")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
