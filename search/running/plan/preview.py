"""What a launch takes, estimated without loading the model.

Sizes and memory are counted on the code of `transformers`, whose import takes seconds and hundreds of megabytes. A
server, which stays small, has them counted in a child process.
"""

from __future__ import annotations

from dataclasses import dataclass

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.registry import costs_of
from moevolve.search.running.plan.counts import (
    ModelSize,
    PhaseCount,
    TokenCounts,
    described_as,
    final_models,
    model_sizes,
    phase_counts,
)
from moevolve.search.running.set_up import check_settings
from moevolve.workers.contract.capacity import WorkerMemory


@dataclass(frozen=True, slots=True)
class Preview:
    """What a search takes, estimated without weights and without asking the hub.

    Attributes:
        phases: Number of individuals of each phase, and the largest possible number of different ones.
        ranked: Number of individuals scored on `dev` at the end.
        tested: Number of models scored on `test` at the end, including the full one.
        sizes: Sizes of the full model and of a candidate of each kind of phase; empty if the model is on a hub.
        weight_bytes: Bytes of the full model's weights as a worker loads them.
        memory: Memory of one worker.
        notes: What the numbers don't count, or why they are missing, a line each.
    """

    phases: tuple[PhaseCount, ...]
    ranked: int
    tested: int
    sizes: tuple[ModelSize, ...] = ()
    weight_bytes: int | None = None
    memory: WorkerMemory | None = None
    notes: tuple[str, ...] = ()


def preview(config: RunConfig) -> Preview:
    """Preview a run in this process, which loads torch.

    Raises:
        UserError: The model is missing or doesn't suit the settings.
    """
    from moevolve.search.running.plan.estimate import estimate
    from moevolve.search.running.plan.memory import worker_memory
    from moevolve.workers.checkpoints.files import local_directory
    from moevolve.workers.profiling.outline import outline_model

    ranked, tested = (len(models) for models in final_models(config).values())
    if local_directory(config.model) is None:
        phases = tuple(PhaseCount(phase.kind, phase.evaluations, phase.evaluations) for phase in config.phases)
        return Preview(phases, ranked, tested)  # a hub id
    outline = outline_model(config.model)
    check_settings(config, outline.facts)
    costs = costs_of(config.space(outline.facts), outline)
    try:
        found = estimate(config, outline=outline)
        memory, notes = found.memory.get(config.model.expert_offload, found.memory["device"]), found.notes
    except UserError as error:  # `launch` may still download the data
        memory = worker_memory(config, outline, costs, TokenCounts(), config.model.expert_offload)
        notes = (f"memory is that of texts as long as a batch: {error}",)
    sizes, phases = model_sizes(outline, costs, described_as(config.phases)), phase_counts(config, costs)
    return Preview(phases, ranked, tested, sizes, outline.weight_bytes, memory, notes)
