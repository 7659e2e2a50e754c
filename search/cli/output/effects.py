"""Prints what moved the score in a search: operators, choices, and their options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moevolve.search.cli.output.console import output, print_table
from moevolve.search.text import percent, points

if TYPE_CHECKING:
    from moevolve import Effects


def print_effects(found: Effects) -> None:
    """Print effects as tables."""
    columns = [("operator", False), ("individuals", True), ("new bests", True), ("better than parents", True)]
    rows = [
        [
            each.operator,
            f"{each.individuals:,}",
            f"{each.bests:,}",
            f"{each.better} of {each.children}" if each.children else "-",
            points(each.gain),
            "-" if each.gain is None else f"{points(each.low)} to {points(each.high)}",
        ]
        for each in found.operators
    ]
    print_table("operators", [*columns, ("gain over best parent", True), ("95 % interval", True)], rows)
    if found.choices:
        print_table(
            "how far choices moved the score, in points",
            [("choice", False), ("standard deviation", True), ("95 % interval", True)],
            [
                [each.choice, percent(each.spread), f"{percent(each.low)} to {percent(each.high)}"]
                for each in found.choices
            ],
        )
        print_table(
            "options, the surest first",
            [("choice", False), ("option", False), ("individuals", True), ("effect", True), ("95 % interval", True)],
            [
                [
                    each.choice,
                    each.option,
                    f"{each.individuals:,}",
                    points(each.effect),
                    f"{points(each.low)} to {points(each.high)}",
                ]
                for each in found.options
            ],
        )
    output.print(found.note, soft_wrap=True)
