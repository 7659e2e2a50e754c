"""From a configuration to everything that a search is made of but weights."""

from __future__ import annotations

from moevolve.evaluators.types import SPLITS, PreparedSplit, Split
from moevolve.search.config.run import RunConfig, TaskSection
from moevolve.search.genomes.registry import make_space
from moevolve.search.loop.setup import SearchSetup, needs_calibration
from moevolve.search.running.describe import Call, ModelDescription, call_here, check_repairs, describe_search
from moevolve.search.strategies.phased import make_strategy
from moevolve.search.strategies.schedule import make_schedule


def set_up(config: RunConfig, search_id: str, call: Call = call_here) -> SearchSetup:
    """Check a configuration against its model and tasks, and prepare everything but weights. The store isn't touched.

    Args:
        config: The configuration of the search.
        search_id: Id of the search in the store.
        call: Calls what imports torch.

    Raises:
        UserError: The model or a task can't be had, or a setting doesn't suit them; the message names the field.
    """
    description: ModelDescription = call(describe_search, config)
    config = config.model_copy(update={"model": description.model})
    space = make_space(config.genome, description.facts, config.phases)
    calibrating = needs_calibration(space)
    wanted = {"calibration": calibrating, "search": True, "dev": config.final.rerank, "test": config.final.test}
    names = [name for name in SPLITS if wanted[name]]
    prepared = {name: tuple(task.prepared(name, None, calibrating) for task in config.tasks) for name in names}
    ranked = [name for name in names if name in ("search", "dev") and config.tie_break == "agreement"]
    ties: dict[Split, tuple[PreparedSplit, ...]] = {
        name: tuple(task.prepared(name, "agreement", calibrating) for task in config.tasks) for name in ranked
    }
    schedule = make_schedule(config)
    # A strategy has state and a calibrated space, so each run makes its own. This one only reports wrong settings.
    make_strategy(config, space, schedule)
    held_out = tuple(TaskSection(name=name).prepared("test") for name in config.final.held_out)
    if not description.repairs_fit:
        call(check_repairs, config, prepared["calibration"])
    return SearchSetup(
        config, search_id, description.facts, space, schedule, prepared, ties, held_out, description.needed
    )
