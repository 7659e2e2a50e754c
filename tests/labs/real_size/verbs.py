"""What is asked of a model of the lab, verb by verb, under a metered device; and what `plan` says of it."""

from __future__ import annotations

import gc
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moevolve.search.config.run import RunConfig
from moevolve.search.estimate.devices import Device, find_gpus
from moevolve.search.estimate.estimate import EstimateRequest, estimate
from moevolve.search.genomes.base import Genome
from moevolve.search.genomes.registry import baseline_offspring
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.running.set_up import set_up
from moevolve.workers.capacity import NeededMemory, WorkerMemory, experts_share
from moevolve.workers.export.card import ExportCard
from moevolve.workers.export.export import export_model
from moevolve.workers.messages import EvaluationRequest
from moevolve.workers.methods.base import Calibration, Edit, IdentityEdit
from moevolve.workers.methods.eep.room import kept_layers
from moevolve.workers.methods.usage import UsageRequest
from moevolve.workers.worker import EvaluationWorker
from real_size.meter import MeteredDevice
from real_size.published import SPECS, Spec
from real_size.runs import run_config

EXPERTS = ("load", "full", "prune", "merge", "repair", "skip")
BASELINES = ("frequency", "soft_activation", "reap", "hc_smoe", "naee", "fitted")
AFTER = ("analyse", "answers", "export", "reload", "profile")
EXPERT_VERBS = (*EXPERTS, *(f"calibrate {name}" for name in BASELINES), *AFTER)
DENSE_VERBS = (
    "load",
    "full",
    *(f"{step} {kind}" for kind in ("nanomoe", "tomoe", "factorllm") for step in ("calibrate", "start")),
)
_FEW = {
    "groups": 1,
    "calibration_tokens": 256,
    "naee_tokens": 16,
    "naee_subsets": 70,
    "fitted_tokens": 64,
    "fitted_subsets": 4,
    "skipping_tokens": 128,
}
_DENSE: dict[str, dict[str, Any]] = {
    "nanomoe": {"kind": "nanomoe", "rank": 128, "calibration_tokens": 256},
    "tomoe": {"kind": "tomoe", "calibration_tokens": 256},
    "factorllm": {"kind": "factorllm", "experts": 4, "active": 2, "calibration_tokens": 256},
}


@dataclass(frozen=True)
class Row:
    """One verb on one model.

    Attributes:
        model, originals, verb: which.
        device, host: peak bytes that were measured.
        planned, planned_host: what `plan` says; None where it says nothing.
        seconds: of this machine, for nothing but knowing what a run of the matrix takes.
        failure: why there is no result; None if there is one.
        note: what else was found.
    """

    model: str
    originals: str
    verb: str
    device: int
    host: int
    planned: int | None = None
    planned_host: int | None = None
    seconds: float = 0.0
    failure: str | None = None
    note: str = ""


