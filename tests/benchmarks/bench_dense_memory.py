"""Peak memory of dense candidates on the CPU, repaired or not, beside what `plan` says, on a Llama of SmolLM2's width.

    python tests/benchmarks/bench_dense_memory.py [--kinds tomoe ...] [--tokens 4096 ...] [--layers 8] [--dtype float32]

Every row is a process of its own with a worker's environment: it loads the model, calibrates, and evaluates two
candidates. Measured is the largest resident set after the imports, beyond what the process held then. The states of
layers, of which there is one per layer and token, make up most of what depends on the number of layers, so fewer layers
than SmolLM2's 30 show whether the plan is right.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench
import numpy as np
from tiny_models import WORDS, save_tiny_model

from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.phases import START
from moevolve.search.genomes.registry import baseline_offspring
from moevolve.search.running.plan.estimate import estimate
from moevolve.search.running.set_up import set_up
from moevolve.workers.contract.edits import Calibration
from moevolve.workers.contract.messages import EvaluationRequest
from moevolve.workers.contract.settings import WORKER_ENV
from moevolve.workers.worker import EvaluationWorker

SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "initializer_range": 0.04,
}
VOCABULARY = 49152
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "tomoe": ({"kind": "tomoe", "budget": 0.5, "calibration_tokens": 4096}, "start"),
    "flap": ({"kind": "tomoe", "budget": 0.5, "experts": 1, "calibration_tokens": 4096}, "flap"),
    "factorllm": ({"kind": "factorllm", "experts": 8, "active": 4, "calibration_tokens": 4096}, "start"),
    "nanomoe": ({"kind": "nanomoe", "fit_to": "outputs"}, "start"),
    "tomoe, unrepaired": ({"kind": "tomoe", "budget": 0.5}, "start"),
}
"""Genomes and what the phase begins with, by name. Those that aren't repaired are calibrated on the tokens."""


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384, 32768])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--model", type=Path, help="checkpoint to measure instead of a random one")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        print(json.dumps(measured(RunConfig.model_validate_json(options.run))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or Path(scratch, "model")
        if options.model is None:
            words = [f"w{number}" for number in range(VOCABULARY - 4 - len(WORDS))]
            save_tiny_model(model, "llama", [*WORDS, *words], 1, num_hidden_layers=options.layers, **SHAPE)
        print("| kind | tokens | plan MB | measured MB | measured / plan | seconds |\n|---|---|---|---|---|---|")
        for kind in options.kinds:
            for tokens in options.tokens:
                found = row(model, kind, tokens, options.dtype)
                print(json.dumps(found["items"]), file=sys.stderr)
                planned, peak = found["planned"], found["measured"]
                numbers = f"{planned / 1e6:,.0f} | {peak / 1e6:,.0f} | {peak / planned:.2f} | {found['seconds']:.0f}"
                print(f"| {kind} | {tokens:,} | {numbers} |", flush=True)


def row(model: Path, kind: str, tokens: int, dtype: str, window: int = 512, rank: int = 209) -> dict[str, Any]:
    """Measure one row in a process of its own: see `measured`."""
    with tempfile.TemporaryDirectory() as scratch:
        config = run_config(Path(scratch), model, kind, tokens, dtype, window, rank)
        command = [sys.executable, __file__, "--run", config.model_dump_json()]
        environment = {**os.environ, **WORKER_ENV, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1])
    return {"kind": kind, "tokens": tokens, **json.loads(done.stdout.splitlines()[-1])}


def run_config(folder: Path, model: Path, kind: str, tokens: int, dtype: str, window: int, rank: int) -> RunConfig:
    """A search of one repaired candidate on windows of text."""
    genome, init = KINDS[kind]
    if kind == "nanomoe":
        genome, repair = genome | {"calibration_tokens": tokens, "rank": rank}, {}
    elif "calibration_tokens" not in genome:
        genome, repair = genome | {"calibration_tokens": tokens}, {}
    else:
        repair = {"repair": {"tokens": tokens}}
    # A word is one token or more.
    for split, count in (("calibration", tokens + window), ("search", 3 * window)):
        text = " ".join(f"w{(7 * place + 31 * place**2) % 40_000}" for place in range(count))
        (folder / f"{split}.jsonl").write_text(json.dumps({"text": text}))
    files = {"calibration": "calibration.jsonl", "search": "search.jsonl"}
    splits = {split: {"from": split} for split in files}
    task = {"source": {"files": files}, "splits": splits, "prompt": "{{ text }}", "fitness": "perplexity"}
    (folder / "texts.yaml").write_text(json.dumps(task | {"window": window}))
    return RunConfig.model_validate(
        {
            "name": "memory",
            "model": {"path": str(model), "dtype": dtype, "device": "cpu"},
            "tasks": [{"name": str(folder / "texts.yaml")}],
            "genome": genome,
            "phases": [{"kind": "tune", "evaluations": 1, "initial": 1, "init": [init], **repair}],
            "window": 1,
            "engine": {"threads": 1, "batch_tokens": 2048},
            "final": {"rerank": 0, "test": False},
        }
    )


def measured(config: RunConfig) -> dict[str, Any]:
    """What `plan` says of a run, and what a worker takes for its first two candidates, in bytes."""
    memory = estimate(config).memory["device"]
    setup = set_up(config, "memory-1")
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    began = time.perf_counter()
    worker = EvaluationWorker(config.model, config.engine)
    assert setup.space.measurement is not None
    calibration = Calibration.from_bytes(worker.calibrate(setup.space.measurement, setup.prepared["calibration"]))
    space, phase = setup.space.calibrated(calibration), config.phases[0]
    (name,) = phase.init
    started = space.start(phase) if name == START else baseline_offspring(name, space, phase)
    assert started is not None
    splits = setup.prepared["search"]
    # The second one takes what is kept of the first one's fits besides its own.
    for genome in (started.genome, space.sample(np.random.default_rng(0), phase).genome):
        reply = worker.evaluate(EvaluationRequest(genome.express(), tuple(split.ref for split in splits)), splits)
        if reply.failure is not None:
            raise RuntimeError(reply.failure)
    return {
        "planned": memory.device + memory.host,
        "measured": resident_bytes("VmHWM") - before,
        "seconds": time.perf_counter() - began,
        "items": {item.title: (item.device + item.host) // 10**6 for item in memory.items},
    }


def resident_bytes(name: str) -> int:
    """A number of bytes that the kernel gives in `/proc/self/status`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
