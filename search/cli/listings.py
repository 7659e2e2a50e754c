"""Questions to the store: `searches`, `best`, `show`, `lineage`, and `tasks`. None of them loads torch."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from moevolve.search.cli._console import (
    DEFAULT_STORE,
    JsonOption,
    StoreOption,
    millions,
    output,
    percent,
    print_json,
    print_table,
)
from moevolve.search.cli.listing_json import best_json, individual_json, search_json
from moevolve.search.genomes.registry import KINDS, counted, parts_of
from moevolve.store.lineage import to_dot
from moevolve.store.records import IndividualDetail, IndividualRecord, LineageGraph
from moevolve.store.repository import Store

IndividualArgument = Annotated[str, typer.Argument(metavar="INDIVIDUAL", help="SEARCH:INDEX, for example demo:137.")]


def register(app: typer.Typer) -> None:
    for command in (searches, best, show, lineage, tasks):
        app.command()(command)


def searches(store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """All searches of the store."""
    with Store.open(store, create=False) as opened:
        found = opened.searches()
    if as_json:
        print_json([search_json(row) for row in found])
        return
    columns = [
        ("search", False),
        ("status", False),
        ("genome", False),
        ("tasks", False),
        ("individuals", True),
        ("failed", True),
        ("best on search", True),
        ("created", False),
    ]
    rows = [
        [
            row.search.name,
            row.search.status + (f" ({row.search.status_reason})" if row.search.status_reason else ""),
            row.search.genome_kind,
            ", ".join(row.tasks),
            str(row.individuals),
            str(row.failed),
            percent(row.best_fitness),
            f"{row.search.created_at:%Y-%m-%d %H:%M}" if row.search.created_at else "",
        ]
        for row in found
    ]
    print_table(None, columns, rows)


def best(
    task: Annotated[str | None, typer.Option("--task", help="Rank for this task; default: every task.")] = None,
    experts: Annotated[int | None, typer.Option("--experts", help="Only with this many experts, or blocks.")] = None,
    active: Annotated[int | None, typer.Option("--active", help="Only with this many of them active.")] = None,
    search: Annotated[str | None, typer.Option("--search", help="Only from this search.")] = None,
    by: Annotated[
        Literal["dev", "search", "test"],
        typer.Option("--by", help="Split that ranks; `dev` falls back to `search` for what was not re-ranked."),
    ] = "dev",
    limit: Annotated[int, typer.Option("--limit", min=1, help="Rows per task.")] = 10,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """The best configurations per task."""
    with Store.open(store, create=False) as opened:
        found = opened.best(task, experts=experts, active=active, search=search, limit=limit, by=by)
    if as_json:
        print_json([best_json(row) for row in found])
        return
    columns = [
        ("individual", False),
        ("task", False),
        ("search", True),
        ("dev", True),
        ("test", True),
        (parts_of({row.genome_kind for row in found} or KINDS), True),
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
            f"{millions(row.parameters)} ({100 * row.parameters / row.parameters_full:.0f} %)",
            row.summary,
            str(row.depth),
        ]
        for row in found
    ]
    print_table(None, columns, rows)


def show(individual: IndividualArgument, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """Everything the store knows of one individual."""
    with Store.open(store, create=False) as opened:
        detail = opened.individual(individual)
    if as_json:
        print_json(individual_json(detail))
        return
    record = detail.individual
    lines = [
        ("individual", detail.ref),
        ("genome", f"{detail.search.genome_kind}: {record.summary}"),
        ("made by", f"{record.operator} in phase {record.phase}, depth {record.depth}"),
        ("parents", ", ".join(f"{detail.search.name}:{parent}" for parent in record.parents) or "none"),
        _shape(detail),
        (
            "parameters",
            f"{record.parameters:,} of {record.parameters_full:,} "
            f"({100 * record.parameters / record.parameters_full:.1f} %), {record.active_parameters:,} active",
        ),
        ("status", _status(record)),
        (
            "fitness",
            "-" if record.fitness is None else f"{percent(record.fitness)} (tie-break {record.tie_break:.4f})",
        ),
        ("content hash", record.content_hash),
        ("exports", ", ".join(f"{export.path} ({export.form})" for export in detail.exports) or "none"),
    ]
    for label, value in lines:
        output.print(f"[bold]{label:>13}[/bold]  ", end="")
        output.print(value, markup=False, highlight=False, soft_wrap=True)
    columns = [
        ("task", False),
        ("split", False),
        ("score", True),
        ("gold log-prob", True),
        ("examples", True),
        ("seconds", True),
        ("attempt", True),
        ("failure", False),
    ]
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


def lineage(
    individual: IndividualArgument,
    dot: Annotated[bool, typer.Option("--dot", help="Print a Graphviz graph.")] = False,
    descendants: Annotated[bool, typer.Option("--descendants", help="Children instead of ancestors.")] = False,
    depth: Annotated[int | None, typer.Option("--depth", min=1, help="At most this many generations.")] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Where an individual comes from: its ancestors, back to the random ones."""
    with Store.open(store, create=False) as opened:
        graph = (opened.descendants if descendants else opened.ancestors)(individual, depth)
    if dot:
        typer.echo(to_dot(graph))
    elif as_json:
        print_json(graph)
    else:
        _print_lineage(graph)


def tasks(as_json: JsonOption = False) -> None:
    """The tasks that can be named in a configuration; NAME@FITNESS is NAME under another fitness (demo-span@kl)."""
    from moevolve.evaluators.tasks.registry import list_tasks, load_task

    found = {name: load_task(name) for name in list_tasks()}
    if as_json:
        print_json(
            [
                {"name": name, "description": task.description, "fitness": task.fitness, "splits": list(task.splits)}
                for name, task in found.items()
            ]
        )
        return
    rows = [[name, task.fitness, ", ".join(task.splits), task.description] for name, task in found.items()]
    print_table(None, [("task", False), ("fitness", False), ("splits", False), ("description", False)], rows)


def _status(one: IndividualRecord) -> str:
    """The status, and of a failed one whose fault it was and why."""
    return one.status + (f" ({one.failure_kind}): {one.failure}" if one.failure else "")


def _shape(detail: IndividualDetail) -> tuple[str, str]:
    """What the numbers of experts stand for depends on the kind of genome."""
    record, kind = detail.individual, detail.search.genome_kind
    return parts_of([kind]), counted(kind, record.experts, record.active)


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