class Session:
    """One process that holds a model, as a worker does, and is asked for one thing after another."""

    def __init__(self, spec: Spec, model: Path, task: Path, originals: str, device: MeteredDevice) -> None:
        """Take a checkpoint; nothing is loaded yet.

        Args:
            spec: which model.
            model: its folder.
            task: from `write_task`.
            originals: where original experts stay.
            device: within its `installed`.
        """
        self.spec, self.model, self.task, self.originals, self.device = spec, model, task, originals, device
        self.worker: EvaluationWorker | None = None
        self._exported = model.with_name(f"{model.name}-exported")
        self._edit: Edit | None = None
        self._logits: Tensor | None = None

    def rows(self, verbs: tuple[str, ...]) -> Iterator[Row]:
        """Do them in order, and say what each took."""
        for verb in verbs:
            gc.collect()
            self.device.reset()
            began = time.perf_counter()
            failure, note = None, ""
            try:
                with self.device.tagged(verb):
                    note = self.do(verb) or ""
            except Exception as error:  # noqa: BLE001 - a row that fails is a result
                failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                traceback.print_exc()
                del error
            reading = self.device.read()
            planned, planned_host = self._planned(verb)
            seconds = time.perf_counter() - began
            yield Row(
                self.spec.name,
                self.originals,
                verb,
                reading.device,
                reading.host,
                planned,
                planned_host,
                seconds,
                failure,
                note,
            )
        shutil.rmtree(self._exported, ignore_errors=True)

    def do(self, verb: str) -> str | None:
        """One verb."""
        name, _, of = verb.partition(" ")
        doing: Callable[..., str | None] = getattr(self, f"_{name}")
        return doing(of) if of else doing()

    def _config(self, phases: str = "prune", init: tuple[str, ...] = (), **genome: Any) -> RunConfig:
        base = {"kind": "eep", "experts": self.spec.retained, "router_space": self.spec.router_space} | _FEW
        section = genome if "kind" in genome else base | genome
        return run_config(self.spec, self.model, self.task, section, phases, init, self.originals)

    def _held(self) -> EvaluationWorker:
        if self.worker is None:
            config = self._config("merge") if self.spec.retained else self._config("tune", **_DENSE["tomoe"])
            needed = NeededMemory(self.memory(config), 1.0)
            self.worker = EvaluationWorker(config.model, config.engine, needed=needed)
        return self.worker

    def _load(self) -> None:
        self._held()

    def _full(self) -> str:
        setup = set_up(self._config() if self.spec.retained else self._config("tune", **_DENSE["tomoe"]), "lab-1")
        return self._score(setup, IdentityEdit())

    def _score(self, setup: SearchSetup, edit: Edit) -> str:
        splits = setup.prepared["search"]
        reply = self._held().evaluate(EvaluationRequest(edit, tuple(split.ref for split in splits)), splits)
        if reply.failure is not None:
            raise RuntimeError(reply.failure)
        (result,) = reply.results.values()
        return f"log-probability {result.gold_logprob:.3f}"

    def _calibrated(self, setup: SearchSetup) -> SearchSetup:
        recipe = setup.space.recipe
        if recipe is None:
            return setup
        made = self._held().calibrate(recipe, setup.prepared["calibration"])
        return replace(setup, space=setup.space.calibrated(Calibration.from_bytes(made)))

    def _prune(self) -> str:
        setup = set_up(self._config(), "lab-1")
        return self._score(setup, sampled(setup).express())

    def _merge(self) -> str:
        setup = set_up(self._config("merge"), "lab-1")
        rng = np.random.default_rng(1)
        merged = setup.space.breed(rng, setup.config.phases[1], (sampled(setup),)).genome
        self._edit = merged.express()
        return self._score(setup, self._edit)

    def _repair(self) -> str:
        setup = self._calibrated(set_up(self._config("repair"), "lab-1"))
        return self._score(setup, sampled(setup).express())

    def _skip(self) -> str:
        setup = self._calibrated(set_up(self._config(dynamic_skipping=True, active=2), "lab-1"))
        return self._score(setup, sampled(setup).express())

    def _calibrate(self, name: str) -> str | None:
        if name in _DENSE:
            self._calibrated(set_up(self._config("tune", **_DENSE[name]), "lab-1"))
            return None
        phases = "merge" if name == "hc_smoe" else "prune"
        setup = self._calibrated(set_up(self._config(phases, (name,)), "lab-1"))
        made = baseline_offspring(name, setup.space, setup.config.phases[-1]).genome
        return self._score(setup, made.express())

    def _start(self, kind: str) -> str:
        setup = self._calibrated(set_up(self._config("tune", **_DENSE[kind]), "lab-1"))
        return self._score(setup, sampled(setup).express())

    def _analyse(self) -> str:
        setup = set_up(self._config(), "lab-1")
        usage = self._held().analyse(UsageRequest(sampled(setup).express(), 64), setup.prepared["search"][0])
        return f"{len(usage.layers)} layers counted"

    def _answers(self) -> str:
        setup = set_up(self._config(), "lab-1")
        split = setup.prepared["search"][0].head(4)
        worker = self._held()
        full, pruned = worker.answer(IdentityEdit(), split), worker.answer(sampled(setup).express(), split)
        differ = sum(one.text != other.text for one, other in zip(full, pruned, strict=True))
        return f"{differ} of {len(full)} answers differ"

    def _export(self) -> str:
        """As the command does it: in a process that holds no model before; pruned, for a stock checkpoint."""
        setup = set_up(self._config(router_space="logits"), "lab-1")
        edit = sampled(setup).express()
        resident = self._held().resident
        with resident.edited(edit):
            self._logits = logits(resident.model, probe(resident))
        del resident
        self.worker = None
        gc.collect()
        self.device.reset()
        report = export_model(setup.config.model, edit, self._exported, ExportCard("lab", self.spec.name, ""))
        return f"{report.form}, {report.size_bytes / 1e9:.2f} GB"

    def _reload(self) -> str:
        """With plain `transformers`, and compared with the edited model of the process before."""
        from transformers import AutoModelForCausalLM

        self.worker = None
        gc.collect()
        self.device.reset()
        assert self._logits is not None and self._exported.is_dir(), "there is no export"
        model = AutoModelForCausalLM.from_pretrained(self._exported, dtype="auto")
        torch.nn.Module.to(model, "cuda")
        found = logits(model.eval(), torch.arange(3, 35, device="cuda")[None])
        difference = float((found - self._logits).abs().max())
        if not difference <= 0.03 * max(1.0, float(self._logits.abs().max())):
            raise RuntimeError(
                f"logits differ by {difference:.3g}, the largest is {float(self._logits.abs().max()):.3g}"
            )
        return f"logits differ by {difference:.2g} at most"

    def _profile(self) -> str:
        """What the profiler's own process does with an exported folder."""
        from moevolve.workers.profiling.messages import LoadRequest, MeasureRequest
        from moevolve.workers.profiling.process import Profilee

        self.worker = None
        gc.collect()
        self.device.reset()
        profilee = Profilee()
        profilee.load(LoadRequest(str(self._exported), None, None, False, "cuda", "auto", 1, 64))
        reply = profilee.measure(MeasureRequest(1, 32, 2, ()))
        return f"peak {(reply.peak_bytes or 0) / 2**30:.2f} GiB"

    # -- what is planned

    def _planned(self, verb: str) -> tuple[int | None, int | None]:
        try:
            return planned(self, verb)
        except Exception:  # noqa: BLE001 - shown as no plan
            traceback.print_exc()
            return None, None

    def memory(self, config: RunConfig) -> WorkerMemory:
        """What `plan` says of a worker of a run on this device."""
        (card,) = find_gpus("a100-80g")
        gpu: Device = replace(card, memory=self.device.capacity)
        return estimate(EstimateRequest(config, (gpu,))).memory[self.originals if self.spec.retained else "device"]


