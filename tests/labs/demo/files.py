"""Splits of the demo tasks and their JSONL files.

A prompt belongs to exactly one split by a hash of its text, so no prompt is ever in two splits, whatever the seeds.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from demo.prompts import render
from demo.tasks import TASKS, Row

SPLITS = ("train", "calibration", "search", "dev", "test")
SPLIT_SIZES = {"calibration": 2000, "search": 400, "dev": 300, "test": 1000}
_SPLIT_OF_BUCKET = ("train",) * 5 + ("calibration", "search", "dev", "test", "test")


def split_of(task: str, prompt: str) -> str:
    """The split a prompt belongs to: five tenths train, one calibration, search and dev each, two test."""
    digest = hashlib.blake2b(f"{task}\0{prompt}".encode(), digest_size=8).digest()
    return _SPLIT_OF_BUCKET[int.from_bytes(digest, "big") % len(_SPLIT_OF_BUCKET)]


def generate(task: str, split: str, seed: int) -> Iterator[Row]:
    """An endless stream of rows of one task split; the same arguments give the same rows.

    The stream of a held-out split has no prompt twice; ``train`` may repeat prompts. Rows of ``calibration`` have no
    answer.
    """
    rng = np.random.default_rng([seed, zlib.crc32(task.encode()), SPLITS.index(split)])
    seen: set[str] = set()
    while True:
        row = TASKS[task](rng)
        prompt = render(row)
        if split_of(task, prompt) != split or prompt in seen:
            continue
        if split != "train":
            seen.add(prompt)
        if split == "calibration":
            del row["answer"]
        yield row


def write_demo_tasks(directory: Path, seed: int = 0) -> list[Path]:
    """Write ``<directory>/<task>/<split>.jsonl`` for every task's calibration, search, dev and test splits.

    Returns:
        The files written, in a fixed order.
    """
    written = []
    for task in TASKS:
        for split, size in SPLIT_SIZES.items():
            path = Path(directory) / task / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                "".join(json.dumps(row) + "\n" for row in islice(generate(task, split, seed), size)), "utf-8"
            )
            written.append(path)
    return written
