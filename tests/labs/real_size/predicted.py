"""What `plan` says of the memory that a verb takes: what the meter is held against."""

from __future__ import annotations

from moevolve.search.running.plan.records import Estimate
from moevolve.workers.contract.capacity import WorkerMemory, experts_share
from moevolve.workers.contract.facts import DTYPE_BYTES
from moevolve.workers.methods.eep.expert_memory import kept_layers
from real_size.published import Spec

_WEIGHTS = ("weights outside of experts", "original experts")
_BETWEEN = "what merging or calibrating takes beyond these"
_FULL_ONLY = ("full", "prune", "analyse", "answers")
"""Verbs that run the full model, or find the layers with its experts; with calibrations these are all that do."""
_CANDIDATE_ONLY = ("skip", "merge")


def predicted(spec: Spec, originals: str, capacity: int, verb: str, found: Estimate) -> tuple[int, int]:
    """Peak bytes on the device and on the host.

    Args:
        spec: the model.
        originals: Memory that holds the original experts, `device` or `host`.
        capacity: bytes of the device.
        verb: Verb of the table, such as `merge` or `calibrate reap`.
        found: the plan of the run that it is done in.
    """
    name = verb.partition(" ")[0]
    candidate, memory = found.sizes[-1], found.memory[originals]
    weights = sum(item.device for item in memory.items if item.title in _WEIGHTS)
    if name in ("reload", "profile"):
        size = (candidate.parameters or 0) * DTYPE_BYTES[found.dtype]
        # The profiler has `transformers` load to the device at once.
        return size, size if name == "reload" else 0
    if name == "load":
        return weights, memory.host_peak
    if not memory.experts:
        if name == "export":
            return memory.exporting, memory.host_peak
        # What a dense kind measures isn't there where the full model is scored.
        between = sum(item.device for item in memory.items if item.title == _BETWEEN and name == "full")
        return memory.device - between, memory.host
    # Originals on the host: layers keep what they run on as far as there is room, the others take turns.
    layers = spec.layers - spec.dense
    whole = memory.experts // layers
    kept = whole * candidate.experts // spec.experts
    free = capacity - weights
    if name == "export":
        part = memory.exporting - memory.device + memory.beside
        return weights + _on_device(layers, kept, free, None) + part, memory.host_peak
    return weights + max(
        0 if name in _CANDIDATE_ONLY else _on_device(layers, whole, free, memory.beside) + _passes(memory, verb),
        0 if name in _FULL_ONLY else _on_device(layers, kept, free, memory.beside) + memory.beside,
    ), memory.host


def _on_device(layers: int, size: int, free: int, beside: int | None) -> int:
    """Bytes of experts that are on the device at once, where a layer has so many."""
    return size * min(layers, kept_layers(layers, size, experts_share(free, beside)) + 1)


def _passes(memory: WorkerMemory, verb: str) -> int:
    """What passes of the full model need; experts are merged, and layers fitted, of candidates."""
    names = ("keys and values", "activations", *(() if verb == "calibrate hc_smoe" else (_BETWEEN,)))
    return sum(item.device for item in memory.items if item.title.startswith(names))
