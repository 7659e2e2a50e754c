"""From a configuration to everything that a search is made of but weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import SPLITS, PreparedSplit, Split
from moevolve.search.config.run import RunConfig, TaskSection
from moevolve.search.estimate.memory import launch_memory
from moevolve.search.estimate.repairs import repair_works
from moevolve.search.genomes.contract.base import GenomeSpace
from moevolve.search.genomes.contract.costs import GenomeCosts
from moevolve.search.genomes.registry import KINDS, check_baselines, costs_of, make_space
from moevolve.search.loop.setup import SearchSetup, needs_calibration
from moevolve.search.strategies.phased import make_strategy
from moevolve.search.strategies.schedule import make_schedule
from moevolve.workers.checkpoints.fingerprint import pinned_revision
from moevolve.workers.checkpoints.loading import load_tokenizer, own_dtype
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.engine.chat import chat_template
from moevolve.workers.methods.repair.edit import RepairRecipe
from moevolve.workers.model.describe import describe_model
from moevolve.workers.profiling.outline import ModelOutline, outline_model
from moevolve.workers.profiling.passes import PromptMeter


def set_up(config: RunConfig, search_id: str) -> SearchSetup:
    """Check a configuration against its model and tasks, and prepare everything but weights. The store isn't touched.

    Raises:
        UserError: something in the configuration can't be had; the message names the field.
    """
    config = config.model_copy(update={"model": pinned(config.model)})
    facts = describe_model(config.model)
    if config.engine.chat_template not in ("auto", "none"):
        # The workers render prompts; a name that the tokenizer doesn't have is said before any of them starts.
        chat_template(load_tokenizer(config.model), config.engine)
    space = make_space(config.genome, facts, config.phases)
    calibrating = needs_calibration(space)
    wanted = {"calibration": calibrating, "search": True, "dev": config.final.rerank, "test": config.final.test}
    names = [name for name in SPLITS if wanted[name]]
    prepared = {name: tuple(task.prepared(name, None, calibrating) for task in config.tasks) for name in names}
    ranked = [name for name in names if name in ("search", "dev") and config.tie_break == "agreement"]
    ties: dict[Split, tuple[PreparedSplit, ...]] = {
        name: tuple(task.prepared(name, "agreement", calibrating) for task in config.tasks) for name in ranked
    }
    _check_phases(config, space)
    schedule = make_schedule(config)
    # A strategy has state and a calibrated space, so each run makes its own; what is wrong with it is said here.
    make_strategy(config, space, schedule)
    held_out = tuple(TaskSection(name=name).prepared("test") for name in config.final.held_out)
    setup = SearchSetup(config, search_id, facts, space, schedule, prepared, ties, held_out)
    outline = outline_model(config.model)
    costs = costs_of(space, outline)
    _check_fits(setup, outline, costs)
    return replace(setup, needed=launch_memory(config, outline, costs, on_gpu=config.workers.num_gpus > 0))


def pinned(model: ModelConfig) -> ModelConfig:
    """The same model at the commit that its revision stands for now, so that every worker loads what was described.

    With it goes the dtype that `auto` stands for there.

    Raises:
        UserError: the checkpoint or its config can't be found.
    """
    model = replace(model, revision=pinned_revision(model))
    return replace(model, own_dtype=own_dtype(model))


def _check_phases(config: RunConfig, space: GenomeSpace[Any]) -> None:
    check_baselines(config.phases, space)
    for position, phase in enumerate(config.phases):
        if phase.kind not in space.phase_kinds:
            raise UserError(
                f"phases.{position}.kind: a {phase.kind} phase doesn't suit genome kind {config.genome.kind}; "
                f"use {' or '.join(space.phase_kinds)}"
            )
        if phase.repair is not None:
            _check_repair(phase.repair, f"phases.{position}.repair", space.kind)


def _check_fits(setup: SearchSetup, outline: ModelOutline, costs: GenomeCosts[Any]) -> None:
    """Refuse repairs whose fits wouldn't be made for lack of room."""
    config = setup.config
    if all(phase.repair is None for phase in config.phases):
        return
    if not any(work.fault for work in repair_works(config, costs, outline)):
        return
    # There may be fewer tokens than they ask for.
    meter = PromptMeter(config.model, config.engine)
    rows = sum(meter.most_tokens(split) for split in setup.prepared["calibration"])
    for work in repair_works(config, costs, outline, max(rows, 2)):
        if work.fault is not None:
            raise UserError(work.fault)


def _check_repair(recipe: RepairRecipe, where: str, kind: str) -> None:
    if not KINDS[kind].repairable:
        having = ", ".join(name for name, each in KINDS.items() if each.repairable)
        raise UserError(f"{where}: candidates of genome kind {kind} can't be repaired, those of {having} can")
    if recipe.neurons is not None and not KINDS[kind].recombinable:
        having = ", ".join(name for name, each in KINDS.items() if each.recombinable)
        raise UserError(
            f"{where}.neurons: only experts of a mixture can be filled with neurons of others, those of genome kind "
            f"{having}; leave it out"
        )
