"""Memory of one worker, on its device and on the host: the same count for plans and for the check before a launch.

A worker takes its weights, a candidate's own, one batch of tokens in one layer, and where candidates are repaired a
layer's fit and the states of the tokens that it is fitted to. Bytes of weights are exact. The CUDA context, the
allocator's reserve and, beside a GPU, the process itself are not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from moevolve.evaluators.fitness.kinds import FITNESSES
from moevolve.kernels.expert_merge import staged_bytes
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.costs import FitOutline, SpaceCosts
from moevolve.search.running.plan.counts import TokenCounts
from moevolve.workers.contract.capacity import MemoryItem, NeededMemory, WorkerMemory
from moevolve.workers.contract.messages import ROUND
from moevolve.workers.contract.settings import ExpertOffload
from moevolve.workers.methods.repair.edit import RepairSettings
from moevolve.workers.methods.repair.inputs import inputs_bytes
from moevolve.workers.methods.repair.ridge import fit_bytes
from moevolve.workers.methods.shared.passes import BATCH_COLUMNS
from moevolve.workers.profiling.outline import ModelOutline

# Number of logits that are computed at once when running text is scored (`workers/engine/texts.py`), with their
# exponentials in float32; if two models are compared for both, with two float32 copies of each and their difference.
_LOGITS_AT_ONCE = 1 << 24
# Assumed number of tokens in a pass for each position whose logits are read, where prompts are followed by answers.
_TOKENS_PER_LOGITS = 32
# Bytes of a worker's process that has loaded torch, transformers and Ray, and no model.
_PROCESS = 600 << 20
# Smaller `engine.batch_tokens` that a refusal suggests.
_SMALL_BATCH = 1024


def launch_memory(config: RunConfig, outline: ModelOutline, costs: SpaceCosts, tokens: TokenCounts) -> NeededMemory:
    """Count the memory that a worker must find when it starts; for arguments see `worker_memory`."""
    memory = worker_memory(config, outline, costs, tokens, config.model.expert_offload)
    smaller = tuple(_smaller(config, outline, costs, tokens))
    return NeededMemory(memory, config.workers.num_gpus, smaller)


def worker_memory(
    config: RunConfig, outline: ModelOutline, costs: SpaceCosts, tokens: TokenCounts, place: ExpertOffload
) -> WorkerMemory:
    """Count the memory of a search's worker.

    Args:
        config, outline, costs: The run, its model, and the costs of its candidates.
        tokens: Numbers of tokens in the run's data.
        place: Place of the original experts, whatever the run says.
    """
    return _Count(config, outline, costs, tokens, place).memory()


class _Count:
    """Counts the memory of a worker that has the original experts in one place; see `worker_memory`."""

    def __init__(
        self, config: RunConfig, outline: ModelOutline, costs: SpaceCosts, tokens: TokenCounts, place: ExpertOffload
    ) -> None:
        self._config, self._outline, self._costs, self._place = config, outline, costs, place
        self._on_gpu, self._tokens = config.on_gpu, tokens
        self._batch_tokens = max(config.engine.batch_tokens, tokens.longest or 0)
        self._fitnesses = [FITNESSES[section.task().fitness] for section in config.tasks]
        # Where long answers are decoded, every pass needs all of a candidate's layers; else layers follow one another.
        self._elsewhere = place != "device" and outline.experts_bytes > 0
        self._by_layer = self._elsewhere and not any(section.decodes for section in config.tasks)
        repairs = [phase.repair for phase in config.phases if phase.repair is not None]
        self._repairs = [
            (each, min(each.tokens, (1 + each.continuations) * (tokens.fitted or sys.maxsize))) for each in repairs
        ]
        self._writes = any(each.continuations for each in repairs)
        self._fitted = max((tokens for _, tokens in self._repairs), default=0)

    def memory(self) -> WorkerMemory:
        outline, compared = self._outline, any(each.compares for each in self._fitnesses)
        outside, waiting = self._outside()
        originals, on_host, own = self._experts()
        # Keys and values of the batch, and of the rows in which its answers are decoded on.
        generates = any(each.reads not in ("texts", "choices") for each in self._fitnesses) or self._writes
        cache = 2 * self._batch_tokens * outline.cache_bytes * (generates and not self._by_layer)
        batch, fit = self._batch(), self._fit()
        beyond = max(0, self._calibrating() - batch)
        # An edited layer replaces the unedited one, whose experts are then read one by one.
        spare = max(0, originals - own) if self._by_layer else 0
        own = max(0, own - originals) if self._by_layer else own
        # A candidate is fitted before it is scored, and what a process has freed goes back to the system in between.
        fit -= spare + cache + batch + beyond
        needed = (
            MemoryItem("keys and values of a batch", cache, 0),
            MemoryItem("activations and logits of a batch (estimate)", batch, 0),
            MemoryItem("what merging or calibrating takes beyond these", beyond, self._costs.calibration_host_bytes()),
            MemoryItem("what a layer's fit, with states of its tokens, takes beyond these", max(0, fit), 0),
        )
        # A round's texts wait for the next layer; the unedited model's last states are compared with.
        scored = self._states(self._tokens.scored) * (ROUND * self._by_layer + compared)
        items = (
            MemoryItem("weights outside of experts", outside, waiting),
            MemoryItem("original experts, or one layer's", originals, on_host),
            MemoryItem("a candidate's own weights", own, 0),
            *needed,
            MemoryItem("states of the texts that are scored", 0, scored),
            MemoryItem("states of all layers to fit to", 0, (outline.layers + 1) * self._states(self._fitted)),
            MemoryItem("the process and its libraries", 0 if self._on_gpu else _PROCESS, 0),
        )
        return WorkerMemory(items, self._loading(), sum(item.device for item in needed))

    def _outside(self) -> tuple[int, int]:
        """Weights outside of experts on the device, and those of linear layers that wait on the host beside a GPU."""
        outline = self._outline
        outside = outline.weight_bytes - outline.experts_bytes
        if not (self._elsewhere and self._on_gpu):
            return outside, 0
        # The device has all, or one layer's.
        sizes = [sum(layer) for layer in outline.linear_bytes]
        elsewhere = outline.pinned_linear_bytes if self._place == "host" else sum(sizes)
        return outside - (sum(sizes) - max(sizes)) * self._by_layer, elsewhere

    def _experts(self) -> tuple[int, int, int]:
        """Original experts on the device, those on the host, and a candidate's own weights: of all layers or of one.

        The host has the layer that was read last from the disk. Unrepaired layers of a candidate that is decoded take
        turns in the room of the originals.
        """
        outline, kinds = self._outline, [phase.kind for phase in self._config.phases]
        own = self._costs.buffer_bytes(kinds, self._elsewhere, bool(self._repairs))
        if not self._elsewhere:
            return outline.experts_bytes, 0, own
        layers = len(outline.facts.moe_layers)
        layer = outline.experts_bytes // layers
        every = outline.pinned_bytes if self._on_gpu else outline.experts_bytes
        own = own // layers if self._by_layer else own if self._repairs else 0
        if self._by_layer and self._place == "disk" and not self._on_gpu:
            return 0, layer, own  # the unedited model's layer is given up before a candidate's
        return layer, every if self._place == "host" else layer, own

    def _batch(self) -> int:
        """One layer's activations, or the logits with the last layer's states."""
        outline, size = self._outline, self._outline.facts.dtype_bytes
        longest = self._tokens.longest or self._batch_tokens
        # On a CPU attention has our own code, which keeps few scores at once.
        layer = self._batch_tokens * (outline.layer_bytes + longest * outline.scores_bytes * self._on_gpu)
        at_once = min(_LOGITS_AT_ONCE, self._batch_tokens * outline.vocabulary)
        compared = any(each.compares for each in self._fitnesses)
        logits = max(
            at_once * (2 * size + 20 if compared else size + 8),
            self._batch_tokens // _TOKENS_PER_LOGITS * outline.vocabulary * size,
        )
        return max(layer, 2 * self._states(self._batch_tokens) + logits)

    def _calibrating(self) -> int:
        """Merging experts, between passes or layers, or calibrating, between batches."""
        outline = self._outline
        merging = 0
        if outline.expert_bytes and any(phase.kind == "merge" for phase in self._config.phases):
            count, size = outline.facts.experts, outline.facts.dtype_bytes
            merging = staged_bytes(count, count, max(outline.expert_bytes[0]) // (count * size), size)
        return max(merging, self._costs.calibration_bytes(self._tokens.longest or self._batch_tokens))

    def _fit(self) -> int:
        """The largest fit of a layer, or running a layer to fit to: its output, what is recorded, and a batch."""
        most = 0
        for settings, tokens in self._repairs:
            running = 2 * self._states(tokens) + min(tokens, BATCH_COLUMNS) * self._outline.layer_bytes
            fits = [fit for layer in self._costs.fitted_maps() for fit in layer]
            most = max(most, running, *(_fit_bytes(settings, fit, tokens, self._outline) for fit in fits))
        return most

    def _states(self, tokens: int) -> int:
        return tokens * self._outline.hidden * self._outline.facts.dtype_bytes

    def _loading(self) -> int:
        """Peak of host memory: all weights pass through it; those that stay are copied to be pinned, by layer."""
        if not self._on_gpu or self._config.model.device_map is not None:
            return 0
        outline = self._outline
        pinning = outline.pinned_bytes + max(map(sum, outline.expert_bytes), default=0)
        pinning += (outline.pinned_linear_bytes - sum(map(sum, outline.linear_bytes))) * self._elsewhere
        experts = {"device": outline.experts_bytes, "host": pinning, "disk": 0}
        return outline.weight_bytes - outline.experts_bytes + experts[self._place]


def _fit_bytes(settings: RepairSettings, fit: FitOutline, tokens: int, outline: ModelOutline) -> int:
    """Bytes of a fit with its features, and of the states before and behind the layer.

    Of the states there are the network's input and the stream behind it, also in float32, and the residual.
    """
    hidden, size = outline.hidden, outline.facts.dtype_bytes
    features = int(size * tokens * (fit.density * (fit.width - fit.dense) + fit.dense))
    own = int(fit.density * tokens)
    fitting = fit_bytes(fit.width, own, fit.block, tokens, hidden, len(settings.ridge_lambdas))
    if settings.input_rounds:
        fitting = max(fitting, inputs_bytes(_rows(fit, outline), own, hidden))
    return features + fitting + tokens * hidden * (2 * size + (4 if size < 4 else 0) + 4)


def _rows(fit: FitOutline, outline: ModelOutline) -> int:
    """Return the rows of the gate and up projections of an expert or a dense network."""
    facts = outline.facts
    parameters = facts.neuron_parameters if facts.dense is None else facts.dense.neuron_parameters
    return fit.block * (parameters // outline.hidden - 1)


def _smaller(
    config: RunConfig, outline: ModelOutline, costs: SpaceCosts, tokens: TokenCounts
) -> Iterator[tuple[str, WorkerMemory]]:
    """Yield settings with which a worker takes less, and what it takes then; those that slow it least come first."""
    own, batch = config.model.expert_offload, config.engine.batch_tokens
    places: list[ExpertOffload] = [own]
    if outline.experts_bytes:
        places += ["host"] if own == "device" and config.on_gpu else []
        places += ["disk"] if own != "disk" else []
    for place in places:
        for size in dict.fromkeys((batch, min(batch, _SMALL_BATCH))):
            names = [f"--set model.expert_offload={place}"] if place != own else []
            names += [f"--set engine.batch_tokens={size}"] if size != batch else []
            engine = replace(config.engine, batch_tokens=size)
            changed = config.model_copy(update={"engine": engine})
            if names:
                yield " ".join(names), worker_memory(changed, outline, costs, tokens, place)
