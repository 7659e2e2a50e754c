"""Estimates of searches as users ask for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import as_override, as_run_config, find_model, override_lines
from moevolve.search.config.run import RunConfig
from moevolve.search.estimate.devices import gpus_for
from moevolve.search.estimate.estimate import estimate
from moevolve.search.estimate.report import Estimate
from moevolve.search.estimate.workload import Prompts
from moevolve.search.requests.planning import EstimateRequest
from moevolve.search.running.weights import resolved_model_path
from moevolve.workers.profiling.outline import outline_model


def estimate_run(request: EstimateRequest, on_stage: Callable[[str], None] = lambda _: None) -> Estimate:
    """See `EstimateRequest`; `on_stage` is told what the pilot is doing."""
    config = _config(request)
    found = estimate(config, gpus_for(config, request.gpus), _prompts(request), request.utilisation)
    if request.pilot is None:
        return found
    from moevolve.search.operations.pilot import run_pilot

    return replace(found, pilot=run_pilot(config, found, request.pilot, on_stage=on_stage))


def _config(request: EstimateRequest) -> RunConfig:
    """The run with the model and the share of experts that the request changes."""
    changes = list(override_lines(request.overrides))
    if request.model is not None:
        changes.append(as_override("model.path", resolved_model_path(find_model(request.model))))
    config = as_run_config(request.config, changes)
    if request.keep is None:
        return config
    experts = outline_model(config.model).facts.experts
    if not experts:
        raise UserError(f"--keep: {config.model.path} has no experts; leave it out")
    return as_run_config(request.config, (*changes, f"genome.experts={max(1, round(request.keep * experts))}"))


def _prompts(request: EstimateRequest) -> Prompts | None:
    if request.prompt_tokens is not None:
        return Prompts(request.prompt_tokens, request.new_tokens, request.examples)
    for name, value in (("--new-tokens", request.new_tokens), ("--examples", request.examples)):
        if value is not None:
            raise UserError(f"{name} goes with --prompt-tokens: without it lengths are those of the tasks' data")
    return None
