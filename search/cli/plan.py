"""`plan`: what a search would take, before it is launched."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

import moevolve
from moevolve.search.cli._console import print_json
from moevolve.search.cli._options import DEFAULT_STORE, ConfigArgument, JsonOption, SetOption, StoreOption


def plan(
    config: ConfigArgument,
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
        typer.Option("--gpu", metavar="NAME,...", help="GPUs to estimate for; default: a100-80g,h100,h200."),
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
    if measured is not None and len(models or ()) > 1:
        raise moevolve.UserError("--measured goes with one model, the one that the search was launched with")
    estimates = [
        moevolve.estimate(
            config,
            model=model,
            keep=keep,
            gpus=gpu,
            cpu=device == "cpu",
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            examples=examples,
            utilisation=utilisation,
            overrides=overrides or (),
        )
        for model in models or (None,)
    ]
    beside = () if measured is None else moevolve.compare_measured(estimates[0], measured, store=store)
    if as_json:
        found = [moevolve.as_data(each) | {"measured": moevolve.as_data(beside)} for each in estimates]
        print_json(found[0] if len(found) == 1 else found)
        return
    # Not sooner: it loads what estimates are made with.
    from moevolve.search.cli.output.plan import print_plan, print_summary

    if len(estimates) > 1:
        print_summary(estimates)
    else:
        print_plan(estimates[0], beside)
