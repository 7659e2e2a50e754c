"""What is asked of a published model on a GPU, verb by verb, and the memory that `plan` predicts for it."""

from __future__ import annotations

import gc
import json
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.base import Genome
from moevolve.search.genomes.registry import baseline_offspring
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.running.plan.estimate import estimate
from moevolve.search.running.plan.records import Estimate
from moevolve.search.running.set_up import set_up
from moevolve.workers.contract.capacity import NeededMemory
from moevolve.workers.contract.card import ExportCard
from moevolve.workers.contract.edits import Calibration, Edit, IdentityEdit
from moevolve.workers.contract.facts import DTYPE_BYTES
from moevolve.workers.contract.messages import EvaluationRequest
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.profiling.prompts import PromptMeter
from moevolve.workers.worker import EvaluationWorker
from real_size.published import Spec

# From `merge` on the model has buffers for experts that aren't the originals, which it keeps.
EXPERT_VERBS = ("load", "full", "prune", "calibrate reap", "merge", "repair")
# After these the model is no longer loaded.
EXPORT_VERBS = ("export", "reload", "profile")
# A start is a calibration and the first candidate.
DENSE_VERBS = ("load", "full", "start nanomoe", "start tomoe", "start factorllm")
_DENSE: dict[str, dict[str, Any]] = {
    "nanomoe": {"kind": "nanomoe", "rank": 128},
    "tomoe": {"kind": "tomoe"},
    "factorllm": {"kind": "factorllm", "experts": 4, "active": 2},
}
_PRUNE = {"kind": "prune", "evaluations": 2, "initial": 0}
_TUNE = {"kind": "tune", "evaluations": 2, "initial": 2, "init": ["start"]}
_MONTHS = ("January", "March", "May", "July", "August", "October", "November", "December")
_PROMPT = "{{ passage }}\\nQuestion: {{ question }}\\nAnswer:"


