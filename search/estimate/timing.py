"""How long evaluations take on a device: operations and memory traffic against what it can do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moevolve.search.estimate.devices import Device, Utilisation
from moevolve.search.estimate.repairs import RepairWork
from moevolve.search.estimate.workload import SplitWork
from moevolve.search.genomes.costs import GenomeCosts, ModelWork
from moevolve.workers.capacity import WorkerMemory, experts_share
from moevolve.workers.methods.eep.room import kept_layers
from moevolve.workers.profiling.outline import ModelOutline
from moevolve.workers.profiling.passes import Pass


@dataclass(frozen=True, slots=True)
class Range:
    """A number that depends on the candidates: `least` where nothing is decoded step by step, `most` where all is."""

    least: float
    most: float

    def __add__(self, other: Range) -> Range:
        return Range(self.least + other.least, self.most + other.most)

    def times(self, factor: float) -> Range:
        return Range(self.least * factor, self.most * factor)


NOTHING = Range(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Placement:
    """A worker's device, as the run shares it.

    Attributes:
        device: the kind.
        utilisation: what is got of it.
        share: of one device that the worker has, 1 at most: rates are multiplied by it.
        memory: bytes of all devices that the worker has; 0 where it is the host's.
        workers: that are busy at once: no more than the run's window, and on a CPU than there are cores for.
        dtype: of the model.
    """

    device: Device
    utilisation: Utilisation
    share: float
    memory: int
    workers: float
    dtype: str

    def rate(self, dtype: str) -> float:
        """Operations per second."""
        return self.device.flops(dtype) * self.utilisation.compute * self.share

    def seconds(self, work: ModelWork, one: Pass) -> float:
        """A pass, in all its steps: bound by operations or by memory traffic, and each layer takes its least time."""
        rate = self.rate(self.dtype)
        bandwidth = self.device.bandwidth * self.utilisation.memory * self.share
        least = one.steps * len(work.layers) * self.device.layer_seconds
        return least + max(work.flops(one) / rate, work.traffic(one) / bandwidth)

    def evaluation(self, work: ModelWork, splits: Iterable[SplitWork], streaming: float = 0.0) -> Range:
        """Scoring one candidate on some splits, without its edit.

        Args:
            work: the candidate's.
            splits: what it is scored on.
            streaming: seconds that every pass, or step of decoding, takes to bring over experts (`Streaming`).
        """

        def seconds(one: Pass) -> float:
            return self.seconds(work, one) + one.steps * streaming

        total = NOTHING
        for split in splits:
            sure = sum(map(seconds, split.passes.sure))
            total += Range(sure, sure + sum(map(seconds, split.passes.decoding)))
        return total

    def fits(self, memory: WorkerMemory) -> str:
        """Whether a worker fits: `yes` or `no`, `-` where the device's memory isn't known."""
        if not self.memory:
            return "-"
        return "yes" if memory.device <= self.memory else "no"


@dataclass(frozen=True, slots=True)
class Streaming:
    """How a model runs whose original experts are on the host (`moevolve.workers.methods.eep.room`).

    Attributes:
        title: which model: `full model`, or a phase's candidate.
        kept: MoE layers that keep their experts on the device.
        layers: MoE layers.
        seconds: that bringing over the others' takes, in every pass.
    """

    title: str
    kept: int
    layers: int
    seconds: float


def streaming_of(
    placement: Placement, memory: WorkerMemory, outline: ModelOutline, title: str, retained: int, merged: bool
) -> Streaming:
    """How many layers a model's experts stay on the device for, and what the others take.

    Args:
        placement: where it runs.
        memory: of a worker with the originals on the host.
        outline: the model as it is loaded.
        title: which model.
        retained: its experts per MoE layer.
        merged: whether they are made of all originals.
    """
    layers, count = len(outline.facts.moe_layers), outline.facts.experts
    whole = outline.experts_bytes // layers
    free = placement.memory - (outline.weight_bytes - outline.experts_bytes)
    kept = kept_layers(layers, whole * retained // count, experts_share(free, memory.beside))
    read = (layers - kept) * (whole if merged else whole * retained // count)
    link = placement.device.link * placement.utilisation.link
    return Streaming(title, kept, layers, read / link if link else 0.0)


def evaluation_flops(work: ModelWork, splits: Sequence[SplitWork]) -> Range:
    """Operations of scoring one candidate on some splits."""
    sure = sum(work.flops(one) for split in splits for one in split.passes.sure)
    return Range(sure, sure + sum(work.flops(one) for split in splits for one in split.passes.decoding))


def edit_seconds(
    placement: Placement, costs: GenomeCosts[Any], phase: str, originals: str, repaired: bool = False
) -> float | None:
    """Making a candidate of the resident model; None where nobody knows beforehand.

    Originals on the device: what is read of them and what is written go through its memory. Originals on the host:
    they come over the link, where there is one, and what is computed of them is written then.
    """
    moved = costs.edit_traffic(phase, originals == "host", repaired)
    if moved is None:
        return None
    device, utilisation = placement.device, placement.utilisation
    bandwidth = device.bandwidth * utilisation.memory * placement.share
    if originals == "device" or not device.link:
        return (moved.read + moved.written) / bandwidth
    return moved.read / (device.link * utilisation.link) + (0 if moved.copied else moved.written / bandwidth)


def repair_seconds(placement: Placement, work: RepairWork) -> float:
    """Repairing one candidate, once it is made, if none of its layers was fitted before.

    Layers run in the model's dtype; fits are products in float32 and systems in float64, taken at float32's rate.
    """
    least = work.layer_passes * placement.device.layer_seconds
    return least + work.forward / placement.rate(placement.dtype) + work.fitting / placement.rate("float32")


def reference_seconds(placement: Placement, work: RepairWork) -> float:
    """Running the unedited model on a repair's tokens."""
    return work.reference / placement.rate(placement.dtype)
