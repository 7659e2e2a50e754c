"""Memory of one worker, on its device and on the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from moevolve.kernels.expert_merge import staged_bytes
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.costs import SpaceCosts
from moevolve.search.running.plan.counts import described_as
from moevolve.search.running.plan.repairs import RepairWork, repair_works
from moevolve.workers.contract.capacity import MemoryItem, NeededMemory, SmallerSettings, WorkerMemory
from moevolve.workers.contract.settings import LARGE_BLOCK, ExpertOffload
from moevolve.workers.profiling.activations import STREAMS
from moevolve.workers.profiling.outline import ModelOutline
from moevolve.workers.profiling.passes import Pass

# Number of logits that are computed at once when running text is scored (`workers/engine/texts.py`), with their
# exponentials in float32; if two models are compared for both, with two float32 copies of each and their difference.
_LOGITS_AT_ONCE = 1 << 24
# Number of logits that are converted to float32 at once when single tokens are read (`workers/engine/forward.py`).
_FLOAT_LOGITS = 1 << 22

# Assumed number of tokens in a pass for each position whose logits are computed, as long as no prompt is known.
_TOKENS_PER_LOGITS = 32
# Bytes of a worker's process that has loaded torch, transformers and Ray, and no model.
_PROCESS = 600 << 20
# Fewest `engine.batch_tokens` that a refusal suggests.
_LEAST_BATCH = 1024


def worker_memory(
    config: RunConfig,
    outline: ModelOutline,
    costs: SpaceCosts,
    passes: Iterable[Pass],
    place: ExpertOffload,
    repairs: Sequence[RepairWork],
) -> WorkerMemory:
    """Count the memory of a search's worker.

    Weights and buffers are exact. Activations are counted along the code that runs
    (`moevolve.workers.profiling.activations`). The CUDA context, the allocator's reserve and, beside a GPU, the process
    itself are not counted.

    Args:
        config, outline, costs: The run, its model, and the costs of its candidates.
        passes: All forward passes of the run.
        place: Place of the original experts, whatever the run says.
        repairs: Memory of its phases' repairs.
    """
    passes = tuple(passes)
    host = place != "device" and outline.experts_bytes > 0
    # Where long answers are decoded, every pass needs all of a candidate's layers; else layers follow one another.
    by_layer = host and not any(section.decodes for section in config.tasks)
    items = [MemoryItem("weights outside of experts", outline.weight_bytes - outline.experts_bytes, 0)]
    buffers = costs.buffer_bytes([phase.kind for phase in config.phases], host, bool(repairs))
    experts, spare = _experts(config, outline, place, buffers, by_layer, bool(repairs))
    items += experts
    activations = _activations(outline, passes, config.on_gpu)
    longest = max((one.longest for one in passes), default=0)
    between = max(_merging(config, outline), costs.calibration_bytes(longest))
    cached = 0 if by_layer else max((_cached(outline, one) for one in passes), default=0)
    beyond = max(0, between - activations)
    needed = [
        MemoryItem("keys and values of a batch", cached, 0),
        MemoryItem("activations and logits of a batch (estimate)", activations, 0),
        # Merging happens between passes or between layers, calibration between batches, and fits before a candidate is
        # scored, so that none adds to another or to a batch's activations.
        MemoryItem("what merging or calibrating takes beyond these", beyond, costs.calibration_host_bytes()),
    ]
    if outline.experts_bytes:
        states = sum(one.tokens for one in passes) * outline.hidden * outline.facts.dtype_bytes
        needed.append(MemoryItem("states of the texts that are scored", 0, states if by_layer else 0))
    if repairs:
        # On a GPU a fit may use what scoring takes, and the room of the unedited layer, which has run by then. On a CPU
        # the process keeps most of the memory that passes freed, but a fit needs larger pieces.
        fit = max(each.taken for each in repairs) - (cached + activations + beyond if config.on_gpu else 0)
        kept = 0 if host else max(each.kept for each in repairs)
        needed += [
            MemoryItem("what a layer's fit, with states of its tokens, takes beyond these", max(0, fit - spare), 0),
            MemoryItem("fitted layers kept for other candidates", kept, 0),
            MemoryItem("states of all layers to fit to", 0, max(each.streams for each in repairs)),
        ]
    beside = sum(item.device for item in needed)
    exporting = 0
    if outline.experts_bytes:
        kept_experts, *_ = costs.counts(described_as(config.phases)[config.phases[-1].kind])
        exporting = sum(item.device for item in items) + _exported(outline, kept_experts)
    at_once = max(outline.experts_bytes, buffers) if host and not by_layer else 0
    own = () if config.on_gpu else (MemoryItem("the process and its libraries", _PROCESS, 0),)
    return WorkerMemory((*items, *needed, *own), _loading(config, outline, place), beside, at_once, exporting)


def _experts(
    config: RunConfig, outline: ModelOutline, place: ExpertOffload, buffers: int, by_layer: bool, repaired: bool
) -> tuple[list[MemoryItem], int]:
    """Count original experts and those of a candidate, all of whose layers take `buffers` bytes.

    Returns the device bytes that are free again while a candidate is fitted, as well.
    """
    experts = outline.experts_bytes
    if not experts:
        return [MemoryItem("candidates' own weights", buffers, 0)], 0
    layers = len(outline.facts.moe_layers)
    in_host = outline.pinned_bytes if config.on_gpu else experts
    layer, host = experts // layers, place != "device"
    if by_layer:
        own, spare = buffers // layers, 0
        if config.on_gpu:
            # An edited layer replaces the unedited one, whose experts are then read one by one.
            own, spare = max(0, own - layer), max(0, layer - own)
        items = [
            MemoryItem("original experts", 0, in_host if place == "host" else 0),
            MemoryItem("buffers for candidates' experts", own, 0),
            MemoryItem("one layer's original experts", layer if config.on_gpu else 0, layer if place == "disk" else 0),
        ]
        return items, spare
    # Layers take turns in one buffer, but repaired ones stay in buffers of their own.
    return [
        MemoryItem("original experts", 0 if host else experts, in_host if place == "host" else 0),
        MemoryItem("buffers for candidates' experts", 0 if host and not repaired else buffers, 0),
        MemoryItem("one layer's original experts", layer if host else 0, layer if place == "disk" else 0),
    ], 0


def launch_memory(
    config: RunConfig, outline: ModelOutline, costs: SpaceCosts, tokens: int | None = None
) -> NeededMemory:
    """Count the memory that a worker must find when it starts, with passes of the largest size instead of real prompts.

    Args:
        config, outline, costs: The run, its model, and the costs of its candidates.
        tokens: Number of tokens in all calibration rows; None if it isn't known.
    """

    def taken(place: ExpertOffload, batch_tokens: int) -> WorkerMemory:
        return worker_memory(config, outline, costs, _largest(batch_tokens, outline), place, repairs)

    def rank(way: SmallerSettings) -> int:
        # More GPUs and reading from disk count most, then the number of changed settings.
        slow = way.settings.count("num_gpus") + 2 * way.settings.count("expert_offload=disk")
        return way.settings.count("--set") + 10 * slow

    repairs = repair_works(config, costs, outline, tokens)
    own, batch = config.model.expert_offload, config.engine.batch_tokens
    ways: list[SmallerSettings] = []
    halves = [batch, *(batch >> power for power in range(1, 32) if batch >> power >= _LEAST_BATCH)]
    places: list[ExpertOffload] = [own]
    if outline.experts_bytes and own == "device" and config.workers.num_gpus > 0:
        places.append("host")
    if outline.experts_bytes and own != "disk":
        places.append("disk")
    for place in places:
        named = (f"model.expert_offload={place}",) if place != own else ()
        for size in halves:
            settings = (*named, *(() if size == batch else (f"engine.batch_tokens={size}",)))
            ways += _ways(settings, taken(place, size), config)
    return NeededMemory(taken(own, batch), config.workers.num_gpus, tuple(sorted(ways, key=rank)))


def _ways(settings: tuple[str, ...], memory: WorkerMemory, config: RunConfig) -> Iterator[SmallerSettings]:
    """Alternatives with this memory: in the run's dtype or a 16-bit one, on one GPU or several."""
    dtypes = [(settings, 1)]
    if config.model.dtype == "float32":
        dtypes.append(((*settings, "model.dtype=bfloat16"), 2))
    for names, divided in dtypes:
        device, host = memory.device // divided, memory.host_peak // divided
        if names:
            yield SmallerSettings(" ".join(f"--set {name}" for name in names), device, host)
        elsewhere = any(name.startswith("model.expert_offload=") for name in names)
        if config.workers.num_gpus and not elsewhere and config.model.expert_offload == "device":
            now = max(1, int(config.workers.num_gpus))
            for count in (each for each in (2, 4, 8) if each > now):
                spread = (*names, f"workers.num_gpus={count}", "model.device_map=balanced")
                yield SmallerSettings(
                    " ".join(f"--set {name}" for name in spread), device * now // count, memory.host // divided
                )


