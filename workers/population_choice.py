"""How many candidates should share a pass (`engine.population: auto`): passes are timed, and the time decides.

What is timed is the shared pass itself (`moevolve.workers.population`) with copies of one candidate, over the first
batch of a split's prompts and gold answers. Batches of the longest ones are run, too, to see what memory they take.
What candidates do apart is the same for every size: making them, reading answers off logits, and decoding. What reused
hidden states (`moevolve.workers.reuse`) would spare a candidate that has passes to itself isn't counted.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.types import PreparedSplit
from moevolve.workers.batches import Batch
from moevolve.workers.calibration.calibrators import token_sequences
from moevolve.workers.config import POPULATION_SIZES
from moevolve.workers.edits.eep import EepEdit
from moevolve.workers.generation import GenerationEngine
from moevolve.workers.messages import PopulationChoice
from moevolve.workers.population import Population, Seat, SharedPassError, out_of_memory
from moevolve.workers.resident import ResidentModel

TOLERANCE = 0.05
"""Times this near each other count as equal."""

REPEATS = 3
"""Timed passes per size, after one that isn't; the median counts."""

_SPARE = 2
"""A size is taken only if the device has room for this many times what its passes took: others have more logits."""


def best_size(seconds: Sequence[tuple[int, float]]) -> int:
    """The smallest size within 5 % of the fastest, of those that are at least 5 % faster than 1; 1 if there is none.

    Args:
        seconds: size, and time per candidate; of size 1, too.
    """
    one = dict(seconds)[1]
    pays = [(size, taken) for size, taken in seconds if taken <= one * (1 - TOLERANCE)]
    if not pays:
        return 1
    best = min(taken for _, taken in pays)
    return min(size for size, taken in pays if taken <= best * (1 + TOLERANCE))


def hardware_of(device: torch.device) -> str:
    """The make of a device where measuring may pay; empty for a CPU.

    On CPUs candidates that shared passes took 1.0 to 1.6 times as long as one by one.
    """
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def measure_population(
    resident: ResidentModel,
    engine: GenerationEngine,
    edit: EepEdit,
    splits: Sequence[PreparedSplit],
    memory: int,
    most: int = POPULATION_SIZES[-1],
) -> PopulationChoice:
    """Time passes of 1, 2, 4 and 8 copies of a candidate, as far as there is memory, and choose.

    Args:
        resident: the model; unedited afterwards.
        engine: the worker's.
        edit: a candidate like those that are to come.
        splits: whose prompts are run; the first one's are timed.
        memory: most bytes of stacked experts; see `Population`.
        most: as many candidates wait for a worker, so that it can't fill larger passes.

    Returns:
        The choice; 1 if the candidate's passes fail.
    """
    hardware = hardware_of(resident.device)
    seconds: list[tuple[int, float]] = []
    ended = ""
    try:
        resident.check(edit)
        batches = _Batches(resident, engine, splits)
        seconds.append((1, _alone(resident, engine, edit, batches)))
        for size in POPULATION_SIZES[1:]:
            if size > most:
                ended = f"there are no more than {most} candidates at once for a worker"
                break
            population = Population(resident, engine, size, memory)
            if population.width(edit) < size:
                ended = f"engine.population_memory_mb has no room for {size} candidates' experts"
                break
            room = Room(resident.device)
            taken = _together(population, size, edit, batches)
            if not room.was_ample():
                ended = f"the device has too little memory for {size} candidates"
                break
            seconds.append((size, taken / size))
    except (CandidateError, UserError, SharedPassError) as error:
        ended = str(error)
    except Exception as error:
        if not out_of_memory(error):
            raise
        ended = f"out of memory with {POPULATION_SIZES[len(seconds)]} candidates"
    if resident.device.type == "cuda":
        torch.cuda.empty_cache()
    return PopulationChoice(best_size(seconds) if seconds else 1, hardware, tuple(seconds), ended)


class Room:
    """What a device's memory has room for, and how much of that is taken from now on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
            # What the allocator keeps for later is free, too.
            kept = torch.cuda.memory_reserved(device) - self._before
            self._free = torch.cuda.mem_get_info(device)[0] + kept

    def was_ample(self) -> bool:
        """Whether there was so much room as others may need; always where the device has no memory of its own."""
        if self._device.type != "cuda":
            return True
        return _SPARE * (torch.cuda.max_memory_allocated(self._device) - self._before) <= self._free


class _Batches:
    """The first batch of the first split, and of every split the one in which most attend to each other."""

    def __init__(self, resident: ResidentModel, engine: GenerationEngine, splits: Sequence[PreparedSplit]) -> None:
        self.largest: list[Batch] = []
        for split in splits:
            texts = token_sequences(resident, engine.config, (split,), sys.maxsize)
            if not texts:
                raise UserError(f"task {split.task}, split {split.split}: there are no prompts to measure with")
            batches = engine.forward.batcher.batches(tuple((tuple(text),) for text in texts))
            if not self.largest:
                self.timed = batches[0]
            self.largest.append(max(batches, key=lambda batch: batch.columns.pairs))


def _alone(resident: ResidentModel, engine: GenerationEngine, edit: EepEdit, batches: _Batches) -> float:
    """Seconds of a pass that a candidate has to itself."""
    stamps: list[float] = []
    with resident.edited(edit):
        _passes(engine, batches, stamps, shared=False)
    return _median(stamps)


def _together(population: Population, size: int, edit: EepEdit, batches: _Batches) -> float:
    """Seconds of a pass that several share."""
    stamps: list[list[float]] = [[] for _ in range(size)]

    def seat(place: int) -> Seat:
        return Seat(edit, lambda engine: _passes(engine, batches, stamps[place], shared=True))

    population.run([seat(place) for place in range(size)])
    # A lane goes on when all have come to the next pass: the times between are those of whole rounds.
    return _median(stamps[0])


@torch.inference_mode()
def _passes(engine: GenerationEngine, batches: _Batches, stamps: list[float], shared: bool) -> None:
    """Run passes one after the other, and note when each timed one is over; what checks logits waits for the device."""
    forward = engine.forward
    for batch in (*batches.largest, *[batches.timed] * (1 + REPEATS)):
        cache = forward.new_cache() if forward.rewinds else None
        last = [batch.path(tokens)[-1] for tokens in batch.rows]
        # Alone it must not start from hidden states that others left.
        forward.read(replace(forward.request(batch.columns, last, cache), recurs=shared))
        if batch is batches.timed:
            stamps.append(time.perf_counter())


def _median(stamps: Sequence[float]) -> float:
    """The median time between two neighbours; the time to the first one isn't known, and has warmed caches up."""
    return statistics.median(later - earlier for earlier, later in pairwise(stamps))
