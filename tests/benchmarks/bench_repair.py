"""What candidates cost in plain forward passes: of one layer at published width, and of a small model.

    python tests/benchmarks/bench_repair.py [--layers olmoe-1b-7b qwen3-30b-a3b mixtral-8x7b] [--tokens 16384]
        [--model configs/demo/fine --task demo-span --experts 8]

Layers have random bfloat16 weights and tokens, and their experts stay on the disk. A candidate is edited, fitted, and
run on as many tokens as it is fitted on; memory is what the process holds beyond what it held before. Its processor
time, reading included, is compared with that of `transformers` for one forward pass of the unedited layer.

Candidates of the small model are random ones, unrepaired, and repaired as in the phases of two presets, scored on the
search split. Shares of a repair's time are those of its functions, without the functions listed beside them.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import bench
import numpy as np
import torch
from real_size.checkpoint import write_checkpoint
from real_size.published import Spec

from moevolve.search.config.files import parse_run_config, with_preset
from moevolve.search.running.set_up import set_up
from moevolve.workers.contract.edits import Calibration, Edit, Tokens
from moevolve.workers.contract.fitting import FitRows
from moevolve.workers.contract.messages import EvaluationRequest
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.neurons import ExpertNeurons
from moevolve.workers.methods.eep.outputs import ExpertOutputs
from moevolve.workers.methods.repair import fits
from moevolve.workers.methods.repair.apply import RepairApplicator
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.methods.repair.streams import ResidualStreams
from moevolve.workers.methods.shared.passes import padded_batches
from moevolve.workers.worker import EvaluationWorker

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = ("repaired", "counts")
"""Presets, and the kind of their genomes."""
PAGE = 4096
# Number of token ids, and of tokens of a sequence.
VOCABULARY, WINDOW = 16384, 512


class Peak:
    """The most memory that this process holds within a `with` block beyond what it held before."""

    def __init__(self) -> None:
        self._ends = threading.Event()
        self.bytes = 0

    def __enter__(self) -> Self:
        self._before = self._held()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ends.wait(0.002):
            self.bytes = max(self.bytes, self._held() - self._before)

    def _held(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", nargs="*", default=["olmoe-1b-7b"])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--only", default="", help="candidates of layers whose title has this text")
    parser.add_argument("--model", default=str(CONFIGS / "demo" / "fine"))
    parser.add_argument("--task", default="demo-span")
    parser.add_argument("--experts", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.layers:
        layer_in_passes(name, options.tokens, options.only)
    for preset in PRESETS if not options.only else ():
        candidates_in_passes(preset, options.model, options.task, options.experts)


def layer_in_passes(name: str, tokens: int, only: str) -> None:
    """Evaluate candidates of one layer of a published config on as many tokens as they are fitted on."""
    drawn = np.random.default_rng(0).integers(VOCABULARY, size=(tokens // WINDOW, WINDOW), dtype=np.int32)
    sequences = [tuple(row.tolist()) for row in drawn]
    lengths = np.full(len(drawn), WINDOW, np.int32)
    rows = FitRows(drawn.flatten(), lengths, lengths)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        write_checkpoint(Spec(name, 1, changes={"vocab_size": VOCABULARY}), Path(folder))
        model = ModelConfig(folder, device="cpu", expert_offload="disk", own_dtype="bfloat16")
        plain = plain_pass(model, sequences, head=False)
        print(f"a layer of {name}, {tokens:,} tokens; a plain forward pass: {plain:.2f} s", flush=True)
        worker = EvaluationWorker(model, EngineConfig())
        assert isinstance(worker._engine, GenerationEngine)
        forward, resident = worker._engine.forward, worker.resident
        layer, active = resident.layers[0], int(resident.model.config.num_experts_per_tok)
        whole = np.eye(layer.count, dtype=np.float32)[None]
        half, width = whole[:, : layer.count // 2], ExpertNeurons(layer.experts, layer.expert_tensors()).width // 2
        experts, neurons = EepEdit(half, half, active), EepEdit(whole, whole, active, width=width)
        settings = RepairSettings(tokens=tokens, answer_weight=1.0)
        candidates: dict[str, Edit] = {
            "half of the experts": experts,
            "fitted": RepairedEdit(experts, settings, rows),
            "half of the neurons, filled and fitted": RepairedEdit(neurons, replace(settings, neurons=True), rows),
            "all projections": RepairedEdit(experts, replace(settings, input_rounds=2), rows),
        }
        passes = [batch.columns for batch in forward.batcher.batches(tuple((each,) for each in sequences))]
        repair = resident._applicator(RepairedEdit)
        assert isinstance(repair, RepairApplicator)
        for title, edit in candidates.items():
            if only and only not in title:
                continue
            if isinstance(edit, RepairedEdit):
                repair._reference_for(edit)  # which all candidates share
            started = time.process_time()
            with Peak() as peak, forward.finished(passes, partial(resident.by_layer, edit)):
                pass
            taken = time.process_time() - started
            print(f"  {title}: {taken / plain:.1f} passes, {peak.bytes / 2**30:.2f} GiB", flush=True)


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
def plain_pass(config: ModelConfig, sequences: Sequence[Tokens], head: bool = True) -> float:
    """Processor seconds of one forward pass in `transformers`, with or without the output head, the least of three."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(config.path, dtype="auto", experts_implementation="eager").eval()
    run = model if head else model.base_model
    times = []
    for _ in range(3):
        started = time.process_time()
        for batch in padded_batches(sequences, torch.device("cpu")):
            run(input_ids=batch.ids, use_cache=False)
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
