"""Prints estimates: one in several tables, or several models in one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moevolve.search.cli.output.console import output, print_table
from moevolve.search.estimate.report import BY_FLOPS, evaluations_note
from moevolve.search.text import duration, flop_count, memory_size, parameter_count

if TYPE_CHECKING:
    from moevolve.search.estimate.report import Estimate


def print_plan(report: Estimate) -> None:
    """Print tables of sizes, memory, prompts and GPUs, the approximate duration, and notes."""
    print_table(
        f"{report.name}: {report.model} ({report.family}, {report.dtype}), one worker of {report.workers}; "
        "nothing was loaded",
        "model | >experts | >parameters | >active | >FLOPs/token",
        [
            [
                size.title if size.title == "full model" else f"{size.title} candidate",
                f"{size.experts}, {size.active} active" if size.experts else "-",
                "-" if size.parameters is None else parameter_count(size.parameters),
                parameter_count(size.active_parameters),
                flop_count(size.token_flops),
            ]
            for size in report.sizes
        ],
    )
    _print_memory(report)
    _print_work(report)
    if report.repairs:
        _print_repairs(report)
    if report.devices:
        _print_devices(report)
    if report.pilot is not None:
        output.print(f"the search takes about {duration(report.pilot.hours)} here, by the pilot")
    for note in report.notes:
        output.print(f"- {note}", soft_wrap=True)


def _print_memory(report: Estimate) -> None:
    on_gpu = bool(report.devices)  # on a CPU, device and host are the same memory
    headings = "memory of a worker"
    for where in report.memory:
        named = f"\noriginals: {where}" if len(report.memory) > 1 else ""
        headings += f" | >device{named} | >host{named}" if on_gpu else f" | >memory{named}"
    titles = [item.title for item in next(iter(report.memory.values())).items]
    rows = [[title] for title in [*titles, "sum"]]
    for memory in report.memory.values():
        sizes = [*((item.device, item.host) for item in memory.items), (memory.device, memory.host)]
        for row, (device, host) in zip(rows, sizes, strict=True):
            row.extend(map(memory_size, (device, host) if on_gpu else (device + host,)))
    print_table(None, headings, rows, (len(titles) - 1,))


def _print_work(report: Estimate) -> None:
    rows = [[s.task, s.split, f"{s.examples:,}", f"{s.tokens:,}", s.source] for s in report.splits]
    print_table(None, "evaluated on | split | >prompts | >tokens | lengths", rows)
    for kind, flops in report.evaluation_flops.items():
        output.print(f"FLOPs per evaluation ({kind}): {flop_count(flops)}", soft_wrap=True)


def _print_repairs(report: Estimate) -> None:
    rows = [
        [f"phase {work.phase}: {work.kind}", f"{work.tokens:,}", memory_size(work.needed), memory_size(work.allowed)]
        for work in report.repairs
    ]
    print_table(None, "repair of a candidate | >tokens | >memory of the largest fit | >allowed", rows)


def _print_devices(report: Estimate) -> None:
    originals = report.originals
    rows = []
    for one in report.devices:
        where = originals if originals in one.fits else "device"
        other = next((place for place in one.fits if place != where), None)
        fits = _yes(one.fits[where]) + (f"\n{other}: {_yes(one.fits[other])}" if other else "")
        rows.append([f"{one.workers} x {one.name}", fits, f"about {duration(one.hours)}"])
    named = f" (originals: {originals})" if len(report.memory) > 1 else ""
    print_table(None, f"workers | a worker fits{named} | the search, by FLOPs alone", rows)


def _yes(fits: bool) -> str:
    return "yes" if fits else "no"


def print_summary(reports: Sequence[Estimate]) -> None:
    """Print a line per model: sizes, memory of a worker with originals on the device and on the host, and hours."""
    first = reports[0]
    elsewhere = next((place for place in first.memory if place != "device"), "host")
    headings = "model | >parameters\nactive | >kept | >candidate\nactive | >originals: device\ndevice"
    headings += f" | >originals: {elsewhere}\ndevice + host | >FLOPs per\nevaluation"
    headings += "".join(f" | >{one.workers} x {one.name}\nby FLOPs alone" for one in first.devices)
    if first.pilot is not None:
        headings += " | >this machine\nby the pilot"
    print_table(f"{first.name}: one worker's memory, and estimates", headings, [_row(each) for each in reports])
    for note in (evaluations_note(first), *((BY_FLOPS,) if first.devices else ()), *first.remarks):
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
        flop_count(report.evaluation_flops[report.phases[-1].kind]),
        *(f"about {duration(one.hours)}" for one in report.devices),
    ]
    return cells if report.pilot is None else [*cells, f"about {duration(report.pilot.hours)}"]
