"""Prints an estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moevolve.search.cli.output.console import output, print_table
from moevolve.search.text import duration, memory_size, parameter_count

if TYPE_CHECKING:
    from moevolve.search.running.plan.records import Estimate


def print_plan(report: Estimate) -> None:
    """Print tables of sizes, memory and prompts, the approximate duration, and notes."""
    print_table(
        f"{report.name}: {report.model} ({report.family}, {report.dtype}), one worker of {report.workers}; "
        "nothing was loaded",
        "model | >experts | >parameters | >active",
        [
            [
                size.title if size.title == "full model" else f"{size.title} candidate",
                f"{size.experts}, {size.active} active" if size.experts else "-",
                "-" if size.parameters is None else parameter_count(size.parameters),
                parameter_count(size.active_parameters),
            ]
            for size in report.sizes
        ],
    )
    headings = "memory of a worker"
    for where in report.memory:
        named = f"\noriginals: {where}" if len(report.memory) > 1 else ""
        headings += f" | >device{named} | >host{named}" if report.on_gpu else f" | >memory{named}"
    titles = [item.title for item in next(iter(report.memory.values())).items]
    rows = [[title] for title in [*titles, "sum"]]
    for memory in report.memory.values():
        sizes = [*((item.device, item.host) for item in memory.items), (memory.device, memory.host)]
        for row, (device, host) in zip(rows, sizes, strict=True):
            row.extend(map(memory_size, (device, host) if report.on_gpu else (device + host,)))
    print_table(None, headings, rows, (len(titles) - 1,))
    rows = [[s.task, s.split, f"{s.examples:,}", f"{s.tokens:,}", s.source] for s in report.splits]
    print_table(None, "evaluated on | split | >prompts | >tokens | lengths", rows)
    if report.pilot is not None:
        output.print(f"the search takes about {duration(3600 * report.pilot.hours)} here, by the pilot", soft_wrap=True)
    for note in report.notes:
        output.print(f"- {note}", soft_wrap=True)
