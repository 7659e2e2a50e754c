"""`analyse`: what an individual's experts do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import moevolve
from moevolve.search.cli._console import output, print_json, print_table
from moevolve.search.cli._options import DEFAULT_STORE, IndividualArgument, JsonOption, ModelOption, StoreOption

if TYPE_CHECKING:
    from moevolve import Analysis


def analyse(
    individual: IndividualArgument,
    task: Annotated[str, typer.Option("--task", help="Whose prompts to run.")],
    split: Annotated[Literal["search", "dev", "test"], typer.Option("--split", help="Which split.")] = "dev",
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Stop after about so many tokens; default: all.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Write figures and analysis.json there.")
    ] = None,
    model: ModelOption = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Count which experts a task's prompts activate, with which weights and which together, before and after."""
    analysis = moevolve.analyse(individual, task, split=split, tokens=tokens, model=model, store=store)
    written = [] if out is None else moevolve.write_analysis(analysis, out)
    if as_json:
        print_json(analysis)
        return
    _print_layers(analysis)
    for path in written:
        output.print(f"wrote {path}", soft_wrap=True)


def _print_layers(analysis: Analysis) -> None:
    after, before = analysis.after, analysis.before
    title = f"{analysis.ref} on {analysis.task} ({analysis.split}): {after.tokens:,} tokens"
    if after.mixed:
        columns = [("linear layer", False), ("blocks", True), ("smallest", True), ("largest", True)]
        rows = [
            [layer.name, str(len(layer.blocks)), f"{layer.blocks.min():.3f}", f"{layer.blocks.max():.3f}"]
            for layer in after.mixed
        ]
        print_table(title, columns, rows)
        return
    title += f", {after.active:.2f} active experts per token"
    columns = [("layer", True), ("experts", True), ("unused", True), ("most used", False), ("evenly used as", True)]
    columns += [("neurons: expert", True), ("union", True)] if any(layer.neurons for layer in after.routed) else []
    columns += [("before", True)] if before is not None else []
    rows = []
    for position, layer in enumerate(after.routed):
        top = int(layer.counts.argmax())
        share = f"{100 * layer.counts[top] / after.tokens:.0f} % of tokens"
        name = layer.origins[top] if layer.origins else top
        row = [str(layer.layer), str(layer.experts), str(int((layer.counts == 0).sum())), f"{name}: {share}"]
        row.append(f"{layer.effective:.1f}")
        row += [f"{layer.neurons[0]}", f"{100 * layer.neurons[1] / layer.neurons[2]:.0f} %"] if layer.neurons else []
        row += [f"{before.routed[position].effective:.1f}"] if before is not None else []
        rows.append(row)
    print_table(title, columns, rows)
