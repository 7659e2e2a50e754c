"""Estimates a search from its configuration, without loading weights."""

from __future__ import annotations

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.registry import costs_of
from moevolve.search.loop.setup import needs_calibration
from moevolve.search.running.plan.counts import PhaseCount, TokenCounts, described_as, final_models, model_sizes
from moevolve.search.running.plan.memory import worker_memory
from moevolve.search.running.plan.records import Estimate
from moevolve.search.running.plan.workload import Prompts, WorkloadReader
from moevolve.search.strategies.schedule import rounds_notes
from moevolve.workers.contract.settings import ExpertOffload
from moevolve.workers.profiling.outline import ModelOutline, outline_model


def estimate(
    config: RunConfig,
    prompts: Prompts | None = None,
    outline: ModelOutline | None = None,
    without_data: bool = False,
) -> Estimate:
    """Estimate a run, for which its model's weights needn't exist.

    Args:
        config: The run.
        prompts: Lengths to assume instead of reading the tasks' data.
        outline: Outline of the run's model, if it is there already.
        without_data: Where the tasks' data can't be read, count memory for texts as long as a batch; a remark says so.

    Raises:
        UserError: The configuration asks for something that can't be had, or there are neither data nor given lengths
            of prompts; the message names the field.
    """
    outline = outline or outline_model(config.model)
    space = config.space(outline.facts)
    costs = costs_of(space, outline)
    reader = WorkloadReader(config, prompts, needs_calibration(space))
    try:
        searched, remarks = reader.splits("search"), reader.set_aside()
        ranked = reader.splits("dev") if config.final.rerank else ()
        tested = (*reader.splits("test"), *reader.held_out()) if config.final.test else ()
        splits, fitted = (*searched, *ranked, *tested), reader.calibration_tokens()
    except UserError as error:
        if not without_data:
            raise
        splits, fitted, remarks = (), None, (f"memory is that of texts as long as a batch: {error}",)
    for split in splits:
        if prompts is not None and split.longest > outline.positions:
            raise UserError(
                f"task {split.task}, split {split.split}: prompts and answers reach {split.longest} tokens, the model "
                f"has {outline.positions} positions; set engine.max_prompt_tokens, or give fewer"
            )
    busy, least = config.window, config.workers.least
    idle = [f"the run's window keeps {busy} of {least} workers busy"] if busy < least else []
    longest, scored = max((split.longest for split in splits), default=None), sum(split.tokens for split in splits)
    tokens = TokenCounts(longest, scored, fitted)
    places: list[ExpertOffload] = ["device"]
    if outline.experts_bytes:
        places.append("host" if config.model.expert_offload == "device" else config.model.expert_offload)
    final = final_models(config)
    return Estimate(
        name=config.name,
        model=config.model.path,
        family=outline.facts.family,
        dtype=outline.facts.dtype,
        expert_offload=config.model.expert_offload,
        workers=config.workers.count,
        on_gpu=config.on_gpu,
        sizes=model_sizes(outline, costs, described_as(config.phases)),
        memory={place: worker_memory(config, outline, costs, tokens, place) for place in places},
        splits=splits,
        phases=tuple(PhaseCount(phase.kind, phase.evaluations) for phase in config.phases),
        ranked=len(final["dev"]),
        tested=len(final["test"]),
        remarks=(*remarks, *rounds_notes(config), *idle),
    )