def write_task(directory: Path, texts: list[str], rows: int, measured: int) -> Path:
    """Write a task of questions after passages, with its data; returns its file.

    Args:
        directory: its folder.
        texts: Texts that the passages of each split begin with, in turn.
        rows: questions of the split `search`.
        measured: questions of the split `calibration`; few, because each takes a pass over all weights.
    """
    directory.mkdir(parents=True, exist_ok=True)
    splits = {"calibration": measured, "search": rows, "test": rows}
    for position, (split, count) in enumerate(splits.items()):
        lines = []
        for row in range(count):
            name = _MONTHS[(row + 3 * position) % len(_MONTHS)]
            passage = f"{texts[(position * rows + row) % len(texts)]} {name} is when the {row} of them came back."
            lines.append({"passage": passage, "question": f"When did the {row} come back?", "answer": name})
        (directory / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = "".join(f"    {split}: {split}.jsonl\n" for split in splits)
    sources = "".join(f"  {split}: {{from: {split}}}\n" for split in splits)
    text = f"description: questions of the lab\nsource:\n  files:\n{files}splits:\n{sources}"
    text += f'prompt: "{_PROMPT}"\nanswer: "{{{{ answer }}}}"\nmatching: {{kind: exact}}\nmax_new_tokens: 2\n'
    path = directory / "lab.yaml"
    path.write_text(text)
    return path


@dataclass(frozen=True)
class Row:
    """One verb on one model.

    Attributes:
        verb: which.
        seconds: Wall time of the verb.
        peak: most bytes in tensors on the device.
        planned: the same as `plan` predicts it; None where it predicts nothing.
        failure: why there is no result; None if there is one.
        note: what else was found.
    """

    verb: str
    seconds: float
    peak: int
    planned: int | None = None
    failure: str | None = None
    note: str = ""


class Session:
    """One process that holds a model, as a worker does, and is asked for one thing after another."""

    def __init__(self, spec: Spec, model: Path, task: Path, batch: int) -> None:
        """Take a checkpoint; nothing is loaded yet.

        Args:
            spec: which model.
            model: its folder.
            task: from `write_task`.
            batch: tokens of a forward pass.
        """
        self.spec, self.model, self.task, self._batch = spec, model, task, batch
        self.worker: EvaluationWorker | None = None
        self._exported = model.with_name(f"{model.name}-exported")
        self._logits: Tensor | None = None
        # Several verbs are planned as one and the same search.
        self._estimates: dict[str, Estimate] = {}

    def rows(self, verbs: tuple[str, ...]) -> Iterator[Row]:
        """Do them in order, and say what each took."""
        # Modules and classes of what is imported stay: going through them again takes longer than many a verb.
        gc.freeze()
        for verb in verbs:
            self._reset()
            began = time.perf_counter()
            failure, note = None, ""
            name, _, of = verb.partition(" ")
            try:
                doing: Callable[..., str | None] = getattr(self, f"_{name}", self._sampled)
                note = (doing(verb) if doing == self._sampled else doing(of) if of else doing()) or ""
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001 - a row that fails is a result
                failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                traceback.print_exc()
                del error
            peak, seconds = torch.cuda.max_memory_allocated(), time.perf_counter() - began
            yield Row(verb, seconds, peak, None if failure else self.planned(verb), failure, note)
        gc.unfreeze()
        shutil.rmtree(self._exported, ignore_errors=True)

    def config(self, verb: str) -> RunConfig:
        """The search that a verb is asked of."""
        _, _, of = verb.partition(" ")
        if self.spec.retained:
            section = {"kind": "eep", "experts": self.spec.retained, "router_space": self.spec.router_space}
            section |= {"groups": 1} | ({"router_space": "logits"} if verb == "export" else {})
            phases: list[dict[str, Any]] = [dict(_PRUNE)]
        else:
            section, phases = _DENSE[of or "tomoe"], [_TUNE]
        if verb == "merge":
            phases.append(_PRUNE | {"kind": "merge", "group_rate": 1, "entry_rate": 0.5})
        elif verb == "repair":
            phases[0]["repair"] = {"tokens": self._tokens[-1], "ridge_lambdas": [0.01]}
        elif verb.startswith("calibrate"):
            phases[0] |= {"init": [of], "initial": 1}
        model = {"path": str(self.model), "dtype": self.spec.published["dtype"], "device": "cuda"}
        settings: dict[str, Any] = {
            "name": "lab",
            "model": model,
            "tasks": [{"name": str(self.task)}],
            "genome": section | {"calibration_tokens": self._tokens[1]},
            "phases": phases,
            "window": 1,
            "workers": {"num_gpus": 1},
            "engine": {"threads": 1, "batch_tokens": self._batch},
            "final": {"rerank": 0, "test": False},
        }
        return RunConfig.model_validate(settings)

    @cached_property
    def _tokens(self) -> list[int]:
        """Tokens of the first text to measure on, of the first two and so on, to ask for just as many.

        Two are enough but for repairs, which check themselves on every eighth.
        """
        split = prepare_split(load_task(str(self.task)), "calibration")
        meter = PromptMeter(ModelConfig(str(self.model)), EngineConfig())
        return [meter.counts(split.head(count + 1)).tokens for count in range(len(split.examples))]

    def held(self) -> EvaluationWorker:
        """The worker, which loads the model when it is first asked for."""
        if self.worker is None:
            config = self.config("merge" if self.spec.retained else "load")
            needed = NeededMemory(self.estimate(config).memory["device"], 1.0)
            self.worker = EvaluationWorker(config.model, config.engine, needed=needed)
        return self.worker

    def setup(self, verb: str) -> SearchSetup:
        """What a search begins with: calibrated where it needs that."""
        setup = set_up(self.config(verb), "lab-1")
        measurement = setup.space.measurement
        if measurement is None:
            return setup
        made = self.held().calibrate(measurement, setup.prepared["calibration"])
        return replace(setup, space=setup.space.calibrated(Calibration.from_bytes(made)))

    def _reset(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def _unload(self) -> None:
        self.worker = None
        self._reset()

    def _score(self, setup: SearchSetup, edit: Edit) -> str:
        splits = setup.prepared["search"]
        reply = self.held().evaluate(EvaluationRequest(edit, tuple(split.ref for split in splits)), splits)
        if reply.failure is not None:
            raise RuntimeError(reply.failure)
        (result,) = reply.results.values()
        return f"log-probability {result.gold_logprob:.3f}"

    def _load(self) -> None:
        self.held()

    def _full(self) -> str:
        return self._score(set_up(self.config("full"), "lab-1"), IdentityEdit())

    def _sampled(self, verb: str) -> str:
        setup = self.setup(verb)
        return self._score(setup, sampled(setup).express())

    def _merge(self) -> str:
        setup = self.setup("merge")
        rng = np.random.default_rng(1)
        merged = setup.space.breed(rng, setup.config.phases[1], (sampled(setup),)).genome
        return self._score(setup, merged.express())

    def _calibrate(self, name: str) -> str:
        setup = self.setup(f"calibrate {name}")
        made = baseline_offspring(name, setup.space, setup.config.phases[-1]).genome
        return self._score(setup, made.express())

    def _export(self) -> str:
        """As the command does it: in a process that holds no model before; pruned, for a stock checkpoint."""
        setup = self.setup("export")
        edit = sampled(setup).express()
        resident = self.held().resident
        with resident.edited(edit):
            self._logits = logits(resident.model)
        del resident
        self._unload()
        report = export_model(setup.config.model, edit, self._exported, ExportCard("lab", self.spec.name, ""))
        return f"{report.form}, {report.size_bytes / 1e9:.2f} GB"

    def _reload(self) -> str:
        """With plain `transformers`, and compared with the edited model of the process before."""
        from transformers import AutoModelForCausalLM

        self._unload()
        assert self._logits is not None and self._exported.is_dir(), "there is no export"
        model = AutoModelForCausalLM.from_pretrained(self._exported, dtype="auto")
        torch.nn.Module.to(model, "cuda")
        found, largest = logits(model.eval()), float(self._logits.abs().max())
        difference = float((found - self._logits).abs().max())
        if not difference <= 0.03 * max(1.0, largest):
            raise RuntimeError(f"logits differ by {difference:.3g}, the largest is {largest:.3g}")
        return f"logits differ by {difference:.2g} at most"

    def _profile(self) -> str:
        """What the profiler's own process does with an exported folder."""
        from moevolve.workers.profiling.process import ProfiledProcess
        from moevolve.workers.profiling.report import ProfiledModel, ProfileSettings

        self._unload()
        settings = ProfileSettings((1,), 32, 2, 1, "cuda", threads=1)
        reply = ProfiledProcess(ProfiledModel("", str(self._exported)), settings).measure(1)
        return f"peak {(reply.peak_bytes or 0) / 2**30:.2f} GiB"

    def planned(self, verb: str) -> int:
        """Peak bytes on the device that `plan` predicts for the part of a run that a verb is."""
        found = self.estimate(self.config(verb))
        memory, candidate = found.memory["device"], found.sizes[-1]
        items = {item.title: item.device for item in memory.items}
        if verb in ("reload", "profile"):
            return (candidate.parameters or 0) * DTYPE_BYTES[found.dtype]
        if verb == "load":
            return sum(items[title] for title in ("weights outside of experts", "original experts, or one layer's"))
        # The full model is scored before anything is measured or merged.
        return memory.device - (items["what merging or calibrating takes beyond these"] if verb == "full" else 0)

    def estimate(self, config: RunConfig) -> Estimate:
        """What `plan` says of a run on this device."""
        key = config.canonical_json()
        if key not in self._estimates:
            self._estimates[key] = estimate(config)
        return self._estimates[key]


def sampled(setup: SearchSetup) -> Genome:
    """A random individual of the first phase."""
    genome: Genome = setup.space.sample(np.random.default_rng(0), setup.config.phases[0]).genome
    return genome


@torch.inference_mode()
def logits(model: Any) -> Tensor:
    """Of a model for some tokens, on the host: float32 [tokens, vocabulary]."""
    tokens = torch.arange(3, 35, device="cuda")[None]
    found: Tensor = model(input_ids=tokens, use_cache=False).logits[0].float().cpu()
    return found