_WEIGHTS = ("weights outside of experts", "original experts")
_PHASES = {"merge": "merge", "repair": "repair"}


def planned(session: Session, verb: str) -> tuple[int | None, int | None]:
    """Peak bytes on the device and on the host by `plan`; None for what it says nothing of."""
    name, _, of = verb.partition(" ")
    if name in ("export", "reload", "profile"):
        return None, None
    if of in _DENSE or not session.spec.retained:
        memory = session.memory(session._config("tune", **_DENSE[of or "tomoe"]))
    else:
        phases = "merge" if of == "hc_smoe" else _PHASES.get(name, "prune")
        memory = session.memory(session._config(phases, (of,) if of else ()))
    weights = sum(item.device for item in memory.items if item.title in _WEIGHTS)
    if name == "load":
        return weights, memory.host_peak
    if not memory.experts:
        return memory.device, memory.host
    # Originals on the host: layers keep what they run on as far as there is room, the others take turns.
    layers = session.spec.layers - session.spec.dense
    size = memory.experts // layers
    kept = kept_layers(layers, size, experts_share(session.device.capacity - weights, memory.beside))
    return weights + memory.beside + size * min(layers, kept + 1), memory.host


def sampled(setup: SearchSetup) -> Genome:
    """A random individual of the first phase."""
    genome: Genome = setup.space.sample(np.random.default_rng(0), setup.config.phases[0]).genome
    return genome


def probe(resident: Any) -> Tensor:
    """Some tokens."""
    return torch.arange(3, 35, device=resident.device)[None]


@torch.inference_mode()
def logits(model: Any, tokens: Tensor) -> Tensor:
    """Of a model, on the host: float32 [tokens, vocabulary]."""
    found: Tensor = model(input_ids=tokens, use_cache=False).logits[0].float().cpu()
    return found


def verbs_of(name: str) -> tuple[str, ...]:
    """What is asked of a model."""
    return EXPERT_VERBS if SPECS[name].retained else DENSE_VERBS
