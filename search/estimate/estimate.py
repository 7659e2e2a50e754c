"""The estimate of a search, put together: from a configuration to all that `plan` prints. No weights are loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moevolve.evaluators.errors import UserError
from moevolve.search.config.models import shipped_models
from moevolve.search.config.run import RunConfig
from moevolve.search.estimate.counts import (
    ModelSize,
    PhaseCount,
    described_as,
    final_evaluations,
    model_sizes,
    phase_counts,
)
from moevolve.search.estimate.devices import GPU_UTILISATION, Device, Utilisation
from moevolve.search.estimate.memory import worker_memory
from moevolve.search.estimate.repairs import RepairWork, repair_works
from moevolve.search.estimate.timing import (
    NOTHING,
    Placement,
    Range,
    Streaming,
    edit_seconds,
    evaluation_flops,
    reference_seconds,
    repair_seconds,
    streaming_of,
)
from moevolve.search.estimate.workload import Prompts, SplitWork, WorkloadReader
from moevolve.search.genomes.costs import ModelWork, full_work
from moevolve.search.genomes.registry import costs_of, make_space
from moevolve.search.loop.schedule import make_schedule
from moevolve.search.loop.setup import needs_calibration
from moevolve.workers.capacity import WorkerMemory
from moevolve.workers.profiling.outline import ModelOutline

CPU_UTILISATION = Utilisation(compute=0.4, memory=1.0, link=1.0)
"""Of rates that are measured, not looked up. Matrix products are two fifths of a pass of the demo models, whose layers
are narrow; in wider ones they are more of it."""

DEVICE, HOST = "device", "host"
FULL_MODEL = "full model"


@dataclass(frozen=True, slots=True)
class EstimateRequest:
    """What is to be estimated.

    Attributes:
        config: the run; its model's weights needn't be there.
        gpus: devices to estimate for.
        cpu: whether to measure this machine's CPU, and estimate for it.
        prompts: lengths in the place of the tasks' data.
        utilisation: assumed of GPUs.
    """

    config: RunConfig
    gpus: tuple[Device, ...] = ()
    cpu: bool = False
    prompts: Prompts | None = None
    utilisation: Utilisation = GPU_UTILISATION


@dataclass(frozen=True, slots=True)
class PhaseEstimate:
    """A candidate of one phase on one device, in seconds.

    Attributes:
        kind: of the phase.
        edit: making it; None if not known.
        repair: repairing it, where it is.
        scoring: scoring it on `search`.
    """

    kind: str
    edit: float | None
    repair: float
    scoring: Range

    @property
    def making(self) -> float:
        """All that is known of making and repairing it."""
        return (self.edit or 0.0) + self.repair


@dataclass(frozen=True, slots=True)
class DeviceEstimate:
    """A search on one kind of device.

    Attributes:
        placement: the device as a worker has it.
        fits: by where original experts are kept (`device`, `host`), see `Placement.fits`.
        phases: a candidate of each.
        scoring: seconds of scoring a candidate of the last phase, per split.
        rate: evaluations per second of all workers, over the search's phases.
        hours: of all evaluations, those at the end included, if none repeats another.
        streaming: of the full model and a candidate of each phase, where the run keeps original experts on the host of
            a device that has memory of its own; else empty.
    """

    placement: Placement
    fits: Mapping[str, str]
    phases: tuple[PhaseEstimate, ...]
    scoring: tuple[Range, ...] = field(repr=False)
    rate: Range
    hours: Range
    streaming: tuple[Streaming, ...] = ()


@dataclass(frozen=True, slots=True)
class Estimate:
    """All that is known before a search runs.

    Attributes:
        config: the run.
        outline: its model.
        sizes: the full model, and a candidate of each phase.
        memory: of one worker, by where original experts are kept: `device`, and for models of experts `host`.
        splits: all that is evaluated, `search` first.
        flops: of one evaluation on `search`, by phase.
        counts: individuals by phase.
        final: evaluations at the end: of a candidate on `dev`, of models on `test` (the full one's included).
        devices: estimates.
        repairs: of the phases that do.
        set_aside: a line for people for each task whose `search` gives rows to measure on.
    """

    config: RunConfig
    outline: ModelOutline = field(repr=False)
    sizes: tuple[ModelSize, ...]
    memory: Mapping[str, WorkerMemory]
    splits: tuple[SplitWork, ...]
    flops: tuple[tuple[str, Range], ...]
    counts: tuple[PhaseCount, ...]
    final: tuple[int, int]
    devices: tuple[DeviceEstimate, ...]
    repairs: tuple[RepairWork, ...] = ()
    set_aside: tuple[str, ...] = ()


class _Estimator:
    """Estimates one run."""

    def __init__(self, request: EstimateRequest, outline: ModelOutline) -> None:
        """Check the run against its model, and find what it evaluates.

        Raises:
            UserError: something in the configuration can't be had, or prompts can't be found and none were given.
        """
        self._request, self._config, self._outline = request, request.config, outline
        config = request.config
        space = make_space(config.genome, outline.facts, config.phases)
        self._costs = costs_of(space, outline)
        reader = WorkloadReader(config, outline, request.prompts, needs_calibration(space))
        self._search = reader.splits("search")
        self._set_aside = reader.set_aside()
        self._dev = reader.splits("dev") if config.final.rerank else ()
        self._test = (*reader.splits("test"), *reader.held_out()) if config.final.test else ()
        self._counts = phase_counts(config, self._costs)
        self._like = described_as(config.phases)
        self._works: dict[str, ModelWork] = {kind: self._costs.work(like) for kind, like in self._like.items()}
        examples = sum(split.examples for split in self._search)
        length = sum(split.tokens for split in self._search) / examples
        self._repairs = repair_works(config, self._costs, outline, length)
        self._full = full_work(outline)
        in_flight = make_schedule(config).in_flight
        self._busy = min(config.workers.most(in_flight), in_flight)
        self._check_positions()

    @property
    def splits(self) -> tuple[SplitWork, ...]:
        """All that is evaluated."""
        return (*self._search, *self._dev, *self._test)

    def estimate(self) -> Estimate:
        """Everything, with an estimate for every device asked for."""
        config, request = self._config, self._request
        on_gpu = bool(request.gpus) or not request.cpu
        passes = [one for split in self.splits for one in (*split.passes.sure, *split.passes.decoding)]
        memory = {
            where: worker_memory(config, self._outline, self._costs, passes, on_gpu, where == HOST, self._repairs)
            for where in ((DEVICE, HOST) if self._outline.experts_bytes else (DEVICE,))
        }
        placements = [self._on_gpu(gpu) for gpu in request.gpus]
        if request.cpu:
            placements.append(self._on_cpu())
        return Estimate(
            config,
            self._outline,
            model_sizes(self._outline, self._costs, self._like),
            memory,
            self.splits,
            tuple((kind, evaluation_flops(work, self._search)) for kind, work in self._works.items()),
            self._counts,
            final_evaluations(self._config),
            tuple(self._on_device(placement, memory) for placement in placements),
            self._repairs,
            self._set_aside,
        )

    def _on_device(self, placement: Placement, memory: Mapping[str, WorkerMemory]) -> DeviceEstimate:
        streaming = self._streaming(placement, memory)
        seconds = {each.title: each.seconds for each in streaming}
        phases = tuple(self._phase(placement, position, seconds) for position in range(len(self._counts)))
        searched, individuals = NOTHING, 0
        for count, phase in zip(self._counts, phases, strict=True):
            searched += _whole(phase).times(count.different)
            individuals += count.different
        everything = searched + self._ending(placement, phases[-1], seconds)
        referred = max((reference_seconds(placement, work) for work in self._repairs), default=0.0)
        everything += Range(referred, referred).times(placement.workers)
        rate = Range(*(placement.workers * individuals / seconds for seconds in (searched.most, searched.least)))
        hours = everything.times(1 / placement.workers / 3600)
        fits = {where: placement.fits(each) for where, each in memory.items()}
        work = self._works[phases[-1].kind]
        last = seconds.get(phases[-1].kind, 0.0)
        scoring = tuple(placement.evaluation(work, (split,), last) for split in self.splits)
        return DeviceEstimate(placement, fits, phases, scoring, rate, hours, streaming)

    def _streaming(self, placement: Placement, memory: Mapping[str, WorkerMemory]) -> tuple[Streaming, ...]:
        outline = self._outline
        if self._config.model.originals != HOST or HOST not in memory or not placement.memory:
            return ()
        models = [(FULL_MODEL, outline.facts.experts, False)]
        models += [(kind, self._works[kind].retained, like == "merge") for kind, like in self._like.items()]
        return tuple(streaming_of(placement, memory[HOST], outline, *each) for each in models)

    def _phase(self, placement: Placement, position: int, streaming: Mapping[str, float]) -> PhaseEstimate:
        kind = self._counts[position].kind
        work = next((each for each in self._repairs if each.phase == position), None)
        originals, like = self._config.model.originals, self._like[kind]
        edit = edit_seconds(placement, self._costs, like, originals, work is not None)
        repair = 0.0 if work is None else repair_seconds(placement, work)
        scoring = placement.evaluation(self._works[kind], self._search, streaming.get(kind, 0.0))
        return PhaseEstimate(kind, edit, repair, scoring)

    def _ending(self, placement: Placement, last: PhaseEstimate, streaming: Mapping[str, float]) -> Range:
        """The full model on `search` and `test`, the best few on `dev`, the others on `test`."""
        ranked, tested = final_evaluations(self._config)
        work, edit = self._works[last.kind], last.making
        whole, each = streaming.get(FULL_MODEL, 0.0), streaming.get(last.kind, 0.0)
        total = placement.evaluation(self._full, (*self._search, *self._test), whole)
        total += (placement.evaluation(work, self._dev, each) + Range(edit, edit)).times(ranked)
        return total + (placement.evaluation(work, self._test, each) + Range(edit, edit)).times(max(0, tested - 1))

    def _on_gpu(self, gpu: Device) -> Placement:
        workers = self._config.workers
        count = workers.num_gpus or 1.0
        share = min(count, 1.0)
        memory = int(gpu.memory * count)
        return Placement(gpu, self._request.utilisation, share, memory, self._busy, self._outline.facts.dtype)

    def _on_cpu(self) -> Placement:
        from moevolve.workers.profiling.machine_rates import measure_machine

        config = self._config
        rates = measure_machine(self._outline, config.engine)
        cores = os.cpu_count() or 1
        workers = min(self._busy, max(1.0, cores / rates.threads))
        device = Device(
            "cpu",
            f"this CPU, {rates.threads} thread{'s' if rates.threads > 1 else ''} per worker",
            *(rates.flops, rates.flops, rates.bandwidth, 0, 0.0, rates.layer_seconds),
        )
        return Placement(device, CPU_UTILISATION, 1.0, 0, workers, self._outline.facts.dtype)

    def _check_positions(self) -> None:
        for split in self.splits:
            longest = max((one.longest for one in _all(split)), default=0)
            if longest > self._outline.positions:
                raise UserError(
                    f"task {split.task}, split {split.split}: prompts and answers reach {longest} tokens, the model "
                    f"has {self._outline.positions} positions; set engine.max_prompt_tokens, or give fewer"
                )


def _all(split: SplitWork) -> Sequence[Any]:
    return (*split.passes.sure, *split.passes.decoding)


def _whole(phase: PhaseEstimate) -> Range:
    return phase.scoring + Range(phase.making, phase.making)


def estimate(request: EstimateRequest) -> Estimate:
    """Estimate a run.

    Raises:
        UserError: the configuration asks for what can't be had; the message names the field.
    """
    from moevolve.workers.profiling.outline import outline_model

    model = request.config.model
    try:
        outline = outline_model(model)
    except UserError as error:
        if Path(model.path).is_dir():
            raise
        raise UserError(
            f"{error}; --model takes a folder with a config.json, or one of {', '.join(shipped_models())}"
        ) from error
    return _Estimator(request, outline).estimate()
