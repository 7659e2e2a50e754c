"""What one worker takes of its device's and of the host's memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moevolve.search.config.run import RunConfig
from moevolve.search.estimate.repairs import RepairWork
from moevolve.search.genomes.costs import GenomeCosts
from moevolve.workers.profiling.outline import ModelOutline
from moevolve.workers.profiling.passes import Pass

_LOGITS_AT_ONCE = 1 << 24
"""Where texts are read, logits are made of so many at once (`workers/engine/texts.py`), with float32 copies of them."""


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One thing that takes memory: bytes on the device and on the host (both the same memory on a CPU)."""

    title: str
    device: int
    host: int


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """One worker's memory.

    Attributes:
        items: that add up.
        loading: bytes of host memory that loading takes before the weights are on the device.
    """

    items: tuple[MemoryItem, ...]
    loading: int

    @property
    def device(self) -> int:
        return sum(item.device for item in self.items)

    @property
    def host(self) -> int:
        return sum(item.host for item in self.items)


def worker_memory(
    config: RunConfig,
    outline: ModelOutline,
    costs: GenomeCosts[Any],
    passes: Iterable[Pass],
    on_gpu: bool,
    host: bool,
    repairs: Sequence[RepairWork] = (),
) -> WorkerMemory:
    """Memory of a worker of a search.

    Weights and buffers are exact. Activations are an estimate: of hidden states and of one layer's intermediate
    results. The CUDA context, the allocator's spare room and the process itself are not counted.

    Args:
        config: the run.
        outline: its model.
        costs: of its candidates.
        passes: all that are run.
        on_gpu: whether the device has memory of its own.
        host: whether original experts stay on the host, whatever the run says.
        repairs: of its phases.
    """
    experts, passes = outline.experts_bytes, tuple(passes)
    items = [MemoryItem("weights outside of experts", outline.weight_bytes - experts, 0)]
    if experts:
        items.append(_original(outline, host, on_gpu))
        buffers = costs.buffer_bytes([phase.kind for phase in config.phases], host, bool(repairs))
        items.append(MemoryItem("buffers for candidates' experts", buffers, 0))
        # The unedited model runs on one layer's originals at a time where they stay on the host.
        shown = experts // len(outline.facts.moe_layers) if host else 0
        items.append(MemoryItem("one layer's original experts", shown, 0))
    cached = max((_cached(outline, one) for one in passes), default=0)
    items.append(MemoryItem("keys and values of a batch", cached, 0))
    items.append(MemoryItem("activations and logits of a batch (estimate)", _activations(outline, passes), 0))
    items += _repairing(config, costs, repairs, bool(experts))
    loading = outline.weight_bytes if on_gpu and config.model.device_map is None else 0
    return WorkerMemory(tuple(items), loading)


def _original(outline: ModelOutline, host: bool, on_gpu: bool) -> MemoryItem:
    title = "original experts"
    if not host:
        return MemoryItem(title, outline.experts_bytes, 0)
    return MemoryItem(title, 0, outline.pinned_bytes if on_gpu else outline.experts_bytes)


def _repairing(
    config: RunConfig, costs: GenomeCosts[Any], repairs: Sequence[RepairWork], experts: bool
) -> Iterator[MemoryItem]:
    """What repairs take beside scoring, at most."""
    if not repairs:
        return
    if not experts:
        copies = costs.buffer_bytes([phase.kind for phase in config.phases], False, repaired=True)
        yield MemoryItem("copies of what is fitted", copies, 0)
    yield MemoryItem("a layer's fit, with states of its tokens", max(each.taken for each in repairs), 0)
    yield MemoryItem("fitted layers kept for other candidates", max(each.kept for each in repairs), 0)
    yield MemoryItem("states of all layers to fit to", 0, max(each.streams for each in repairs))


def _cached(outline: ModelOutline, one: Pass) -> int:
    return (one.cached + one.steps * one.tokens) * outline.cache_bytes if one.kept else 0


def _activations(outline: ModelOutline, passes: Iterable[Pass]) -> int:
    """Hidden states of four kinds, one layer's network, and logits with a float32 copy of a part of them."""
    size, facts = outline.facts.dtype_bytes, outline.facts
    choices = max(facts.active, 1)
    most = 0
    for one in passes:
        states = 4 * one.tokens * outline.hidden * size
        network = one.real * choices * (outline.hidden + 3 * outline.intermediate) * size
        logits = _LOGITS_AT_ONCE if one.at_once is None else one.at_once * outline.vocabulary
        most = max(most, states + network, states + logits * (size + 4))
    return most
