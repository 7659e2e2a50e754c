"""What is asked of a model of the lab, verb by verb, under a metered device; and what `plan` says of it."""

from __future__ import annotations

import gc
import re
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
from moevolve.search.config.files import as_run_config
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.base import Genome
from moevolve.search.genomes.registry import baseline_offspring
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.running.plan.estimate import estimate
from moevolve.search.running.plan.records import Estimate
from moevolve.search.running.set_up import set_up
from moevolve.workers.contract.capacity import NeededMemory, NoRoomError, check_room
from moevolve.workers.contract.card import ExportCard
from moevolve.workers.contract.edits import Calibration, Edit, IdentityEdit
from moevolve.workers.contract.messages import EvaluationRequest
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.profiling.passes import PromptMeter
from moevolve.workers.worker import EvaluationWorker
from real_size.cuda import CudaDevice
from real_size.meter import MeteredDevice
from real_size.predicted import predicted
from real_size.published import SPECS, Spec
from real_size.runs import run_config

BASELINES = ("frequency", "reap", "naee")
"""`soft_activation` is measured with `frequency`; `hc_smoe` merges, and comes later."""
UNLOADED = ("plan", "prompts")
"""For which files may have holes."""
EXPERT_VERBS = (
    *UNLOADED,
    *("load", "full", "prune", "skip"),
    *(f"calibrate {name}" for name in BASELINES),
    # In this order: answers of the full model put away what candidates of baselines ran on.
    *("answers", "analyse"),
    # From here on the model has buffers for experts that aren't the originals, which it keeps.
    *("merge", "calibrate hc_smoe", "repair", "export", "reload", "profile"),
)
DENSE_VERBS = (*UNLOADED, "load", "full", "start nanomoe", "start tomoe", "start factorllm")
"""A start is a calibration and the first candidate."""
_FEW = {
    "groups": 1,
    "naee_subsets": 2,
    "skipping_tokens": 128,
}
_SECTIONS: dict[str, dict[str, Any]] = {
    "skip": {"dynamic_skipping": True, "active": 2},
    "export": {"router_space": "logits"},
}
_PHASES = {"merge": "merge", "hc_smoe": "merge", "repair": "repair"}
_DENSE: dict[str, dict[str, Any]] = {
    "nanomoe": {"kind": "nanomoe", "rank": 128},
    "tomoe": {"kind": "tomoe"},
    "factorllm": {"kind": "factorllm", "experts": 4, "active": 2},
}

