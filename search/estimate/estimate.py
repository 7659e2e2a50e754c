"""Estimates a search from its configuration, without loading weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import RunConfig
from moevolve.search.estimate.counts import (
    FULL_MODEL,
    PhaseCount,
    described_as,
    final_evaluations,
    model_sizes,
    phase_counts,
)
from moevolve.search.estimate.devices import UTILISATION, Device
from moevolve.search.estimate.memory import worker_memory
from moevolve.search.estimate.repairs import RepairWork, repair_works
from moevolve.search.estimate.report import DeviceEstimate, Estimate
from moevolve.search.estimate.workload import Prompts, SplitWork, WorkloadReader
from moevolve.search.genomes.contract.costs import GenomeCosts
from moevolve.search.genomes.registry import costs_of
from moevolve.search.loop.setup import needs_calibration
from moevolve.search.strategies.schedule import make_schedule, rounds_notes
from moevolve.workers.contract.capacity import WorkerMemory, experts_share
from moevolve.workers.contract.settings import Originals
from moevolve.workers.methods.eep.expert_memory import kept_layers
from moevolve.workers.profiling.outline import ModelOutline, outline_model


def estimate(
    config: RunConfig,
    gpus: Sequence[Device] = (),
    prompts: Prompts | None = None,
    utilisation: float = UTILISATION,
    outline: ModelOutline | None = None,
) -> Estimate:
    """Estimate a run, for which its model's weights needn't exist.

    Args:
        config: The run.
        gpus: GPUs to estimate hours for; none for a run on the CPU.
        prompts: Lengths to assume instead of reading the tasks' data.
        utilisation: Share of a GPU's peak FLOP/s that is reached, in (0, 1].
        outline: Outline of the run's model, if it is there already.

    Raises:
        UserError: The configuration asks for something that can't be had, or there are neither data nor given lengths
            of prompts; the message names the field.
    """
    outline = outline or outline_model(config.model)
    space = config.space(outline.facts)
    costs = costs_of(space, outline)
    reader = WorkloadReader(config, outline, prompts, needs_calibration(space))
    searched, set_aside = reader.splits("search"), reader.set_aside()
    ranked = reader.splits("dev") if config.final.rerank else ()
    tested = (*reader.splits("test"), *reader.held_out()) if config.final.test else ()
    splits = (*searched, *ranked, *tested)
    _check_positions(splits, outline)

    repairs = repair_works(config, costs, outline)
    memory = _memory(config, outline, costs, splits, repairs, bool(gpus))
    phases, like = phase_counts(config, costs), described_as(config.phases)
    token_flops = {kind: costs.token_flops(each) for kind, each in like.items()}
    final = final_evaluations(config)
    total = _total_flops(outline.token_flops, token_flops, phases, final, searched, ranked, tested)
    models = {FULL_MODEL: outline.facts.experts} | dict.fromkeys(like, costs.kept_experts)
    return Estimate(
        name=config.name,
        model=config.model.path,
        family=outline.facts.family,
        dtype=outline.facts.dtype,
        moe_layers=len(outline.facts.moe_layers),
        originals=config.model.originals,
        workers=config.workers.count,
        sizes=model_sizes(outline, costs, like),
        memory=memory,
        splits=splits,
        evaluation_flops={kind: each * _tokens(searched) for kind, each in token_flops.items()},
        total_flops=total,
        phases=phases,
        ranked=final[0],
        tested=final[1],
        utilisation=utilisation,
        devices=tuple(_on_device(gpu, config, outline, memory, models, total, utilisation) for gpu in gpus),
        repairs=repairs,
        remarks=(*set_aside, *rounds_notes(config)),
    )


def _memory(
    config: RunConfig,
    outline: ModelOutline,
    costs: GenomeCosts[Any],
    splits: Iterable[SplitWork],
    repairs: Sequence[RepairWork],
    on_gpu: bool,
) -> dict[str, WorkerMemory]:
    """Memory of a worker by place of the original experts: the device, and the run's other place or the host."""
    passes = [one for split in splits for one in (*split.passes.required, *split.passes.decoding)]
    places: list[Originals] = ["device"]
    if outline.experts_bytes:
        places.append("host" if config.model.originals == "device" else config.model.originals)
    return {place: worker_memory(config, outline, costs, passes, on_gpu, place, repairs) for place in places}


def _total_flops(
    full: int,
    token_flops: Mapping[str, int],
    phases: Sequence[PhaseCount],
    final: tuple[int, int],
    searched: Iterable[SplitWork],
    ranked: Iterable[SplitWork],
    tested: Iterable[SplitWork],
) -> int:
    """FLOPs of a search: the full model's FLOPs per token are `full`, those of candidates are by kind of phase."""
    on_search, on_dev, on_test = _tokens(searched), _tokens(ranked), _tokens(tested)
    total = sum(phase.different * token_flops[phase.kind] for phase in phases) * on_search
    total += full * (on_search + on_test)
    return total + token_flops[phases[-1].kind] * (final[0] * on_dev + max(0, final[1] - 1) * on_test)


def _on_device(
    device: Device,
    config: RunConfig,
    outline: ModelOutline,
    memory: Mapping[str, WorkerMemory],
    models: Mapping[str, int],
    flops: int,
    utilisation: float,
) -> DeviceEstimate:
    """A search of so many FLOPs on one kind of GPU; `models` has the number of experts per layer of each model."""
    gpus, peak = config.workers.num_gpus or 1.0, device.flops(outline.facts.dtype)
    available, in_flight = int(device.memory * gpus), make_schedule(config).in_flight
    # Workers beyond the window would have nothing to do.
    workers = min(config.workers.most(in_flight), in_flight)
    # Several GPUs of a worker hold a model's layers one after the other, and compute one at a time.
    rate = workers * min(gpus, 1.0) * peak * utilisation
    kept: dict[str, int] = {}
    place = config.model.originals
    if place != "device" and place in memory:
        share = experts_share(available - (outline.weight_bytes - outline.experts_bytes), memory[place].beside)
        layers, count = len(outline.facts.moe_layers), outline.facts.experts
        layer_bytes = outline.experts_bytes // layers
        kept = {title: kept_layers(layers, layer_bytes * each // count, share) for title, each in models.items()}
    return DeviceEstimate(
        name=device.name,
        title=device.title,
        workers=workers,
        memory_bytes=available,
        flops_per_second=peak,
        fits={where: each.device <= available for where, each in memory.items()},
        kept_layers=kept,
        hours=flops / rate / 3600,
    )


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
