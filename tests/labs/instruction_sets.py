"""Whether candidates come out the same in every way that they can be asked, under one instruction set after the other.

Libraries read their settings when a process starts, so every setting has a process of its own, which scores candidates
of the demo's model: with all shortcuts and without any, all prompts together, backwards, and each by itself. By hand:

    python tests/labs/instruction_sets.py        # the whole grid
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Settings = dict[str, str]

SOME: tuple[Settings, ...] = (
    {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
)
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


def checked(settings: Settings) -> str:
    """Score in all ways under settings, in a process of its own.

    Args:
        settings: environment variables; `mkldnn` is off or on in torch instead.

    Returns:
        A digest of the numbers by each product library, which may be another one under other settings.

    Raises:
        AssertionError: a number depends on the way.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _VALUES} | settings
    done = subprocess.run(
        [sys.executable, __file__, "child"], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{settings}: {done.stderr}"
    return done.stdout.strip()


def _child() -> None:
    import torch

    from moevolve.kernels import products as kernel

    # The demo's matrices are small, and both libraries are to be tried.
    kernel.ONEDNN_LEAST = 1
    torch.set_num_threads(1)
    off = os.environ.get("mkldnn") == "off"  # noqa: SIM112 - no setting of a library
    libraries = ("torch", "onednn") if kernel.onednn_available() and not off else ("torch",)
    with torch.backends.mkldnn.flags(enabled=False) if off else nullcontext():
        print(*map(_digest, libraries))


def _digest(library: Any) -> str:
    import numpy as np

    from moevolve.evaluators.preparation.prepare import prepare_split
    from moevolve.evaluators.preparation.registry import load_task
    from moevolve.workers.contract.settings import EngineConfig, ModelConfig, Shortcuts
    from moevolve.workers.engine.engine import GenerationEngine
    from moevolve.workers.methods.eep.edit import EepEdit
    from moevolve.workers.model.resident import ResidentModel

    counts = {"search": 4, "dev": 2, "test": 2}
    tasks = [load_task(name).with_counts(counts) for name in ("demo-span", "demo-calendar")]
    splits = [prepare_split(task, "search") for task in tasks]
    resident = ResidentModel.load(ModelConfig(str(ROOT / "configs" / "demo" / "model"), dtype="float32", device="cpu"))
    rng = np.random.default_rng(0)
    kept = np.stack([np.eye(8)[rng.permutation(8)[:2]] for _ in range(5)]).astype(np.float32)
    merging = (kept + rng.normal(0, 0.1, kept.shape)).astype(np.float32)
    edits = (EepEdit(kept, kept, 2), EepEdit(merging, merging, 2))
    none = Shortcuts(draft=False, lean=False, prefixes=False)
    found = []
    for shortcuts, batch_tokens, backwards in ((Shortcuts(), 4096, 1), (Shortcuts(), 50, -1), (none, 1, 1)):
        config = EngineConfig(batch_tokens=batch_tokens, matmul_backend=library)
        engine = GenerationEngine(resident.model, resident.tokenizer, config, shortcuts)
        numbers: list[Any] = []
        for edit in edits:
            with resident.edited(edit):
                for split in splits:
                    turned = replace(split, examples=split.examples[::backwards])
                    made = engine.generate(turned, lambda _, text: len(text) > 12)
                    numbers += [made.texts[::backwards], made.gold_logprobs[::backwards].tolist()]
        found.append(numbers)
    assert found[1] == found[0], f"{library}: prompts in another order and other batches come out otherwise"
    assert found[2] == found[0], f"{library}: prompts by themselves and without shortcuts come out otherwise"
    return hashlib.sha256(repr(found[0]).encode()).hexdigest()[:12]


def _main() -> None:
    failed = 0
    for settings in grid():
        try:
            said = checked(settings)
        except AssertionError as error:
            failed += 1
            said = f"FAILED {error}"
        print(settings, said, flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    _child() if sys.argv[1:] == ["child"] else _main()