_OPT: dict[str, dict[str, Any]] = {"nanomoe": {"layers": "*.fc?"}, "tomoe": {"attention": False}}
"""What is said otherwise for a family without gates and rotary positions."""


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

    def __init__(
        self, spec: Spec, model: Path, task: Path, originals: str, device: MeteredDevice | CudaDevice, batch: int = 2048
    ) -> None:
        """Take a checkpoint; nothing is loaded yet.

        Args:
            spec: which model.
            model: its folder.
            task: from `write_task`.
            originals: where original experts stay.
            device: within its `installed`.
            batch: tokens of a forward pass.
        """
        self.spec, self.model, self.task, self.originals, self.device = spec, model, task, originals, device
        self._batch = batch
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
            gc.collect()
            self.device.reset()
            began = time.perf_counter()
            failure, note = None, ""
            try:
                note = self.do(verb) or ""
            except Exception as error:  # noqa: BLE001 - a row that fails is a result
                failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                traceback.print_exc()
                del error
            reading, seconds = self.device.read(), time.perf_counter() - began
            planned, planned_host = self._planned(verb)
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
        gc.unfreeze()
        shutil.rmtree(self._exported, ignore_errors=True)

    def do(self, verb: str) -> str | None:
        """One verb."""
        name, _, of = verb.partition(" ")
        doing: Callable[..., str | None] = getattr(self, f"_{name}")
        return doing(of) if of else doing()

    def config(self, verb: str) -> RunConfig:
        """The search that a verb is asked of."""
        name, _, of = verb.partition(" ")
        if not self.spec.retained:
            section, phases = _DENSE[of or "tomoe"], "tune"
            if self.spec.published["model_type"] == "opt":
                section = section | _OPT.get(of or "tomoe", {})
        else:
            section = {"kind": "eep", "experts": self.spec.retained, "router_space": self.spec.router_space} | _FEW
            section |= _SECTIONS.get(name, {})
            if of == "naee":
                section["experts"] = self.spec.experts - 1
            phases = _PHASES.get(of or name, "prune")
        section = section | {"calibration_tokens": self._tokens[1]}
        init = (of,) if of and self.spec.retained else ()
        made = run_config(self.spec, self.model, self.task, section, phases, init, self.originals, self._batch)
        return as_run_config(made, [f"phases.0.repair.tokens={self._tokens[-1]}"]) if phases == "repair" else made

    @cached_property
    def _tokens(self) -> list[int]:
        """Tokens of the first text to measure on, of the first two and so on, to ask for just as many.

        Two are enough but for repairs, which check themselves on every eighth.
        """
        split = prepare_split(load_task(str(self.task)), "calibration")
        meter = PromptMeter(ModelConfig(str(self.model)), EngineConfig())
        return [meter.most_tokens(split.head(count + 1)) for count in range(len(split.examples))]

    def _held(self) -> EvaluationWorker:
        if self.worker is None:
            config = self.config("merge" if self.spec.retained else "load")
            needed = NeededMemory(self.estimate(config).memory[self.originals], 1.0)
            self.worker = EvaluationWorker(config.model, config.engine, needed=needed)
        return self.worker

    def _plan(self) -> str:
        """What `launch` does on a card of three quarters of what is needed: refuses, and says what would fit.

        Nothing does where one layer's experts alone take more.
        """
        config = self.config("merge" if self.spec.retained else "load")
        needed, whole = _needed(config), self.device.capacity
        self.device.capacity = needed.memory.device * 3 // 4
        try:
            fits = self._refused(config, needed)
            if fits:
                check_room(_needed(as_run_config(config, fits)), torch.device("cuda", 0))
        finally:
            self.device.capacity = whole
        return (
            f"{needed.memory.device / 1e9:.2f} GB needed; on 3/4 of it refused, {' '.join(fits) or 'no setting'} fits"
        )

    def _prompts(self) -> str:
        """What the model is asked first, and what is scored of its answer, as its tokens say it."""
        config = self.config("full")
        meter = PromptMeter(config.model, config.engine)
        ((asked, scored, _),) = meter.texts(set_up(config, "lab-1").prepared["search"][0].head(1))
        print(f"asked:\n{asked}\nscored:\n{scored}", flush=True)
        return f"asked …{asked[-64:]!r}, scored {scored!r}"

    def _refused(self, config: RunConfig, needed: NeededMemory) -> list[str]:
        """The settings that a refusal names; nothing may have been loaded."""
        try:
            EvaluationWorker(config.model, config.engine, needed=needed)
        except NoRoomError as error:
            if self.device.peak:
                raise
            return re.findall(r"--set (\S+?)(?=[ ;])", str(error))
        raise RuntimeError("it was loaded")

    def _load(self) -> None:
        self._held()

    def _full(self) -> str:
        return self._score(set_up(self.config("full"), "lab-1"), IdentityEdit())

    def _set_up(self, verb: str) -> SearchSetup:
        """What a search begins with: calibrated where it needs that."""
        setup = set_up(self.config(verb), "lab-1")
        measurement = setup.space.measurement
        if measurement is None:
            return setup
        made = self._held().calibrate(measurement, setup.prepared["calibration"])
        return replace(setup, space=setup.space.calibrated(Calibration.from_bytes(made)))

    def _score(self, setup: SearchSetup, edit: Edit) -> str:
        splits = setup.prepared["search"]
        reply = self._held().evaluate(EvaluationRequest(edit, tuple(split.ref for split in splits)), splits)
        if reply.failure is not None:
            raise RuntimeError(reply.failure)
        (result,) = reply.results.values()
        return f"log-probability {result.gold_logprob:.3f}"

    def _sampled(self, verb: str) -> str:
        setup = self._set_up(verb)
        return self._score(setup, sampled(setup).express())

    def _prune(self) -> str:
        return self._sampled("prune")

    def _repair(self) -> str:
        return self._sampled("repair")

    def _skip(self) -> str:
        return self._sampled("skip")

    def _start(self, kind: str) -> str:
        return self._sampled(f"start {kind}")

    def _merge(self) -> str:
        setup = self._set_up("merge")
        rng = np.random.default_rng(1)
        merged = setup.space.breed(rng, setup.config.phases[1], (sampled(setup),)).genome
        return self._score(setup, merged.express())

    def _calibrate(self, name: str) -> str:
        setup = self._set_up(f"calibrate {name}")
        made = baseline_offspring(name, setup.space, setup.config.phases[-1]).genome
        return self._score(setup, made.express())

    def _analyse(self) -> str:
        setup = self._set_up("analyse")
        usage = self._held().analyse(sampled(setup).express(), setup.prepared["search"][0], 64)
        return f"{len(usage.routed)} layers counted"

    def _answers(self) -> str:
        setup = self._set_up("answers")
        split = setup.prepared["search"][0].head(4)
        worker = self._held()
        (full,), (pruned,) = (worker.answer(each, split) for each in (IdentityEdit(), sampled(setup).express()))
        differ = sum(one.text != other.text for one, other in zip(full, pruned, strict=True))
        return f"{differ} of {len(full)} answers differ"

    def _export(self) -> str:
        """As the command does it: in a process that holds no model before; pruned, for a stock checkpoint."""
        setup = self._set_up("export")
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
        from moevolve.workers.profiling.process import ProfiledProcess
        from moevolve.workers.profiling.report import ProfiledModel, ProfileSettings

        self.worker = None
        gc.collect()
        self.device.reset()
        settings = ProfileSettings((1,), 32, 2, 1, "cuda", threads=1)
        reply = ProfiledProcess(ProfiledModel("", str(self._exported)), settings).measure(1)
        return f"peak {(reply.peak_bytes or 0) / 2**30:.2f} GiB"

    # -- what is planned

    def _planned(self, verb: str) -> tuple[int | None, int | None]:
        try:
            if verb in UNLOADED:
                return None, None
            return predicted(self.spec, self.originals, self.device.capacity, verb, self.estimate(self.config(verb)))
        except Exception:  # noqa: BLE001 - shown as no plan
            traceback.print_exc()
            return None, None

    def estimate(self, config: RunConfig) -> Estimate:
        """What `plan` says of a run on this device."""
        key = config.canonical_json()
        if key not in self._estimates:
            self._estimates[key] = estimate(config)
        return self._estimates[key]


def _needed(config: RunConfig) -> NeededMemory:
    needed = set_up(config, "lab-1").needed
    assert needed is not None
    return needed


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
    """What is asked of a model; routing groups let no baseline choose among all experts at once."""
    spec = SPECS[name]
    if not spec.retained:
        return DENSE_VERBS
    grouped = int(spec.config.get("n_group") or 1) > 1
    refused = [f"calibrate {each}" for each in ("naee", "hc_smoe")] if grouped else []
    return tuple(verb for verb in EXPERT_VERBS if verb not in refused)
