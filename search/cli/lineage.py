"""`lineage`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

import moevolve
from moevolve.search.cli._console import percent, plain, print_json, print_table
from moevolve.search.cli._options import DEFAULT_STORE, IndividualArgument, JsonOption, StoreOption
from moevolve.store.lineage import to_dot

if TYPE_CHECKING:
    from moevolve import LineageGraph


def lineage(
    individual: IndividualArgument,
    dot: Annotated[bool, typer.Option("--dot", help="Print a Graphviz graph.")] = False,
    descendants: Annotated[bool, typer.Option("--descendants", help="Children instead of ancestors.")] = False,
    depth: Annotated[int | None, typer.Option("--depth", min=1, help="At most this many generations.")] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Where an individual comes from: its ancestors, back to the random ones."""
    graph = moevolve.lineage(individual, store=store, descendants=descendants, depth=depth)
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
