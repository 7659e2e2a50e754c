"""Measures edits: merging against a copy of the same bytes, and applying edits to a resident model. Run it by hand.

    python tests/benchmarks/bench_edits.py [--threads 1] [--device cpu] [--repeats 15]

A merge of n experts into n' reads n and writes n' of them; the copy it is held against moves as many bytes in all.
Both are timed alternately, so that other load on the machine falls on both; the best of each counts (ratio 1: as
fast as copying).
Edits are applied to a random Mixtral of 32 layers (hidden 64, 8 experts), a fresh edit each time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from moevolve.kernels.expert_merge import merge_experts
from moevolve.workers.config import ModelConfig
from moevolve.workers.edits.eep import EepEdit

SHAPES = ((8, 4, 4 << 20), (8, 2, 4 << 20), (16, 8, 2 << 20), (60, 30, 1 << 19))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"merging on {options.device}, {options.threads} thread(s)")
    for dtype in (torch.float32, torch.bfloat16):
        for count, retained, size in SHAPES:
            for density in (1.0, 0.35):
                measure_merge(count, retained, size, density, dtype, options.device, options.repeats)
    measure_apply(options.device, options.repeats)


def timed(action: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    action()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_merge(
    count: int, retained: int, size: int, density: float, dtype: torch.dtype, device: str, repeats: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    experts = torch.randn((count, size), generator=generator).to(device, dtype)
    out = torch.empty((retained, size), dtype=dtype, device=device)
    # A merged candidate's matrix: one-hot rows with some entries perturbed.
    coefficients = torch.randn((retained, count), generator=generator) * 0.1
    coefficients *= torch.rand((retained, count), generator=generator) < density
    coefficients[torch.arange(retained), torch.randperm(count, generator=generator)[:retained]] += 1
    moved = torch.empty((count + retained) * size // 2, dtype=dtype, device=device).normal_()
    to = torch.empty_like(moved)
    copies, merges = [], []
    for _ in range(repeats):
        copies.append(timed(lambda: to.copy_(moved), device))
        merges.append(timed(lambda: merge_experts(coefficients, experts, out), device))
    copied, merged = min(copies), min(merges)
    nbytes = (count + retained) * size * experts.element_size()
    print(
        f"  {str(dtype)[6:]:9} {count:3} -> {retained:3}, {int(coefficients.count_nonzero()):5} coefficients: "
        f"{nbytes / merged / 1e9:6.1f} GB/s, copy {nbytes / copied / 1e9:6.1f} GB/s, ratio {copied / merged:.2f}"
    )


def measure_apply(device: str, repeats: int) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

    from moevolve.workers.resident import ResidentModel

    layers, count, retained = 32, 8, 4
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=count,
    )
    with tempfile.TemporaryDirectory() as folder:
        MixtralForCausalLM(config).save_pretrained(folder)
        write_tokenizer(Path(folder), PreTrainedTokenizerFast)
        resident = ResidentModel.load(ModelConfig(path=folder, device="cuda" if device == "cuda" else "cpu"))
    rng = np.random.default_rng(0)
    for kind in ("prune", "merge"):
        times = []
        for _ in range(repeats + 2):
            matrices = np.eye(count, dtype=np.float32)[
                np.stack([rng.permutation(count)[:retained] for _ in range(layers)])
            ]
            if kind == "merge":
                matrices = matrices + rng.normal(0, 0.1, matrices.shape).astype(np.float32)
            edit = EepEdit(matrices, matrices.copy(), 2)
            before = resident.expert_pointers()
            times.append(timed(partial(resident.apply, edit), device))
            copied = kind == "merge" or resident.expert_pointers() != before
        where = "weights written to buffers" if copied else "no weights copied"
        print(f"  apply {kind}, {layers} layers: {statistics.median(times[2:]) * 1e3:.3f} ms, {where}")


def write_tokenizer(folder: Path, fast: type) -> None:
    from tokenizers import Tokenizer, models

    fast(tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))).save_pretrained(folder)


if __name__ == "__main__":
    main()
