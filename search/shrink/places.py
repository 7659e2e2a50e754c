"""Where the candidates of a search are evaluated on this machine or cluster, and how many at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.fitness.base import SHORT_ANSWER
from moevolve.evaluators.fitness.kinds import FITNESSES
from moevolve.evaluators.types import Split
from moevolve.search.config.run import RunConfig, TaskSection
from moevolve.search.genomes.registry import costs_of
from moevolve.search.running.set_up import count_tokens, pinned
from moevolve.search.shrink.goal import Goal
from moevolve.search.strategies.schedule import largest_window
from moevolve.workers.contract.settings import ExpertOffload

if TYPE_CHECKING:  # it imports Ray
    from moevolve.search.pools.ray_actor import ModelProbe

# Most individuals under evaluation at once, and so the most workers without GPUs: the search depends on it. Phases of
# few individuals have a smaller one, so that they have 8 rounds (`search/loop/README.md`).
_WINDOW = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where the candidates of a search are evaluated.

    Attributes:
        experts: Where the original experts are; None leaves that to the model's own setting.
        window: Individuals under evaluation at once.
        workers: Number of workers, with what each reserves.
        threads: Threads of each; None leaves them to the engine's own setting.
    """

    experts: ExpertOffload | None = None
    window: int = _WINDOW
    workers: Mapping[str, float] = field(default_factory=dict)
    threads: int | None = None


def placed(goal: Goal, config: RunConfig, place: Place, probe: ModelProbe) -> Place:
    """Choose where candidates are evaluated: places for this machine, and as many at once as it has workers for."""
    experts, most_workers = probe.call(room_for, config)
    if experts == "disk":
        refuse_decoding(config.tasks)
    cores, gpus = len(os.sched_getaffinity(0)), config.workers.least if config.workers.num_gpus else 0
    # How many candidates there is time for isn't known yet, and more at once than workers are no gain.
    most = _WINDOW if goal.seconds is None else min(_WINDOW, gpus or cores)
    window = max(largest_window(config, most), min(_WINDOW, gpus))  # no GPU is left idle
    if gpus:
        return replace(place, experts=experts, window=window)
    count = max(1, min(window, cores, most_workers))
    threads = max(1, cores // count)
    return Place(experts, window, {"count": count, "num_cpus": threads}, threads)


def refuse_decoding(tasks: Sequence[TaskSection]) -> None:
    """Refuse tasks that a model with its experts on the disk can't be scored on, which reads them for every token.

    Raises:
        UserError: Answers that aren't short would have to be generated; the message names the task.
    """
    for section in tasks:
        task = section.task()
        if section.decodes or (FITNESSES[task.fitness].compares and task.resolved_positions == "greedy"):
            raise UserError(
                f"task {task.name}: models have to generate answers of up to {task.max_new_tokens} tokens to it "
                "(max_new_tokens), and the full model, whose experts don't fit into memory, would read them from the "
                f"disk for every token; give rows with answers of at most {SHORT_ANSWER} tokens, with long answers or "
                "choices, or texts (.txt), or use a machine with more memory"
            )


def room_for(config: RunConfig) -> tuple[ExpertOffload, int]:
    """Choose the first place of the original experts that fits (device, host, disk), with the most workers that do.

    A dense model has one place, the device.

    Raises:
        NoRoomError: None of them fits; the message says what is missing.
    """
    from moevolve.search.running.plan.memory import launch_memory
    from moevolve.workers.checkpoints.loading import resolve_device
    from moevolve.workers.contract.capacity import NoRoomError, check_room, free_bytes
    from moevolve.workers.profiling.outline import outline_model

    config = config.model_copy(update={"model": pinned(config.model)})
    outline, device = outline_model(config.model), resolve_device(config.model)
    costs = costs_of(config.space(outline.facts), outline)
    repaired = any(phase.repair is not None for phase in config.phases)
    wanted: tuple[Split, ...] = ("calibration", "search") if repaired else ("search",)
    splits = [section.prepared_splits(wanted, repaired) for section in config.tasks]
    rows, scored = ([each[name] for each in splits if name in each] for name in ("calibration", "search"))
    tokens, _ = count_tokens(config, rows, scored)
    places: tuple[ExpertOffload, ...] = ("device", "host", "disk") if config.on_gpu else ("device", "disk")
    places = places if outline.facts.experts else places[:1]
    for place in places:
        placed = config.model_copy(update={"model": replace(config.model, expert_offload=place)})
        needed = launch_memory(placed, outline, costs, tokens)
        try:
            check_room(needed, device)
            break
        except NoRoomError:
            if place == places[-1]:
                raise
    taken = needed.memory.device + needed.memory.host_peak
    return place, max(1, free_bytes(device) // max(taken, 1))
