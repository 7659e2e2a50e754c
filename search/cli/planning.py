"""Commands for who is about to search: what a search would take, and several of them side by side."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import moevolve
from moevolve.search.cli._options import AddressOption, ConfigArgument, JsonOption, NewStoreOption, SetOption
from moevolve.search.cli.output.console import INTERRUPTED, exit_with_message, print_json, stages
from moevolve.search.cli.output.progress import line_observer

if TYPE_CHECKING:
    from moevolve import Comparison, Observer
    from moevolve.search.compare.config import Cell


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
        typer.Option(
            "--gpu", metavar="NAME,...", help="GPUs to estimate for; default: a100-80g,h100,h200, none for CPU runs."
        ),
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
        float | None, typer.Option("--utilisation", help="Share of a GPU's peak FLOP/s that is assumed; default: 0.4.")
    ] = None,
    pilot: Annotated[
        int | None,
        typer.Option(
            "--pilot", metavar="N", min=1, help="Evaluate N individuals on this machine, and say how long all take."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a search takes before it is launched: memory, evaluations, FLOPs, and about how many hours.

    Nothing but the model's config.json is loaded, unless --pilot is given. Hours on GPUs are FLOPs divided by an
    assumed share of the peak FLOP/s; hours on this machine are measured by the pilot.
    """
    with exit_with_message("interrupted; nothing was stored", moevolve.PoolError), stages() as on_stage:
        estimates = [
            moevolve.estimate(
                config,
                model=model,
                keep=keep,
                gpus=gpu,
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
                examples=examples,
                utilisation=utilisation,
                pilot=pilot,
                overrides=overrides or (),
                on_stage=on_stage,
            )
            for model in models or (None,)
        ]
    if as_json:
        print_json(estimates[0] if len(estimates) == 1 else estimates)
        return
    # Not sooner: it loads what estimates are made with.
    from moevolve.search.cli.output.plan import print_plan, print_summary

    if len(estimates) > 1:
        print_summary(estimates)
    else:
        print_plan(estimates[0])


def compare(
    config: Annotated[Path, typer.Argument(help="Comparison (YAML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. base.workers.count=4."),
    ] = None,
    store: NewStoreOption = None,
    address: AddressOption = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Also write the rows to this CSV file.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Also write the tables to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run searches and baselines side by side and print one table. Ctrl-C leaves it resumable: run it again."""
    comparison = moevolve.load_comparison(config, store=store, address=address, overrides=overrides or ())
    for path in (csv, markdown):
        _check_target(path)
    hint = "run the same command again to go on"
    with exit_with_message(f"{INTERRUPTED}, {hint}", moevolve.PoolError, hint):
        rows = moevolve.compare(comparison, observer=_watch(comparison))
    # Not sooner: it loads what comparisons are made with.
    from moevolve.search.cli.output.comparison import print_tables, write_csv, write_markdown

    if csv is not None:
        write_csv(rows, csv)
    if markdown is not None:
        write_markdown(comparison.name, rows, markdown)
    if as_json:
        print_json(rows)
    else:
        print_tables(comparison.name, rows)


def _watch(comparison: Comparison) -> Callable[[int, Cell], Observer]:
    """A line per search: a comparison is a matter of hours, and its log is read afterwards."""
    total = len(comparison.cells)

    def observer(place: int, cell: Cell) -> Observer:
        return line_observer(f"[{place + 1}/{total}] {cell.config.name}", 2)

    return observer


def _check_target(path: Path | None) -> None:
    """Whether a file can be written there is better known before hours of searches than after."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise moevolve.UserError(f"{path}: the folder {path.parent} doesn't exist")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise moevolve.UserError(f"{path}: can't be written; give the path of a file")
