"""The estimate of a search: everything `plan` prints, as one record that is its own JSON, and notes on its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import computed_field

from moevolve.evaluators.records import short_repr
from moevolve.evaluators.types import Split
from moevolve.search.genomes.contract.phases import PhaseConfig
from moevolve.search.running.plan.counts import ModelSize, PhaseCount
from moevolve.search.text import memory_size
from moevolve.workers.contract.capacity import WorkerMemory
from moevolve.workers.contract.settings import ExpertOffload


@dataclass(frozen=True, slots=True)
class SplitWork:
    """The prompts of one split of a task, on which every candidate is evaluated.

    Attributes:
        examples: Number of prompts.
        tokens: Number of tokens of prompts and answers, without padding.
        longest: Number of tokens of the longest prompt with its answer.
        source: Description of where the lengths come from.
    """

    task: str
    split: Split
    examples: int
    tokens: int
    longest: int
    source: str


@dataclass(frozen=True, slots=True)
class Pilot:
    """What a few individuals of a search took on this machine.

    Attributes:
        counts: Number of evaluated individuals by kind of phase.
        workers: Number of workers that evaluated them.
        seconds: Mean duration of one evaluation on `search` by kind of phase, making and repairing its candidate
            included.
        other_seconds: Duration of everything else: starting workers, loading the model, calibrating.
        calibration_seconds: Duration of calibrating alone.
        full_seconds: Duration of evaluating the full model on `search`.
        final_seconds: Duration of the search's final evaluations if all evaluations are like these, on as many workers.
        hours: Duration of the whole search under the same assumption, from its start to its final evaluations.
    """

    counts: Mapping[str, int]
    workers: int
    seconds: Mapping[str, float]
    other_seconds: float
    calibration_seconds: float = 0.0
    full_seconds: float = 0.0
    final_seconds: float = 0.0
    hours: float = 0.0

    @computed_field  # type: ignore[prop-decorator]
    @property
    def individuals(self) -> int:
        """Number of evaluated individuals."""
        return sum(self.counts.values())

    def of(self, kind: str) -> float:
        """Seconds of one evaluation in a phase; of a phase that wasn't measured, those of the slowest one."""
        return self.seconds.get(kind, max(self.seconds.values()))

    def searching(self, counts: Iterable[tuple[str, int]]) -> float:
        """Return the seconds of so many evaluations of each kind of phase, on all workers."""
        return sum(self.of(kind) * max(number / self.workers, min(number, 1)) for kind, number in counts)

    def final(self, models: Mapping[Split, Sequence[PhaseConfig | None]], tokens: Mapping[Split, int]) -> float:
        """Seconds until the final scores are there, on all workers.

        Args:
            models: See `final_models`.
            tokens: Tokens of all tasks' prompts and answers by split.
        """

        def on_workers(split: Split, phases: Sequence[PhaseConfig | None]) -> float:
            share = tokens.get(split, 0) / max(1, tokens["search"])

            # What a repair has fitted is kept, and running the result takes about as long as the full model.
            each = [
                share * (self.full_seconds if phase is None or phase.repair is not None else self.of(phase.kind))
                for phase in phases
            ]
            return max(*each, sum(each) / self.workers)

        return sum(on_workers(split, phases) for split, phases in models.items() if phases)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a search takes, estimated before it runs.

    Attributes:
        name: Name of the search.
        family: `transformers` model type.
        expert_offload: Place where the run keeps original experts.
        workers: Number of workers that the run asks for.
        on_gpu: False for a run on the CPU, where device and host are the same memory.
        sizes: The full model, then a candidate of each kind of phase.
        memory: Memory of one worker by place of the original experts: `device`, and for MoE models also the run's other
            place, or `host`.
        splits: Everything that is evaluated, `search` first; empty if the data can't be read.
        ranked: Number of models that are evaluated on `dev` at the end.
        tested: Number of models that are evaluated on `test` at the end, the full model included.
        remarks: Lines on rows set aside for calibration, phases of few rounds and workers without work.
        pilot: Measurements on this machine; None without a pilot.
    """

    __repr__ = short_repr

    name: str
    model: str
    family: str
    dtype: str
    expert_offload: ExpertOffload
    workers: int | Literal["auto"]
    on_gpu: bool
    sizes: tuple[ModelSize, ...]
    memory: Mapping[str, WorkerMemory]
    splits: tuple[SplitWork, ...]
    phases: tuple[PhaseCount, ...]
    ranked: int
    tested: int
    remarks: tuple[str, ...] = ()
    pilot: Pilot | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def notes(self) -> tuple[str, ...]:
        """What the numbers rest on, and what they don't count."""
        return tuple(_notes(self))


def _notes(found: Estimate) -> Iterator[str]:
    counts = ", ".join(f"{one.individuals} {one.kind}" for one in found.phases)
    yield (
        f"evaluations: {counts}, then {found.ranked} on dev and {found.tested} on test; a candidate that repeats an "
        "earlier one is looked up instead of evaluated"
    )
    if found.pilot is not None:
        seconds = ", ".join(f"{each:.2f} s {kind}" for kind, each in found.pilot.seconds.items())
        yield (
            f"pilot: {found.pilot.individuals} individuals were evaluated on this machine (workers: "
            f"{found.pilot.workers}); an evaluation, with making and repairing its candidate, took {seconds}"
        )
    else:
        yield "`moevolve plan --pilot 20` evaluates 20 individuals, and says how long the search takes on that machine"
    yield from found.remarks
    if not found.on_gpu:
        yield "on a CPU, device and host are the same memory"
    memory = found.memory.get(found.expert_offload)
    if memory is not None and memory.loading:
        yield f"loading takes {memory_size(memory.loading)} of host memory at its peak, in every worker"
    yield "memory doesn't count the CUDA context and what the allocator keeps in reserve"
