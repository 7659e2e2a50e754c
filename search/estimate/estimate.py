"""The estimate of a search, put together: from a configuration to all that `plan` prints. No weights are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moevolve.evaluators.errors import UserError
from moevolve.search.config.models import shipped_models
from moevolve.search.config.run import RunConfig
from moevolve.search.estimate.counts import (
    FULL_MODEL,
    ModelSize,
    PhaseCount,
    described_as,
    final_evaluations,
    model_sizes,
    phase_counts,
)
from moevolve.search.estimate.devices import Device
from moevolve.search.estimate.memory import worker_memory
from moevolve.search.estimate.repairs import RepairWork, repair_works
from moevolve.search.estimate.workload import Prompts, SplitWork, WorkloadReader
from moevolve.search.genomes.registry import costs_of, make_space
from moevolve.search.loop.setup import needs_calibration
from moevolve.search.strategies.schedule import make_schedule
from moevolve.workers.contract.capacity import WorkerMemory, experts_share
from moevolve.workers.methods.eep.expert_memory import kept_layers
from moevolve.workers.profiling.outline import ModelOutline

UTILISATION = 0.4
"""Share of a GPU's peak FLOP/s that a search is assumed to get: what plain `transformers` models commonly get in
batches of thousands of tokens. Nobody has measured it for these searches."""

DEVICE, HOST = "device", "host"


@dataclass(frozen=True, slots=True)
class EstimateRequest:
    """What is to be estimated.

    Attributes:
        config: the run; its model's weights needn't be there.
        gpus: devices to estimate for; none for a run on the CPU.
        prompts: lengths in the place of the tasks' data.
        utilisation: share of a GPU's peak FLOP/s that is assumed, in (0, 1].
    """

    config: RunConfig
    gpus: tuple[Device, ...] = ()
    prompts: Prompts | None = None
    utilisation: float = UTILISATION


@dataclass(frozen=True, slots=True)
class DeviceEstimate:
    """A search on one kind of GPU.

    Attributes:
        device: the kind.
        workers: that are busy at once, no more than the run's window.
        memory: bytes of the GPUs, or of the part of one, that a worker has.
        fits: whether a worker fits, by where original experts are kept (`device`, `host`).
        kept_layers: MoE layers whose experts stay on the device, of the full model and of a candidate of each phase,
            where the run keeps original experts on the host; else empty.
        hours: of all evaluations, by their FLOPs alone.
    """

    device: Device
    workers: int
    memory: int
    fits: Mapping[str, bool]
    kept_layers: Mapping[str, int]
    hours: float


@dataclass(frozen=True, slots=True)
class Pilot:
    """Evaluations that were made for real, on the machine that asked, and what the search takes if all are like them.

    Attributes:
        individuals: that were evaluated.
        workers: that evaluated them.
        seconds: of one evaluation, its candidate's making and repair included, by kind of phase.
        hours: of the whole search by as many workers, its final evaluations included.
    """

    individuals: int
    workers: int
    seconds: Mapping[str, float]
    hours: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """All that is known before a search runs.

    Attributes:
        config: the run.
        outline: its model.
        sizes: the full model, and a candidate of each phase.
        memory: of one worker, by where original experts are kept: `device`, and for models of experts `host`.
        splits: all that is evaluated, `search` first.
        flops: of one evaluation on `search`, by kind of phase: FLOPs per token times tokens, gold answers' included.
        total_flops: of all evaluations of the search.
        counts: individuals by phase.
        final: evaluations at the end: of candidates on `dev`, of models on `test` (the full one's included).
        utilisation: share of a GPU's peak FLOP/s that `devices` assume.
        devices: estimates.
        repairs: of the phases that do.
        set_aside: a line for people for each task whose `search` gives rows to measure on.
        pilot: what was measured, if that was asked for.
    """

    config: RunConfig
    outline: ModelOutline = field(repr=False)
    sizes: tuple[ModelSize, ...]
    memory: Mapping[str, WorkerMemory]
    splits: tuple[SplitWork, ...]
    flops: Mapping[str, int]
    total_flops: int
    counts: tuple[PhaseCount, ...]
    final: tuple[int, int]
    utilisation: float
    devices: tuple[DeviceEstimate, ...]
    repairs: tuple[RepairWork, ...] = ()
    set_aside: tuple[str, ...] = ()
    pilot: Pilot | None = None


def estimate(request: EstimateRequest) -> Estimate:
    """Estimate a run.

    Raises:
        UserError: the configuration asks for what can't be had, or prompts can't be found and none were given; the
            message names the field.
    """
    config, outline = request.config, _outline(request.config)
    space = make_space(config.genome, outline.facts, config.phases)
    costs = costs_of(space, outline)
    reader = WorkloadReader(config, outline, request.prompts, needs_calibration(space))
    searched, set_aside = reader.splits("search"), reader.set_aside()
    ranked = reader.splits("dev") if config.final.rerank else ()
    tested = (*reader.splits("test"), *reader.held_out()) if config.final.test else ()
    splits = (*searched, *ranked, *tested)
    _check_positions(splits, outline)

    repairs = repair_works(config, costs, outline)
    passes = [one for split in splits for one in (*split.passes.required, *split.passes.decoding)]
    on_gpu = bool(request.gpus)
    memory = {
        where: worker_memory(config, outline, costs, passes, on_gpu, where == HOST, repairs)
        for where in ((DEVICE, HOST) if outline.experts_bytes else (DEVICE,))
    }
    counts, like = phase_counts(config, costs), described_as(config.phases)
    final = final_evaluations(config)
    token_flops = {kind: costs.token_flops(each) for kind, each in like.items()}
    total = sum(count.different * token_flops[count.kind] for count in counts) * _tokens(searched)
    total += outline.token_flops * _tokens((*searched, *tested))
    last = token_flops[counts[-1].kind]
    total += last * (final[0] * _tokens(ranked) + max(0, final[1] - 1) * _tokens(tested))

    def on_device(device: Device) -> DeviceEstimate:
        gpus = config.workers.num_gpus or 1.0
        available, workers = int(device.memory * gpus), busy_workers(config)
        fits = {where: each.device <= available for where, each in memory.items()}
        models = {FULL_MODEL: outline.facts.experts} | dict.fromkeys(like, costs.kept_experts)
        kept: dict[str, int] = {}
        if config.model.originals == HOST and HOST in memory:
            share = experts_share(available - (outline.weight_bytes - outline.experts_bytes), memory[HOST].beside)
            layers, count = len(outline.facts.moe_layers), outline.facts.experts
            whole = outline.experts_bytes // layers
            kept = {title: kept_layers(layers, whole * each // count, share) for title, each in models.items()}
        # Several GPUs of a worker hold a model's layers one after the other, and compute one at a time.
        rate = workers * min(gpus, 1.0) * device.flops(outline.facts.dtype) * request.utilisation
        return DeviceEstimate(device, workers, available, fits, kept, total / rate / 3600)

    return Estimate(
        config=config,
        outline=outline,
        sizes=model_sizes(outline, costs, like),
        memory=memory,
        splits=splits,
        flops={kind: each * _tokens(searched) for kind, each in token_flops.items()},
        total_flops=total,
        counts=counts,
        final=final,
        utilisation=request.utilisation,
        devices=tuple(map(on_device, request.gpus)),
        repairs=repairs,
        set_aside=set_aside,
    )


def busy_workers(config: RunConfig) -> int:
    """Workers of a run that evaluate at once; those beyond the window would have nothing to do."""
    in_flight = make_schedule(config).in_flight
    return min(config.workers.most(in_flight), in_flight)


def _outline(config: RunConfig) -> ModelOutline:
    from moevolve.workers.profiling.outline import outline_model

    try:
        return outline_model(config.model)
    except UserError as error:
        if Path(config.model.path).is_dir():
            raise
        raise UserError(
            f"{error}; --model takes a folder with a config.json, or one of {', '.join(shipped_models())}"
        ) from error


def _tokens(splits: Iterable[SplitWork]) -> int:
    return sum(split.tokens for split in splits)


def _check_positions(splits: Iterable[SplitWork], outline: ModelOutline) -> None:
    for split in splits:
        longest = max((one.longest for one in (*split.passes.required, *split.passes.decoding)), default=0)
        if longest > outline.positions:
            raise UserError(
                f"task {split.task}, split {split.split}: prompts and answers reach {longest} tokens, the model "
                f"has {outline.positions} positions; set engine.max_prompt_tokens, or give fewer"
            )
