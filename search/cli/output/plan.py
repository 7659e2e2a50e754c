"""Prints estimates: one in several tables, or several models in one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moevolve.search.cli.output.console import output, print_table
from moevolve.search.running.plan.records import evaluations_note
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


def print_summary(reports: Sequence[Estimate]) -> None:
    """Print a line per model: sizes, memory of a worker with originals in either place, and hours by a pilot."""
    first = reports[0]
    elsewhere = next((place for place in first.memory if place != "device"), "host")
    headings = "model | >parameters\nactive | >kept | >candidate\nactive | >experts on device\ndevice"
    headings += f" | >experts on {elsewhere}\ndevice + host"
    if first.pilot is not None:
        headings += " | >this machine\nby the pilot"
    print_table(f"{first.name}: one worker's memory, and estimates", headings, [_row(each) for each in reports])
    for note in (evaluations_note(first), *first.remarks):
        output.print(f"- {note}", soft_wrap=True)


def _row(report: Estimate) -> list[str]:
    full, candidate = report.sizes[0], report.sizes[-1]
    here, *others = report.memory.values()
    there = others[0] if others else None
    cells = [
        report.model.rstrip("/").rpartition("/")[2],
        f"{parameter_count(full.parameters or 0)}\n{parameter_count(full.active_parameters)}",
        f"{candidate.experts} of {full.experts}\nk = {candidate.active}",
        (
            f"{'-' if candidate.parameters is None else parameter_count(candidate.parameters)}\n"
            f"{parameter_count(candidate.active_parameters)}"
        ),
        memory_size(here.device),
        "-" if there is None else f"{memory_size(there.device)}\n+ {memory_size(there.host)}",
    ]
    return cells if report.pilot is None else [*cells, f"about {duration(3600 * report.pilot.hours)}"]