def _largest(batch_tokens: int, outline: ModelOutline) -> tuple[Pass, ...]:
    """Return the largest passes that a batch of this size can need: over the prompts, and of a decoding step."""
    read = max(1, batch_tokens // _TOKENS_PER_LOGITS)
    first = Pass(batch_tokens, read, 0, outline.caches, 1, batch_tokens)
    step = Pass(read, read, batch_tokens, outline.caches, 1, batch_tokens, batch_tokens)
    return first, step


def _loading(config: RunConfig, outline: ModelOutline, place: ExpertOffload) -> int:
    """Peak of host memory: all weights pass through it; originals that stay are copied to be pinned, layer by layer."""
    if not config.on_gpu or config.model.device_map is not None:
        return 0
    if place == "device" or not outline.expert_bytes:
        return outline.weight_bytes
    if place == "disk":
        return outline.weight_bytes - outline.experts_bytes
    return outline.weight_bytes - outline.experts_bytes + outline.pinned_bytes + max(map(sum, outline.expert_bytes))


# Number of positions whose logits are compared at once, roughly (`workers/export/verify.py`).
_COMPARED = 128


def _exported(outline: ModelOutline, kept: int) -> int:
    """Bytes of the largest part of a checkpoint that is compared with the resident model: a layer, or the embeddings.

    The checkpoint has `kept` experts per layer.
    """
    embeddings = outline.vocabulary * outline.hidden * outline.facts.dtype_bytes
    others = max(0, outline.weight_bytes - outline.experts_bytes - 2 * embeddings) // outline.layers
    experts = max(map(sum, outline.expert_bytes)) * kept // outline.facts.experts
    # Gate and up projections, two thirds of an expert, are fused first, while the single ones are still there.
    logits = _COMPARED * outline.vocabulary * outline.facts.dtype_bytes
    return max(embeddings + logits, experts * 4 // 3, experts + others)


def _merging(config: RunConfig, outline: ModelOutline) -> int:
    """Bytes of expert weights that are staged for merging, copied to the device or converted to float32, at most."""
    if not outline.expert_bytes or all(phase.kind != "merge" for phase in config.phases):
        return 0
    count, itemsize = outline.facts.experts, outline.facts.dtype_bytes
    return staged_bytes(count, count, max(outline.expert_bytes[0]) // (count * itemsize), itemsize)


def _cached(outline: ModelOutline, one: Pass) -> int:
    return (one.retained + one.cached + one.steps * one.tokens) * outline.cache_bytes if one.kept else 0


def _activations(outline: ModelOutline, passes: Iterable[Pass], on_gpu: bool) -> int:
    """Return the bytes of one layer's states, or of logits and the last layer's states, whichever is larger.

    On a CPU the process keeps what layers freed, unless their tensors are large, and large logits come on top of that.
    """
    size, streams = outline.facts.dtype_bytes, STREAMS * outline.hidden * outline.facts.dtype_bytes
    most = 0
    for one in passes:
        # A cache grows by copying one layer's keys, then its values.
        grown = outline.cache_bytes // (2 * outline.layers)
        attending = one.tokens * (outline.attention_bytes + one.longest * outline.scores_bytes)
        attending += one.cached * (outline.repeated_bytes + grown)
        network = one.tokens * outline.network_bytes
        if one.at_once is None:
            widened = 4 if size < 4 else 0
            made = min(_LOGITS_AT_ONCE, one.tokens * outline.vocabulary)
            logits = made * (2 * size + 20 if one.compares else size + 4 + widened)
        else:
            made = one.at_once * outline.vocabulary
            # Decoding needs only the largest logit, not normalised ones.
            normalised = 0 if one.cached else 2 * 4 * min(made, max(_FLOAT_LOGITS, outline.vocabulary))
            logits = made * size + normalised
        # On a CPU, tensors of attention and network lie beside each other; the largest has a quarter of the bytes.
        kept = not on_gpu and size * made >= LARGE_BLOCK > network // 4
        reading = one.tokens * streams // 2 + logits
        most = max(most, attending + network + logits if kept else max(attending, network, reading))
    return most
