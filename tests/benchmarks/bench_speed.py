"""How much faster smaller forms of published models are in plain `transformers`, by batch size.

    python tests/benchmarks/bench_speed.py [--models olmoe-1b-7b ...] [--batch-sizes 1 16] [--readme]

Few layers of a model are written at full width with random weights, but with 8,192 words: all of them would take more
time than so few layers do. They are written in full, and in the forms that `shrink --experts` and `shrink --neurons`
make. `moevolve profile` alternates between all of them, so a change in the machine's speed affects all. Random routers
use all experts about equally often. With --readme the table goes into `workers/README.md`.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import bench
from readme_tables import write_results, write_tables
from real_size.checkpoint import write_checkpoint
from real_size.published import SPECS, Spec

import moevolve

README = bench.ROOT / "workers" / "README.md"
RESULTS = "speed.csv"
LAYERS = {"olmoe-1b-7b": 3, "qwen3-30b-a3b": 2}
WORDS = 8192
COUNT = "num_experts"
WIDTHS = ("moe_intermediate_size", "intermediate_size")
FORMS = {
    "half of the experts": (2, 1),
    "half of the neurons of each": (1, 2),
    "a quarter of the experts": (4, 1),
    "a quarter of the neurons of each": (1, 4),
}
"""By what the number of experts and their width are divided."""


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(LAYERS), default=["olmoe-1b-7b"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--readme", action="store_true")
    options = parser.parse_args()
    head = ["model", "kept", *(f"new tokens/s, batch of {size}" for size in options.batch_sizes), "prompt tokens/s"]
    rows = [row for name in options.models for row in speeds(name, options.batch_sizes)]
    for row in (head, *rows):
        print(" | ".join(row))
    if options.readme:
        write_results(RESULTS, "python tests/benchmarks/bench_speed.py --readme", [head, *rows])
        write_tables(README)


def speeds(name: str, sizes: list[int]) -> list[list[str]]:
    """A row per form: decoding by batch size, and prompts of the largest batch, as ratios to the full model's."""
    spec = replace(SPECS[name], layers=LAYERS[name])
    with tempfile.TemporaryDirectory() as folder:
        forms = {"full": (1, 1), **FORMS}
        places = [write_checkpoint(form(spec, *by), Path(folder, label)) for label, by in forms.items()]
        settings = {
            "batch_sizes": sizes,
            "dtype": "bfloat16",
            "prompt_tokens": 64,
            "timed_runs": 9,
        }
        full, *others = moevolve.profile("sqlite://", [str(place) for place in places], **settings).models
    rows = []
    for label, one in zip(FORMS, others, strict=True):
        pairs = list(zip(one.batches, full.batches, strict=True))
        ratios = [mine.decode_rate / its.decode_rate for mine, its in pairs]
        ratios.append(pairs[-1][0].prefill_rate / pairs[-1][1].prefill_rate)
        rows.append([name, label, *(f"{ratio:.2f}x" for ratio in ratios)])
    return rows


def form(spec: Spec, fewer: int, narrower: int) -> Spec:
    """The model with a part of its experts, or with a part of every expert's neurons."""
    config = spec.config
    width = next(key for key in WIDTHS if key in config)
    smaller = {COUNT: config[COUNT] // fewer, width: config[width] // narrower, "vocab_size": WORDS}
    return replace(spec, changes=spec.changes | smaller)


if __name__ == "__main__":
    main()
