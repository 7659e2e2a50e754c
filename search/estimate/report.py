"""The estimate of a search: everything `plan` prints, as one record that is its own JSON, and notes on its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import computed_field

from moevolve.search.estimate.counts import FULL_MODEL, ModelSize, PhaseCount
from moevolve.search.estimate.repairs import RepairWork
from moevolve.search.estimate.workload import SplitWork
from moevolve.search.text import duration, memory_size
from moevolve.workers.contract.capacity import WorkerMemory
from moevolve.workers.contract.settings import Originals

BY_FLOPS = (
    "times by FLOPs leave out what isn't arithmetic on prompts and gold answers: further decoding, making and "
    "repairing candidates, and copying experts that stay on the host; a search can take many times longer"
)


@dataclass(frozen=True, slots=True)
class DeviceEstimate:
    """A search on one kind of GPU.

    Attributes:
        name, title: Name of the GPU on the command line, and the maker's.
        workers: Number of workers that are busy at once, at most the run's window.
        memory_bytes: Memory of the GPUs, or of the share of one, that a worker has.
        flops_per_second: Peak FLOP/s of one GPU in the model's dtype.
        fits: True where a worker fits, by place of the original experts.
        kept_layers: Number of MoE layers whose experts stay on the device, by model: the full model and a candidate of
            each phase. Empty unless the run keeps original experts on the host.
        hours: Duration of all evaluations, by their FLOPs alone.
    """

    name: str
    title: str
    workers: int
    memory_bytes: int
    flops_per_second: float
    fits: Mapping[str, bool]
    kept_layers: Mapping[str, int]
    hours: float


@dataclass(frozen=True, slots=True)
class Pilot:
    """A few evaluations measured on this machine, and how long the search takes if all evaluations are like them.

    Attributes:
        individuals, workers: Number of evaluated individuals, and of workers that evaluated them.
        seconds: Mean duration of one evaluation by kind of phase, making and repairing its candidate included.
        hours: Duration of the whole search with as many workers, its final evaluations included.
    """

    individuals: int
    workers: int
    seconds: Mapping[str, float]
    hours: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a search takes, as far as that is known before it runs.

    Attributes:
        name: Name of the search.
        family: `transformers` model type.
        originals: Place where the run keeps original experts.
        workers: Number of workers that the run asks for.
        sizes: The full model, then a candidate of each kind of phase.
        memory: Memory of one worker by place of the original experts: `device`, and for MoE models also the run's other
            place, or `host`.
        splits: Everything that is evaluated, `search` first.
        evaluation_flops: FLOPs of one evaluation on `search` by kind of phase: FLOPs per token times the tokens of
            prompts and gold answers.
        total_flops: FLOPs of all evaluations of the search.
        ranked: Number of candidates that are evaluated on `dev` at the end.
        tested: Number of models that are evaluated on `test` at the end, the full model included.
        utilisation: Share of a GPU's peak FLOP/s that `devices` assume.
        repairs: Memory of each phase's repairs, where it has some.
        remarks: Lines that `launch` shows as well: rows set aside for calibration, phases of few rounds.
        pilot: Measurements on this machine; None without a pilot.
    """

    name: str
    model: str
    family: str
    dtype: str
    moe_layers: int
    originals: Originals
    workers: int | Literal["auto"]
    sizes: tuple[ModelSize, ...]
    memory: Mapping[str, WorkerMemory]
    splits: tuple[SplitWork, ...]
    evaluation_flops: Mapping[str, int]
    total_flops: int
    phases: tuple[PhaseCount, ...]
    ranked: int
    tested: int
    utilisation: float
    devices: tuple[DeviceEstimate, ...]
    repairs: tuple[RepairWork, ...] = ()
    remarks: tuple[str, ...] = ()
    pilot: Pilot | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def notes(self) -> tuple[str, ...]:
        """What the numbers rest on, and what they leave out."""
        return tuple(_notes(self))


def evaluations_note(found: Estimate) -> str:
    """The most evaluations that a search makes."""
    counts = ", ".join(
        f"{one.individuals} {one.kind}"
        + (f" (at most {one.different} different)" if one.different < one.individuals else "")
        for one in found.phases
    )
    return (
        f"evaluations: {counts}, then {found.ranked} on dev and {found.tested} on test; a candidate that repeats an "
        "earlier one is looked up instead of evaluated"
    )


def _notes(found: Estimate) -> Iterator[str]:
    yield evaluations_note(found)
    if found.pilot is not None:
        seconds = ", ".join(f"{each:.2f} s {kind}" for kind, each in found.pilot.seconds.items())
        yield (
            f"pilot: {found.pilot.individuals} individuals were evaluated on this machine (workers: "
            f"{found.pilot.workers}); an evaluation, with making and repairing its candidate, took {seconds}"
        )
    for one in found.devices:
        yield from _device_notes(found, one)
    if found.devices:
        yield BY_FLOPS
    if found.pilot is None:
        yield "`--pilot 20` evaluates 20 individuals on this machine, and says how long the search takes on it"
    yield from found.remarks
    yield from (f"{repair.fault}; `launch` refuses it" for repair in found.repairs if repair.fault is not None)
    yield from _workers_notes(found)
    if not found.devices:
        yield "on a CPU, device and host are the same memory"
    memory = found.memory.get(found.originals)
    if memory is not None and memory.loading:
        yield f"loading takes {memory_size(memory.loading)} of host memory at its peak, in every worker"
    if memory is not None and memory.exporting:
        yield f"exporting a candidate takes {memory_size(memory.exporting)} of the device at its peak"
    yield "memory leaves out the CUDA context and what the allocator keeps in reserve"


def _device_notes(found: Estimate, one: DeviceEstimate) -> Iterator[str]:
    yield (
        f"{one.name} ({one.title}): about {duration(one.hours)}, if {found.utilisation:.0%} of its "
        f"{one.flops_per_second / 1e12:.4g} TFLOP/s are got"
    )
    for title, kept in one.kept_layers.items():
        if kept < found.moe_layers:
            yield (
                f"{one.name}: {kept} of the {found.moe_layers} layers of a "
                f"{title if title == FULL_MODEL else f'{title} candidate'} keep their experts on the device, the "
                "others' are copied from the host in every pass"
            )


def _workers_notes(found: Estimate) -> Iterator[str]:
    busy = min((one.workers for one in found.devices), default=None)
    if busy is not None and found.workers == "auto":
        yield f"workers.count is auto: hours are those of the {busy} workers that the window keeps busy"
    elif busy is not None and found.workers != "auto" and busy < found.workers:
        yield f"the run's window keeps {busy} of {found.workers} workers busy"
