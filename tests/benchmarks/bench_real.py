"""Asks everything of published models in few layers, under a metered device, and sets memory beside what `plan` says.

    python tests/benchmarks/bench_real.py [--models mixtral-8x7b ...] [--verbs load full ...] [--rows FILE] [--readme]

Every model is written with random weights under its published names and dtypes (`tests/labs/real_size`), asked in a
process of its own for one verb after another, and removed. Device memory is counted storage by storage; host memory is
what the kernel says of the process's private memory, under a limit of 12 GiB. Takes up to 15 GB of disk in --folder.

With --rows every row is added to a file as it comes. With --readme a summary goes into README.md beside this file: of
all rows in that file, the last one of every kind.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import bench
from readme_tables import write_results, write_tables
from real_size.checkpoint import stored_bytes, write_checkpoint
from real_size.matrix import rows_of, scaled_card
from real_size.published import SPECS, Spec, stored_tensors
from real_size.runs import write_task
from real_size.verbs import DENSE_VERBS, EXPERT_VERBS, UNLOADED, Row, verbs_of

README = Path(__file__).parent / "README.md"
RESULTS = "bench-real.csv"
CARD = 80 * 10**9
AGREES = 0.1
PROCESS = 500_000_000
"""Bytes of the host that a process has beside tensors: code, tokenizers, buffers of products."""


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(SPECS), default=list(SPECS))
    parser.add_argument("--verbs", nargs="+", choices=sorted({*EXPERT_VERBS, *DENSE_VERBS}))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--readme", action="store_true")
    options = parser.parse_args()
    rows = read_rows(options.rows)
    for name in options.models:
        for row in measured(SPECS[name], options.folder, options.verbs):
            rows.append(row)
            print(line(row), flush=True)
            if options.rows is not None:
                with options.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    if options.readme:
        write_readme(rows)


def read_rows(path: Path | None) -> list[Row]:
    """Rows of runs before."""
    if path is None or not path.exists():
        return []
    return [Row(**json.loads(text)) for text in path.read_text(encoding="utf-8").splitlines()]


def measured(spec: Spec, folder: Path, verbs: Sequence[str] | None) -> Iterator[Row]:
    """One model, on every placement of its originals that it is used with."""
    asked = tuple(verb for verb in verbs_of(spec.name) if verbs is None or verb in verbs)
    with tempfile.TemporaryDirectory(prefix="moevolve-real-", dir=folder) as scratch:
        empty = set(asked) <= set(UNLOADED)
        model = write_checkpoint(spec, Path(scratch, "model"), holes=lambda name: empty)
        task = write_task(Path(scratch, "task"))
        for originals in spec.placements:
            told = Path(scratch, f"rows-{originals}.jsonl")
            yield from rows_of(spec.name, model, task, originals, asked, capacity(spec, originals), told)
        shutil.rmtree(model)


def capacity(spec: Spec, originals: str) -> int:
    """A card; in proportion to the layers where a model is known not to fit one whole."""
    if originals == "device":
        return CARD
    frame = sum(stored_bytes(each) for each in stored_tensors(spec.config) if ".layers." not in each.name)
    return scaled_card(spec, frame) if spec.scales else CARD


def line(row: Row) -> str:
    """A row of the table, in Markdown."""
    state = row.failure.replace("|", "/") if row.failure else row.note
    return (
        f"| {row.model} | {row.originals} | {row.verb} | {beside(row.device, row.planned)} | "
        f"{beside(row.host, row.planned_host, PROCESS)} | {state[:160]} |"
    )


def beside(found: int, planned: int | None, besides: int = 0) -> str:
    """What was measured, what was planned, and by how much they differ: in bold where there is more than was planned.

    Args:
        found: bytes.
        planned: bytes; None where nothing was.
        besides: bytes that no plan counts.
    """
    text = f"{found / 1e9:.2f}"
    if planned is None:
        return text
    text += f" / {planned / 1e9:.2f}"
    if found > planned * (1 + AGREES) + besides:
        above = f"{found / planned - 1:+.0%}" if planned > besides else f"+{(found - planned) / 1e9:.2f} GB"
        return text + f" (**{above}**)"
    if found < planned * (1 - AGREES) and not besides:
        return text + f" ({found / planned - 1:+.0%})"
    return text


def summary(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The heading, and a row for every model and placement: what was above or below the plan at most."""
    titles = "model | originals | verbs | failed | peak on the device, GB | measured / planned | host above plan, GB"
    lines = [tuple(titles.split(" | "))]
    for (model, originals), group in groupby(rows, lambda row: (row.model, row.originals)):
        found = list(group)
        shares = [row.device / row.planned for row in found if row.planned]
        above = max(row.host - row.planned_host for row in found if row.planned_host is not None)
        counts = str(len(found)), str(sum(row.failure is not None for row in found))
        peak = f"{max(row.device for row in found) / 1e9:.2f}"
        ratios = f"{min(shares):.2f} to {max(shares):.2f}"
        lines.append((model, originals, *counts, peak, ratios, f"{above / 1e9:+.2f}"))
    return lines


def write_readme(rows: Sequence[Row]) -> None:
    """Store the summary, in order of models and verbs, and put it into the README."""
    names, verbs = list(SPECS), [*EXPERT_VERBS, *DENSE_VERBS]
    last = {(names.index(row.model), row.originals, verbs.index(row.verb)): row for row in rows}
    write_results(RESULTS, "make bench-real", summary([last[key] for key in sorted(last)]))
    write_tables(README)


if __name__ == "__main__":
    main()
