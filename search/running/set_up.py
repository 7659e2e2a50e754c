"""From a configuration to everything that a search is made of but weights.

What describes the model runs where torch is: in a process that loads the model later, or in one that has torch anyway.
A driver imports this module, so torch, and what imports it, is imported within the functions.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from moevolve.evaluators.errors import UserError, opening
from moevolve.evaluators.types import SCORED, SPLITS, PreparedSplit
from moevolve.search.config.run import RunConfig, TaskSection
from moevolve.search.genomes.registry import KINDS, check_baselines, costs_of
from moevolve.search.loop.setup import SearchSetup, needs_calibration
from moevolve.search.running.plan.counts import TokenCounts
from moevolve.search.strategies.phased import make_strategy
from moevolve.search.strategies.schedule import make_schedule
from moevolve.store.records import new_search_id
from moevolve.workers.checkpoints.stated import stated_model
from moevolve.workers.contract.capacity import NeededMemory
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.methods.repair.edit import RepairSettings

R = TypeVar("R")
_LOG = logging.getLogger(__name__)


class Call(Protocol):
    """Calls a function of a configuration, with further arguments, in a process that may import torch."""

    def __call__(self, function: Callable[..., R], config: RunConfig, *args: object) -> R: ...


def call_here(function: Callable[..., R], config: RunConfig, *args: object) -> R:
    """Call the function in this process."""
    return function(config, *args)


def describe_search(config: RunConfig) -> tuple[ModelConfig, ModelFacts]:
    """Describe the model of a search, and check the settings that depend on it.

    Returns:
        The configured model, with the commit and the dtype that its settings stand for now; and its facts.
    """
    from moevolve.workers.checkpoints.fingerprint import model_fingerprint
    from moevolve.workers.profiling.outline import outline_model

    config = config.model_copy(update={"model": pinned(config.model)})
    facts = replace(outline_model(config.model).facts, fingerprint=model_fingerprint(config.model))
    check_settings(config, facts)
    return config.model, facts


def check_settings(config: RunConfig, facts: ModelFacts) -> None:
    """Raise UserError for settings of a search that don't suit its model."""
    from moevolve.workers.checkpoints.loading import load_tokenizer
    from moevolve.workers.engine.chat import chat_template

    # Workers render the prompts; a tokenizer or template that can't be used is refused before any of them starts.
    chat_template(load_tokenizer(config.model), config.engine)
    space = config.space(facts)
    check_baselines(config.phases, space)
    for position, phase in enumerate(config.phases):
        if phase.repair is not None:
            _check_repair(phase.repair, f"phases.{position}.repair", space.kind, facts)
    # A strategy has state and a calibrated space, so each run makes its own. This one only reports wrong settings.
    make_strategy(config, space, make_schedule(config))


def needed_memory(
    config: RunConfig, calibration: Sequence[PreparedSplit], scored: Sequence[PreparedSplit]
) -> tuple[NeededMemory, tuple[str, ...]]:
    """Count the memory that a worker must find, and describe what `count_tokens` does; the model must be pinned."""
    from moevolve.search.running.plan.memory import launch_memory
    from moevolve.workers.profiling.outline import outline_model

    outline = outline_model(config.model)
    tokens, notes = count_tokens(config, calibration, scored)
    return launch_memory(config, outline, costs_of(config.space(outline.facts), outline), tokens), notes


def count_tokens(
    config: RunConfig, calibration: Sequence[PreparedSplit], scored: Sequence[PreparedSplit]
) -> tuple[TokenCounts, tuple[str, ...]]:
    """Count a run's tokens, and name the tasks whose prompts are cut for the model's context, which must be pinned.

    Raises:
        UserError: An answer doesn't fit into the context.
    """
    from moevolve.workers.profiling.prompts import PromptMeter

    meter = PromptMeter(config.model, config.engine)
    fitted, found = [meter.counts(split) for split in calibration], [meter.counts(split) for split in scored]
    cut: Counter[str] = Counter()
    prompts: Counter[str] = Counter()
    for split, counts in zip((*calibration, *scored), (*fitted, *found), strict=True):
        cut[split.task] += counts.cut
        prompts[split.task] += counts.prompts
    notes = tuple(
        f"task {task}: {cut[task]} of {rows} prompts lose their beginning, since the model's context is shorter than "
        "they are with their answers"
        for task, rows in prompts.items()
        if cut[task]
    )
    longest, tokens = max(each.longest for each in found), sum(each.tokens for each in found)
    return TokenCounts(longest, tokens, sum(each.tokens for each in fitted) if calibration else None), notes


