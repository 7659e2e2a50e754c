"""Commands that list searches, individuals, lineages and tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

import moevolve
from moevolve.search.cli._requests import DEFAULT_STORE, CsvOption, JsonOption, StoreOption, option, takes
from moevolve.search.cli.output.console import output, plain, print_csv, print_json, print_table
from moevolve.search.cli.output.contrast import print_contrast
from moevolve.search.cli.output.effects import print_effects
from moevolve.search.cli.output.genome import print_genome
from moevolve.search.genomes.registry import KINDS, part_counts, part_names
from moevolve.search.requests.searches import (
    BestRequest,
    ContrastRequest,
    EffectsRequest,
    GenomeRequest,
    LabelRequest,
    LineageRequest,
    ParetoRequest,
    SearchesRequest,
    ShowRequest,
)
from moevolve.search.text import flop_count, memory_size, parameter_count, percent
from moevolve.store.lineage import to_dot

if TYPE_CHECKING:
    from moevolve import BestRow, IndividualDetail, LineageGraph, SearchSummary
    from moevolve.store.pareto import Mark
    from moevolve.store.records import IndividualRecord


@takes(SearchesRequest)
def searches(
    request: SearchesRequest,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    found = moevolve.ask(store, request)
    if as_json or as_csv:
        (print_json if as_json else print_csv)(found)
        return
    noted = any(row.search.tags or row.search.note for row in found)
    columns = [
        ("search", False),
        ("status", False),
        ("genome", False),
        ("tasks", False),
        ("individuals", True),
        ("failed", True),
        ("best on search", True),
        ("winner's dev", True),
        ("test", True),
        *([("tags and note", False)] if noted else []),
        ("created", False),
    ]
    rows = [
        [
            row.search.name,
            row.search.status + (f" ({reason})" if (reason := _reason(row)) else ""),
            row.search.genome_kind,
            ", ".join(row.tasks),
            str(row.individuals),
            str(row.failed),
            *map(percent, (row.best_fitness, row.dev, row.test)),
            *(["\n".join(filter(None, (" ".join(row.search.tags), row.search.note)))] if noted else []),
            f"{row.search.created_at:%Y-%m-%d %H:%M}" if row.search.created_at else "",
        ]
        for row in found
    ]
    print_table(None, columns, rows)


def _reason(row: SearchSummary) -> str | None:
    return "its driver is gone: resume it" if row.is_orphaned else row.search.status_reason


@takes(LabelRequest)
def label(request: LabelRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    found = moevolve.ask(store, request)
    if as_json:
        print_json(found)
        return
    told = [f"tags: {' '.join(found.tags) or 'none'}", f"note: {found.note or 'none'}"]
    output.print("\n".join([*told, *(["archived"] if found.archived else [])]), soft_wrap=True)


@takes(ContrastRequest)
def contrast(request: ContrastRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    (print_json if as_json else print_contrast)(moevolve.ask(store, request))


@takes(EffectsRequest)
def effects(request: EffectsRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    (print_json if as_json else print_effects)(moevolve.ask(store, request))


@takes(BestRequest)
def best(
    request: BestRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False, as_csv: CsvOption = False
) -> None:
    found = moevolve.ask(store, request)
    if as_json or as_csv:
        (print_json if as_json else print_csv)(found)
        return
    columns = [
        ("individual", False),
        ("task", False),
        ("search", True),
        ("dev", True),
        ("test", True),
        (part_names({row.genome_kind for row in found} or KINDS), True),
        ("active", True),
        ("parameters", True),
        ("genome", False),
        ("depth", True),
    ]
    rows = [
        [
            row.ref,
            row.task,
            percent(row.search_score),
            percent(row.dev_score),
            percent(row.test_score),
            str(row.experts),
            str(row.active),
            f"{parameter_count(row.parameters)} ({100 * row.parameters / row.parameters_full:.0f} %)",
            row.summary,
            str(row.depth),
        ]
        for row in found
    ]
    print_table(None, columns, rows)


@takes(ParetoRequest, "candidates")
def pareto(request: ParetoRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    found = moevolve.ask(store, request)
    if as_json:
        print_json(found)
        return
    written = {"parameters": parameter_count, "bytes": memory_size, "flops": flop_count}[found.size]
    heading = {"parameters": "parameters", "bytes": "bytes", "flops": "FLOPs per token"}[found.size]
    named: list[tuple[str, str, BestRow | Mark]] = [(row.ref, "", row) for row in found.front]
    named += [(mark.ref or "", mark.label, mark) for mark in found.marks]
    rows = [
        [ref, label, percent(model.score), "-" if (size := found.size_of(model)) is None else written(round(size))]
        for ref, label, model in named
    ]
    columns = [("individual", False), ("not searched", False), (found.split, True), (heading, True)]
    print_table(None, columns, rows, [len(found.front) - 1])


@takes(ShowRequest)
def show(
    request: ShowRequest,
    genome: Annotated[
        bool, typer.Option("--genome", help="Show what it keeps of each layer, and its settings.")
    ] = False,
    against: Annotated[str | None, option(GenomeRequest, "against")] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    if genome or against is not None:
        view = moevolve.genome(store, request.individual, against=against)
        (print_json if as_json else print_genome)(view)
        return
    detail = moevolve.ask(store, request)
    if as_json:
        print_json(detail)
        return
    for label, value in _description(detail):
        output.print(f"{label:>13}  ", style="bold", end="")
        output.print(value, soft_wrap=True)
    columns = [("task", False), ("split", False), ("score", True), ("gold log-prob", True)]
    columns += [("examples", True), ("seconds", True), ("attempt", True), ("failure", False)]
    rows = [
        [
            item.task,
            item.split,
            percent(item.score),
            "-" if item.gold_logprob is None else f"{item.gold_logprob:.4f}",
            str(item.examples_seen),
            f"{item.seconds:.2f}",
            str(item.attempt),
            item.failure or "",
        ]
        for item in detail.evaluations
    ]
    print_table(None, columns, rows)


def _description(detail: IndividualDetail) -> list[tuple[str, str]]:
    record, kind = detail.individual, detail.search.genome_kind
    share = 100 * record.parameters / record.parameters_full
    fitness = "-" if record.fitness is None else f"{percent(record.fitness)} (tie-break {record.tie_break:.4f})"
    return [
        ("individual", detail.ref),
        ("genome", f"{kind}: {record.summary}"),
        ("made by", f"{record.operator} in phase {record.phase}, depth {record.depth}"),
        ("parents", ", ".join(f"{detail.search.name}:{parent}" for parent in record.parents) or "none"),
        (part_names([kind]), part_counts(kind, record.experts, record.active)),
        (
            "parameters",
            f"{record.parameters:,} of {record.parameters_full:,} ({share:.1f} %), {record.active_parameters:,} active",
        ),
        ("status", _status(record)),
        ("fitness", fitness),
        ("content hash", record.content_hash),
        ("exports", ", ".join(f"{export.path} ({export.form})" for export in detail.exports) or "none"),
    ]


def _status(one: IndividualRecord) -> str:
    """Format the status, with the kind and reason of a failure."""
    return one.status + (f" ({one.failure_kind}): {one.failure}" if one.failure else "")


@takes(LineageRequest)
def lineage(
    request: LineageRequest,
    dot: Annotated[bool, typer.Option("--dot", help="Print a Graphviz graph.")] = False,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    graph = moevolve.ask(store, request)
    if dot:
        typer.echo(plain(to_dot(graph)))
    elif as_json:
        print_json(graph)
    else:
        _print_lineage(graph)


def _print_lineage(graph: LineageGraph) -> None:
    parents: dict[int, list[int]] = {node.index: [] for node in graph.nodes}
    for parent, child in graph.edges:
        parents[child].append(parent)
    columns = [
        ("individual", False),
        ("depth", True),
        ("phase", False),
        ("operator", False),
        ("parents", False),
        ("fitness", True),
        ("genome", False),
    ]
    rows = [
        [
            f"{graph.search_name}:{node.index}",
            str(node.depth),
            node.phase,
            node.operator,
            ", ".join(str(parent) for parent in parents[node.index]),
            percent(node.fitness),
            node.summary,
        ]
        for node in graph.nodes
    ]
    print_table(None, columns, rows)


def tasks(as_json: JsonOption = False) -> None:
    """List the tasks that a configuration can name; NAME@FITNESS is NAME under another fitness (demo-span@kl)."""
    found = moevolve.tasks()
    if as_json:
        print_json(found)
        return
    rows = [[task.name, task.fitness, ", ".join(task.splits), task.description] for task in found]
    print_table(None, [("task", False), ("fitness", False), ("splits", False), ("description", False)], rows)
