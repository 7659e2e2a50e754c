"""Searches quantised checkpoints of full width, and exports them in their own formats, on a CPU with little memory.

    python tests/benchmarks/bench_formats.py [--formats mxfp4 int4 gguf] [--folder DIR]

Published models in one or two layers (`tests/labs/real_size/quantised.py`) are written with random weights, and every
verb is done in a process of its own, with `originals: disk`. Memory is the process's largest private one, libraries
included. Takes up to 5 GB of disk in --folder.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "labs"))

from real_size.children import in_child
from real_size.quantised import FORMATS, verbs_of, write_model, write_run
from real_size.runs import write_task

HEAD = "| checkpoint | verb | seconds | private GB | |\n|---|---|---:|---:|---|\n"
LIMIT = 9 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    print(HEAD, end="")
    for kind in options.formats:
        for line in measured(kind, options.folder):
            print(line, flush=True)


def measured(kind: str, folder: Path) -> Iterator[str]:
    """Rows of a format."""
    with tempfile.TemporaryDirectory(prefix="moevolve-formats-", dir=folder) as name:
        scratch = Path(name)
        model = write_model(kind, scratch / "model")
        write_run(kind, model, write_task(scratch / "task", later=4), scratch)
        size = sum(file.stat().st_size for file in (scratch / "model").iterdir())
        title = f"{FORMATS[kind].name}, {kind}, {FORMATS[kind].layers} layers, {size / 1e9:.2f} GB"
        for verb in verbs_of(kind):
            arguments = {"verb": verb, "folder": str(scratch), "model": str(model)}
            outcome = in_child("real_size.quantised:ask", arguments, data_limit=LIMIT)
            if outcome.failure is not None:
                yield f"| {title} | {verb} | | | {outcome.failure.replace('|', '/')[:200]} |"
                if verb == "search":  # nothing that could be exported
                    return
                continue
            found = outcome.result
            yield f"| {title} | {verb} | {found['seconds']:.1f} | {found['private'] / 1e9:.2f} | {found['note']} |"


if __name__ == "__main__":
    main()
