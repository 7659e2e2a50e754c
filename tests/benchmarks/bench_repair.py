"""What fitting takes: one layer of Mixtral-8x7B's shape, a narrow layer, and candidates in plain forward passes.

    python tests/benchmarks/bench_repair.py [--threads 2] [--tokens 4096] [--device cpu]
        [--model configs/demo/fine --task demo-span --experts 8]

The layer has 4 kept experts of 14,336 neurons with weights and tokens drawn at random, in bfloat16 (1.3 GiB). Memory is
what the process holds beyond what it held before; what is stated is `fit_bytes` and the features.

Candidates are random ones of a mixture of experts, unrepaired, and repaired as in the phases of two presets. Their
processor time is compared with that of `transformers` for one forward pass of the full model over the search split.
Shares of a repair's time are those of its functions, without the functions listed beside them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import bench
import numpy as np
import torch

from moevolve.search.config.files import parse_run_config, with_preset
from moevolve.search.running.set_up import set_up
from moevolve.workers.contract.edits import Calibration, Tokens
from moevolve.workers.contract.messages import EvaluationRequest
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.neurons import ExpertNeurons
from moevolve.workers.methods.eep.outputs import ExpertOutputs, expert_features
from moevolve.workers.methods.repair import fits
from moevolve.workers.methods.repair.edit import RIDGE_LAMBDAS
from moevolve.workers.methods.repair.ridge import LayerSystem, fit_bytes, fit_ridge
from moevolve.workers.methods.repair.streams import ResidualStreams
from moevolve.workers.methods.shared.outputs import Features
from moevolve.workers.methods.shared.passes import padded_batches
from moevolve.workers.worker import EvaluationWorker

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = ("repaired", "counts")
"""Presets, and the kind of their genomes."""
PAGE = 4096


class Peak:
    """The most memory that this process, or the device, holds within a `with` block beyond what it held before."""

    def __init__(self, device: str) -> None:
        self._device, self._ends = device, threading.Event()
        self.bytes = 0

    def __enter__(self) -> Self:
        self._before = self._held()
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()
        if self._device == "cuda":
            self.bytes = torch.cuda.max_memory_allocated() - self._before

    def _watch(self) -> None:
        while not self._ends.wait(0.002):
            self.bytes = max(self.bytes, self._held() - self._before)

    def _held(self) -> int:
        if self._device == "cuda":
            return torch.cuda.memory_allocated()
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default=str(CONFIGS / "demo" / "fine"))
    parser.add_argument("--task", default="demo-span")
    parser.add_argument("--experts", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("repair of one layer, 4 experts of which 2 are active, random weights and tokens")
    fit_layer("Mixtral-8x7B", 4096, 14336, options.tokens, options.device)
    fit_layer("narrow", 256, 512, 16384, options.device)
    for preset in PRESETS:
        candidates_in_passes(preset, options.model, options.task, options.experts)


@torch.inference_mode()
def fit_layer(name: str, hidden: int, width: int, tokens: int, device: str) -> None:
    """Fit one layer and apply what was fitted."""
    residual = torch.randn(tokens, hidden, device=device)
    checked = torch.arange(tokens, device=device) % 8 == 7
    with Peak(device) as peak:
        started = time.perf_counter()
        features = random_features(hidden, width, tokens, device)
        # What some columns account for, so that there is something to find.
        block = features.blocks[0]
        block.add_to(residual, torch.randn(block.values.shape[1], hidden, device=device))
        made = time.perf_counter() - started
        fit = fit_ridge(LayerSystem(features, residual, checked), RIDGE_LAMBDAS)
        fitted = time.perf_counter() - started - made
        assert fit is not None
        for block in features.blocks:
            block.add_to(residual, -fit.change[block.columns])
        if device == "cuda":
            torch.cuda.synchronize()
        whole = time.perf_counter() - started
    held = sum(block.values.nbytes for block in features.blocks)
    stated = held + fit_bytes(features.width, tokens // 2, width, tokens, hidden, len(RIDGE_LAMBDAS))
    print(
        f"  {name}: {features.width:,} features of {hidden:,}, {tokens:,} tokens, {len(RIDGE_LAMBDAS)} ridge_lambdas\n"
        f"    features in {made:.1f} s, fitted in {fitted:.1f} s, with applying {whole:.1f} s\n"
        f"    peak {peak.bytes / 2**20:,.0f} MiB; stated: {stated / 2**20:,.0f} MiB"
    )


def random_features(hidden: int, width: int, tokens: int, device: str) -> Features:
    """Of a Mixtral layer of 4 experts, 2 active."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=hidden, intermediate_size=width, num_local_experts=4)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        module: Any = MixtralExperts(config)
    generator = torch.Generator(device).manual_seed(0)
    drawn = partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
    shapes = {"gate_up_proj": (4, 2 * width, hidden), "down_proj": (4, hidden, width)}
    tensors = {name: drawn(shape).mul_(shape[2] ** -0.5) for name, shape in shapes.items()}
    weights, chosen = drawn(tokens, 4).softmax(dim=1).topk(2)
    return expert_features(ExpertNeurons(module, tensors), drawn(tokens, hidden), weights, chosen, None)