def pinned(model: ModelConfig) -> ModelConfig:
    """Return the same model at the commit that its revision stands for now, with `own_dtype` filled in.

    So every worker loads the checkpoint that was described, even if a branch on the hub moves.
    """
    from moevolve.workers.checkpoints.fingerprint import pinned_revision
    from moevolve.workers.checkpoints.loading import own_dtype

    with opening(f"model {model.path}: it can't be read"):
        model = replace(model, revision=pinned_revision(model))
        return replace(model, own_dtype=own_dtype(model))


def _check_repair(settings: RepairSettings, where: str, kind: str, facts: ModelFacts) -> None:
    if facts.unrepairable is not None:
        raise UserError(
            f"{where}: candidates of a {facts.family} model can't be repaired: {facts.unrepairable}; leave repair out, "
            "or use preset: prune"
        )
    if not KINDS[kind].repairable:
        having = ", ".join(name for name, each in KINDS.items() if each.repairable)
        raise UserError(f"{where}: candidates of genome kind {kind} can't be repaired, those of {having} can")
    if settings.neurons and not KINDS[kind].recombinable:
        having = ", ".join(name for name, each in KINDS.items() if each.recombinable)
        raise UserError(
            f"{where}.neurons: only experts of a mixture can be filled with neurons of others, those of genome kind "
            f"{having}; leave it out"
        )


def with_changes(setup: SearchSetup, **changes: object) -> SearchSetup:
    """Return the same search, not recorded, with other settings that neither the model nor the tasks notice.

    These are `name`, `genome`, `phases`, `skip_phases_at`, `final` and `store`. Genomes and phases must be of the same
    kinds and need no more memory. Splits that `final` asks for must have been prepared.
    """
    config = setup.config.model_copy(update=changes)
    space, schedule = config.space(setup.facts), make_schedule(config)
    held_out = setup.held_out if config.final.held_out else ()
    return replace(setup, config=config, search_id=new_search_id(), space=space, schedule=schedule, held_out=held_out)


def refuse_wrong(config: RunConfig) -> None:
    """Raise UserError for tasks that can't be read, and for a genome that the model's config.json rules out.

    It takes no time, unlike what needs torch.
    """
    for section in (*config.tasks, *(TaskSection(name=name) for name in config.final.held_out)):
        section.task()
    stated = stated_model(config.model) if config.workers.cluster is None else None  # whose nodes have other folders
    if stated is not None:
        config.genome.check_experts(stated.family, stated.experts)


def set_up(config: RunConfig, search_id: str, call: Call = call_here) -> SearchSetup:
    """Check a configuration against its model and tasks, and prepare everything but weights. The store isn't touched.

    Args:
        config: The configuration of the search.
        search_id: Id of the search in the store.
        call: Calls what imports torch.

    Raises:
        UserError: The model or a task can't be had, or a setting doesn't suit them; the message names the field.
    """
    refuse_wrong(config)  # at once, without waiting for torch
    model, facts = call(describe_search, config)
    config = config.model_copy(update={"model": model})
    space = config.space(facts)
    calibrating = needs_calibration(space)
    wanted = {"calibration": calibrating, "search": True, "dev": config.final.rerank, "test": config.final.test}
    names = [name for name in SPLITS if wanted[name]]
    found = [task.prepared_splits(names, calibrating) for task in config.tasks]
    prepared = {name: tuple(splits[name] for splits in found) for name in names}
    held_out = tuple(TaskSection(name=name).prepared("test") for name in config.final.held_out)
    scored = (*(split for name in SCORED for split in prepared.get(name, ())), *held_out)
    needed, notes = call(needed_memory, config, prepared.get("calibration", ()), scored)
    for note in notes:
        _LOG.warning("%s", note)
    schedule = make_schedule(config)
    return SearchSetup(config, search_id, facts, space, schedule, prepared, held_out, needed)
