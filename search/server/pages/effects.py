"""The page about what moved the score in a search, with its genes as parallel coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from moevolve.search.results.effects import Effects, effects
from moevolve.search.server.dependencies import SearchPath, ServerDep
from moevolve.search.server.pages.rendering import render

_MOST_AXES, _MOST_LINES = 24, 400
"""Largest numbers of genes and of individuals that are drawn."""
_ROWS, _FEW_ROWS = 25, 8
"""Numbers of options on the page, and where it is part of another one."""

routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@dataclass(frozen=True)
class GeneAxis:
    """A gene as a horizontal axis.

    Attributes:
        name: What the genome chooses.
        ticks: Labels with their places, from 0 at the left to 1 at the right.
        places: Place of each individual's value; None where it has none.
    """

    name: str
    ticks: tuple[tuple[float, str], ...]
    places: tuple[float | None, ...]


@routes.get("/searches/{search}/effects")
def show_effects(request: Request, server: ServerDep, search: SearchPath) -> HTMLResponse:
    """What moved the score in a search."""
    record = server.store.search(search)
    limit = _FEW_ROWS if "part" in request.query_params else _ROWS
    read = partial(effects, server.store, record.id, limit, genes=True)
    found = server.listings.cached(f"effects of {record.id}, {limit}", read)
    axes = axes_of(found)
    ranked = sorted(found.rows, key=lambda row: -row.score)
    best = {row.index for row in ranked[: min(10, -(-len(ranked) // 10))]}
    step = -(-len(found.rows) // _MOST_LINES)
    drawn = (
        [(place, row) for place, row in enumerate(found.rows) if place % step == 0 or row.index in best] if axes else []
    )
    lines = [(row, row.index in best, path_of([axis.places[place] for axis in axes])) for place, row in drawn]
    return render(
        request,
        "effects.jinja",
        search=record,
        found=found,
        axes=axes,
        lines=sorted(lines, key=lambda line: line[1]),  # the best above the others
    )


def axes_of(found: Effects) -> list[GeneAxis]:
    """Return the genes as axes, those that moved the score most first."""
    spreads = {choice.choice: choice.spread for choice in found.choices}
    order = sorted(range(len(found.genes)), key=lambda place: -spreads.get(found.genes[place], 0.0))
    return [_axis(found.genes[place], [row.values[place] for row in found.rows]) for place in order[:_MOST_AXES]]


def _axis(name: str, values: Sequence[float | str | None]) -> GeneAxis:
    if any(isinstance(value, str) for value in values):
        names = sorted({"none" if value is None else str(value) for value in values})
        at = {value: place / (len(names) - 1) for place, value in enumerate(names)}
        return GeneAxis(
            name,
            tuple((place, value) for value, place in at.items()),
            tuple(at["none" if value is None else str(value)] for value in values),
        )
    numbers = [value for value in values if isinstance(value, float)]
    low, high = min(numbers), max(numbers)
    width = high - low or 1.0
    places = tuple((value - low) / width if isinstance(value, float) else None for value in values)
    return GeneAxis(name, ((0.0, f"{low:g}"), (1.0, f"{high:g}")), places)


def path_of(places: Sequence[float | None]) -> str:
    """Return an SVG path through an individual's places, axis i at height i, interrupted where it has no value."""
    runs = groupby(enumerate(places), lambda point: point[1] is None)
    return "".join("M" + "L".join(f"{place:.3f} {axis}" for axis, place in run) for missing, run in runs if not missing)