def candidates_in_passes(preset: str, model: str, task: str, experts: int) -> None:
    """Random candidates of a run with a preset, the first of which warms up, by the repairs of its phases."""
    data = {"name": "cost", "preset": preset, "model": {"path": model, "device": "cpu"}}
    data |= {"genome": {"experts": experts}, "tasks": [{"name": task}]}
    setup = set_up(parse_run_config(with_preset(data, "bench_repair"), "bench_repair"), "cost")
    config = setup.config
    assert config.model is not None and setup.space.measurement is not None
    worker = EvaluationWorker(config.model, config.engine)
    ref, calibration = setup.splits("search")[0], setup.splits("calibration")[0]
    split, rows = (setup.all_prepared[each.fingerprint] for each in (ref, calibration))
    space = setup.space.calibrated(Calibration.from_bytes(worker.calibrate(setup.space.measurement, (rows,))))
    plain = plain_pass(config.model, worker._engine.tokens_of(split).prompts)
    print(f"{preset}, {experts} experts of {model}; a plain forward pass over {task}: {plain:.2f} s")
    spent = watched()
    bases = [space.sample(np.random.default_rng(seed), config.phases[0]).genome.base for seed in range(3)]
    repairs = {phase.repair: f"repaired as in phases.{place}" for place, phase in enumerate(config.phases)}
    for settings, name in ({None: "unrepaired"} | repairs).items():
        for place, base in enumerate(bases):
            edit = base.express()
            if settings is None:
                edit = EepEdit(edit.router_mapping, edit.expert_merging, edit.active)
            else:
                edit = space.repaired(base, settings).express()
            spent.clear()
            started = time.process_time()
            reply = worker.evaluate(EvaluationRequest(edit, (ref,)), (split,))
            assert reply.failure is None, reply.failure
            taken = time.process_time() - started
            if place:
                shares = ", ".join(f"{each} {part / taken:.0%}" for each, part in spent.most_common(8))
                print(f"  {name}, {taken / plain:.2f} passes: {shares}")


@torch.inference_mode()
def plain_pass(config: ModelConfig, sequences: Sequence[Tokens]) -> float:
    """Processor seconds of one forward pass in `transformers`, the least of three."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(config.path, dtype="auto", experts_implementation="eager").eval()
    times = []
    for _ in range(3):
        started = time.process_time()
        for batch in padded_batches(sequences, torch.device("cpu")):
            model(input_ids=batch.ids, use_cache=False)
        times.append(time.process_time() - started)
    return min(times)


def watched() -> Counter[str]:
    """Let a repair's functions count their processor seconds, each without those that it calls."""
    spent: Counter[str] = Counter()
    inner: list[float] = []

    def watch(holder: Any, name: str) -> None:
        function = getattr(holder, name)

        def timed(*args: Any, **settings: Any) -> Any:
            started = time.process_time()
            inner.append(0.0)
            try:
                return function(*args, **settings)
            finally:
                taken = time.process_time() - started
                spent[name] += taken - inner.pop()
                if inner:
                    inner[-1] += taken

        setattr(holder, name, timed)

    functions = {
        ResidualStreams: ("run_layer",),
        fits: ("fit_ridge",),
        fits.LayerFits: ("_apply",),
        ExpertOutputs: ("features", "select_neurons", "use_neurons"),
        EvaluationWorker: ("_score",),
    }
    for holder, names in functions.items():
        for name in names:
            watch(holder, name)
    return spent


if __name__ == "__main__":
    main()
