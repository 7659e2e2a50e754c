"""`plan`: what a search would take, before it is launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from moevolve.evaluators.errors import UserError
from moevolve.search.cli._console import DEFAULT_STORE, JsonOption, StoreOption, print_json
from moevolve.search.cli._plan_output import plan_json, print_plan, print_summary
from moevolve.search.cli.searches import SetOption, as_override
from moevolve.search.config.files import load_run_config

if TYPE_CHECKING:
    from moevolve.search.config.run import RunConfig
    from moevolve.search.estimate.devices import Device, Utilisation
    from moevolve.search.estimate.estimate import Estimate
    from moevolve.search.estimate.measured import Comparison
    from moevolve.search.estimate.workload import Prompts

DEFAULT_GPUS = "a100-80g,h100,h200"


def register(app: typer.Typer) -> None:
    app.command()(plan)


def plan(
    config: Annotated[Path, typer.Argument(help="Run configuration (YAML).")],
    overrides: SetOption = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model", metavar="DIR|NAME", help="A config in the place of model.path's; several are compared."
        ),
    ] = None,
    keep: Annotated[
        float | None, typer.Option("--keep", help="Share of the experts that is retained, for genome.experts (0 to 1).")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME,...", help=f"GPUs to estimate for; default: {DEFAULT_GPUS}."),
    ] = None,
    device: Annotated[
        Literal["cpu"] | None, typer.Option("--device", help="Estimate for this machine's CPU, which is measured.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", min=1, help="Of every prompt, in the place of the tasks' data.")
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option("--new-tokens", min=1, help="Of every answer; default: the task's max_new_tokens.")
    ] = None,
    examples: Annotated[
        int | None, typer.Option("--examples", min=1, help="Of every split; default: what the tasks' files say.")
    ] = None,
    utilisation: Annotated[
        float | None, typer.Option("--utilisation", help="Share of a GPU's operations/s that passes get (0 to 1).")
    ] = None,
    measured: Annotated[
        str | None, typer.Option("--measured", metavar="SEARCH", help="Compare with this search of the store.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Estimate a search's memory, operations and hours from the model's config. No weights are loaded.

    Model facts, memory of weights and operations are counted; seconds are estimates.
    """
    runs = [_settings(config, overrides or (), model, keep) for model in models or (None,)]
    gpus, cpu = _devices(runs[0], gpu, device == "cpu")
    prompts, assumed = _prompts(prompt_tokens, new_tokens, examples), _utilisation(utilisation)

    from moevolve.search.estimate.estimate import EstimateRequest, estimate

    if measured is not None and len(runs) > 1:
        raise UserError("--measured goes with one model, the one that the search was launched with")
    reports = [estimate(EstimateRequest(settings, gpus, cpu, prompts, assumed)) for settings in runs]
    comparisons = () if measured is None else _compare(reports[0], store, measured)
    if as_json:
        found = [plan_json(report, comparisons) for report in reports]
        print_json(found[0] if len(found) == 1 else found)
    elif len(reports) > 1:
        print_summary(reports)
    else:
        print_plan(reports[0], comparisons)


def _settings(config: Path, overrides: Sequence[str], model: str | None, keep: float | None) -> RunConfig:
    """The run, with another model, and as many of its experts as are to be kept."""
    changes = [*overrides, *(() if model is None else (as_override("model.path", _model_path(model)),))]
    settings = load_run_config(config, tuple(changes))
    if keep is None:
        return settings
    if not 0 < keep <= 1:
        raise UserError(f"--keep {keep}: give a share above 0, and 1 at most")

    from moevolve.workers.profiling.outline import outline_model

    experts = outline_model(settings.model.to_worker()).facts.experts
    if not experts:
        raise UserError(f"--keep: {settings.model.path} has no experts; leave it out")
    return load_run_config(config, (*changes, f"genome.experts={max(1, round(keep * experts))}"))


def _model_path(name: str) -> str:
    from moevolve.search.config.models import find_model

    found = find_model(name)
    return str(Path(found).resolve()) if Path(found).exists() else found


def _prompts(prompt_tokens: int | None, new_tokens: int | None, examples: int | None) -> Prompts | None:
    from moevolve.search.estimate.workload import Prompts

    if prompt_tokens is not None:
        return Prompts(prompt_tokens, new_tokens, examples)
    for name, value in (("--new-tokens", new_tokens), ("--examples", examples)):
        if value is not None:
            raise UserError(f"{name} goes with --prompt-tokens: without it lengths are those of the tasks' data")
    return None


def _devices(settings: RunConfig, gpu: str | None, cpu: bool) -> tuple[tuple[Device, ...], bool]:
    """The GPUs to estimate for, and whether to estimate for this CPU: what was asked for, else what suits the run."""
    from moevolve.search.estimate.devices import find_gpus

    if gpu is None and not cpu:
        cpu = settings.model.device == "cpu" or (settings.model.device == "auto" and not settings.workers.num_gpus)
        gpu = None if cpu else DEFAULT_GPUS
    return (() if gpu is None else find_gpus(gpu)), cpu


def _utilisation(compute: float | None) -> Utilisation:
    from moevolve.search.estimate.devices import GPU_UTILISATION

    if compute is None:
        return GPU_UTILISATION
    if not 0 < compute <= 1:
        raise UserError(f"--utilisation {compute}: give a share above 0, and 1 at most")
    return replace(GPU_UTILISATION, compute=compute)


def _compare(report: Estimate, store: str, search: str) -> tuple[Comparison, ...]:
    from moevolve.search.estimate.measured import compare
    from moevolve.store.repository import Store

    with Store.open(store, create=False) as opened:
        return compare(report, opened, search)
