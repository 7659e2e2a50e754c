"""Estimates of searches as users ask for them, and pilots: how long a search takes, by a few of its individuals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import Split
from moevolve.search.config.files import as_override, as_run_config, find_model, override_lines
from moevolve.search.config.run import RunConfig
from moevolve.search.requests.planning import EstimateRequest
from moevolve.search.running.plan.estimate import estimate
from moevolve.search.running.plan.records import Estimate, Pilot
from moevolve.search.running.plan.workload import Prompts
from moevolve.search.running.weights import resolved_model_path

if TYPE_CHECKING:
    from moevolve.search.running.execute import PoolFactory


def estimate_run(request: EstimateRequest, on_stage: Callable[[str], None] = lambda _: None) -> Estimate:
    """See `EstimateRequest`; `on_stage` is told what the pilot is doing."""
    config = _config(request)
    found = estimate(config, _prompts(request))
    if request.pilot is None:
        return found
    return replace(found, pilot=run_pilot(config, found, request.pilot, on_stage=on_stage))


def run_pilot(
    config: RunConfig,
    planned: Estimate,
    individuals: int,
    make_pool: PoolFactory | None = None,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Pilot:
    """Measure a few individuals, and scale to the whole search; see `set_up` and `measure` for the errors."""
    # Plans without a pilot don't import Ray.
    from moevolve.search.running.launch import set_up_new
    from moevolve.search.running.plan.pilot import measure

    found = measure(set_up_new(config), individuals, make_pool, on_stage=on_stage)
    total = sum(count.different * found.of(count.kind) for count in planned.phases) / found.workers
    tokens = Counter[Split]()
    for split in planned.splits:
        tokens[split.split] += split.tokens
    total += found.final(planned.phases[-1].kind, planned.ranked, planned.tested, tokens)
    return Pilot(found.individuals, found.workers, found.seconds, total / 3600)


def _config(request: EstimateRequest) -> RunConfig:
    """The run with the model that the request names."""
    changes = list(override_lines(request.overrides))
    if request.model is not None:
        changes.append(as_override("model.path", resolved_model_path(find_model(request.model))))
    return as_run_config(request.config, changes)


def _prompts(request: EstimateRequest) -> Prompts | None:
    if request.prompt_tokens is not None:
        return Prompts(request.prompt_tokens, request.new_tokens, request.examples)
    for name, value in (("--new-tokens", request.new_tokens), ("--examples", request.examples)):
        if value is not None:
            raise UserError(f"{name} goes with --prompt-tokens: without it lengths are those of the tasks' data")
    return None
