"""Prints searches beside each other: settings that differ, courses at some places, and scores with tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moevolve.search.cli.output.console import output, print_table
from moevolve.search.text import parameter_count, percent, score_lines

if TYPE_CHECKING:
    from moevolve import Contrast

SPLITS = ("search", "dev", "test")


def print_contrast(found: Contrast) -> None:
    """Print a contrast as tables."""
    names = [(one.name, False) for one in found.searches]
    if found.settings:
        rows = [[row.name, *row.values] for row in found.settings]
        print_table("settings that differ", [("setting", False), *names], rows)
    columns = [(found.by, True), *((", ".join(group.searches), True) for group in found.groups)]
    courses = [
        [f"{place:,.0f}" if found.by == "evaluations" else f"{place:.2f}", *map(_spread, values)]
        for place, values in found.points()
    ]
    print_table("best fitness so far in %, mean (range) over searches that differ only in the seed", columns, courses)
    if not found.models:
        output.print("no search has finished: there are no winners to compare")
        return
    models = [
        [
            "\n".join((model.label, *model.refs)),
            *("-" if (score := model.score(split)) is None else "\n".join(score_lines(score)) for split in SPLITS),  # type: ignore[arg-type]
            parameter_count(model.parameters),
            "-" if model.corrected is None else f"{model.corrected:.3g}",
            "" if model.test is None else model.test.test,
        ]
        for model in found.models
    ]
    columns = [("winners", False), *((split, True) for split in SPLITS), ("parameters", True), ("p (Holm)", True)]
    print_table("scores in % with 95 % intervals", [*columns, ("test", False)], models)
    output.print(found.note, soft_wrap=True)


def _spread(values: tuple[float, float, float] | None) -> str:
    if values is None:
        return "-"
    mean, low, high = map(percent, values)
    return mean if low == high else f"{mean} ({low} - {high})"
