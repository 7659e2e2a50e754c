"""Whether candidates come out the same in every way that they can be asked, under one instruction set after the other.

Libraries read their settings when a process first computes something, so every setting has a process of its own, forked
from one that has imported everything and computed nothing. It scores candidates of the demo's model: with all shortcuts
and without any, all prompts together, backwards, and each by itself. By hand:

    python tests/labs/instruction_sets.py        # the whole grid
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from killing import forked

from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task
from moevolve.kernels import products as kernel
from moevolve.workers.contract.settings import EngineConfig, ModelConfig, Shortcuts
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.model.resident import ResidentModel

ROOT = Path(__file__).parents[2]
Settings = dict[str, str]

OLDEST: Settings = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""What every run of the tests tries, beside no setting at all."""

_VALUES = {
    "ATEN_CPU_CAPABILITY": ("", "default", "avx2", "avx512"),
    "MKL_CBWR": ("", "COMPATIBLE", "AVX2", "AUTO"),
    "ONEDNN_MAX_CPU_ISA": ("", "SSE41", "AVX2", "AVX512_CORE"),
    "mkldnn": ("", "off"),
}


def grid() -> list[Settings]:
    """All combinations of all values; an empty one leaves a setting out, and oneDNN has none where it is off."""
    every = (dict(zip(_VALUES, values, strict=True)) for values in product(*_VALUES.values()))
    found = [{name: value for name, value in each.items() if value} for each in every]
    return [each for each in found if not ("mkldnn" in each and "ONEDNN_MAX_CPU_ISA" in each)]


def checked(settings: Sequence[Settings]) -> Iterator[list[str]]:
    """Score in all ways under each of the settings, in a process of its own.

    Args:
        settings: environment variables; `mkldnn` is off or on in torch instead.

    Yields:
        Of each of the settings, a digest of the numbers by each product library, which may be another one under other
        settings; or what was wrong, after `FAILED`: a number depends on the way.
    """
    for each in settings:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = forked(_child, each, sender)
        sender.close()
        yield receiver.recv()
        process.join()


def _child(settings: Settings, sender: Connection) -> None:
    """Score in a process that has computed nothing yet, and send the digests."""
    try:
        sender.send(_digests(settings))
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent tells it
        sender.send(["FAILED", repr(error)])


def _digests(settings: Settings) -> list[str]:
    for name in _VALUES:
        os.environ.pop(name, None)
    os.environ.update(settings)
    # The demo's matrices are small, and both libraries are to be tried.
    kernel.ONEDNN_LEAST = 1
    torch.set_num_threads(1)
    # torch chooses once, and has chosen the best by then.
    if settings.get("ATEN_CPU_CAPABILITY") == "default":
        assert torch.backends.cpu.get_cpu_capability() == "DEFAULT", "something was computed before"
    off = settings.get("mkldnn") == "off"
    libraries = ("torch", "onednn") if kernel.onednn_available() and not off else ("torch",)
    with torch.backends.mkldnn.flags(enabled=False) if off else nullcontext():
        return list(map(_digest, libraries))


def _digest(library: str) -> str:
    kernel.onednn_preferred = lambda: library == "onednn"
    counts = {"search": 3, "dev": 2, "test": 2}
    tasks = [load_task(name).with_counts(counts) for name in ("demo-span", "demo-calendar")]
    splits = [prepare_split(task, "search") for task in tasks]
    resident = ResidentModel.load(ModelConfig(str(ROOT / "configs" / "demo" / "model"), dtype="float32", device="cpu"))
    rng = np.random.default_rng(0)
    kept = np.stack([np.eye(8)[rng.permutation(8)[:2]] for _ in range(5)]).astype(np.float32)
    merging = (kept + rng.normal(0, 0.1, kept.shape)).astype(np.float32)
    edits = (EepEdit(kept, kept, 2), EepEdit(merging, merging, 2))
    none = Shortcuts(draft=False, prefixes=False)
    found = []
    for shortcuts, batch_tokens, backwards in ((Shortcuts(), 4096, 1), (Shortcuts(), 50, -1), (none, 1, 1)):
        config = EngineConfig(batch_tokens=batch_tokens)
        engine = GenerationEngine(resident.model, resident.tokenizer, config, shortcuts)
        numbers: list[Any] = []
        for edit, split in zip(edits, splits, strict=True):
            turned = replace(split, examples=split.examples[::backwards])
            with resident.edited(edit):
                made = engine.generate(turned, lambda _, text: len(text) > 12)
            numbers += [made.texts[::backwards], made.gold_logprobs[::backwards].tolist()]
        found.append(numbers)
    assert found[1] == found[0], f"{library}: prompts in another order and other batches come out otherwise"
    assert found[2] == found[0], f"{library}: prompts by themselves and without shortcuts come out otherwise"
    return hashlib.sha256(repr(found[0]).encode()).hexdigest()[:12]


def _main() -> None:
    failed = 0
    for settings, said in zip(grid(), checked(grid()), strict=True):
        failed += said[0] == "FAILED"
        print(settings, *said, flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    _main()
