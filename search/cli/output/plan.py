"""What `plan` prints: one plan in tables, or several models in one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moevolve.search.cli.output.console import output, print_table
from moevolve.search.operations.estimate import BY_FLOPS, bytes_text, evaluations_note, hours_text, notes
from moevolve.search.strategies.schedule import rounds_notes
from moevolve.search.text import parameter_count

if TYPE_CHECKING:
    from moevolve.search.estimate.estimate import Estimate


def _operations_text(flops: float) -> str:
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if flops >= unit:
            return f"{flops / unit:,.2f} {name}"
    return f"{flops / 1e6:,.2f} M"


def print_plan(report: Estimate) -> None:
    """Tables of sizes, memory, prompts and GPUs, about how long it takes, and what all of it rests on."""
    config, facts = report.config, report.outline.facts
    print_table(
        f"{config.name}: {config.model.path} ({facts.family}, {facts.dtype}), one worker of "
        f"{config.workers.count}; nothing was loaded",
        [("model", False), ("experts", True), ("parameters", True), ("active", True), ("FLOPs/token", True)],
        [
            [
                size.title if size.title == "full model" else f"{size.title} candidate",
                f"{size.experts}, {size.active} active" if size.experts else "-",
                "-" if size.parameters is None else parameter_count(size.parameters),
                parameter_count(size.active_parameters),
                _operations_text(size.token_flops),
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
        output.print(f"the search takes about {hours_text(report.pilot.hours)} here, by the pilot")
    for note in notes(report):
        output.print(f"- {note}", soft_wrap=True)


def _print_memory(report: Estimate) -> None:
    columns = [("memory of a worker", False)]
    for where in report.memory:
        named = "" if len(report.memory) == 1 else f"\noriginals: {where}"
        columns += [(f"device{named}", True), (f"host{named}", True)]
    columns = columns if len(report.memory) > 1 else columns[:2]
    titles = [item.title for item in next(iter(report.memory.values())).items]
    rows = []
    for place, title in enumerate(titles):
        rows.append([title, *(cell for m in report.memory.values() for cell in _two(m.items[place]))])
    rows.append(["sum", *(cell for m in report.memory.values() for cell in (bytes_text(m.device), bytes_text(m.host)))])
    print_table(None, columns, [row[: len(columns)] for row in rows], (len(titles) - 1,))


def _two(item: Any) -> tuple[str, str]:
    return bytes_text(item.device), bytes_text(item.host)


def _print_work(report: Estimate) -> None:
    print_table(
        None,
        [("evaluated on", False), ("split", False), ("prompts", True), ("tokens", True), ("lengths", False)],
        [[s.task, s.split, f"{s.examples:,}", f"{s.tokens:,}", s.source] for s in report.splits],
    )
    for kind, flops in report.flops.items():
        output.print(
            f"FLOPs per evaluation ({kind}): {_operations_text(flops)}",
            soft_wrap=True,
        )


def _print_repairs(report: Estimate) -> None:
    print_table(
        None,
        [
            *(("repair of a candidate", False), ("tokens", True)),
            *(("memory of the largest fit", True), ("allowed", True)),
        ],
        [
            [
                *(f"phase {work.phase}: {work.kind}", f"{work.tokens:,}"),
                *(bytes_text(work.needed), bytes_text(work.allowed)),
            ]
            for work in report.repairs
        ],
    )


def _print_devices(report: Estimate) -> None:
    originals = report.config.model.originals
    rows = []
    for one in report.devices:
        where = originals if originals in one.fits else "device"
        other = next((place for place in one.fits if place != where), None)
        fits = _yes(one.fits[where]) + (f"\n{other}: {_yes(one.fits[other])}" if other else "")
        rows.append([f"{one.workers} x {one.device.name}", fits, f"about {hours_text(one.hours)}"])
    named = f" (originals: {originals})" if len(report.memory) > 1 else ""
    columns = [("workers", False), (f"a worker fits{named}", False), ("the search, by FLOPs alone", False)]
    print_table(None, columns, rows)


def _yes(fits: bool) -> str:
    return "yes" if fits else "no"


def print_summary(reports: Sequence[Estimate]) -> None:
    """Sizes, one worker's memory with original experts on the device and on the host, and hours on every GPU."""
    first = reports[0]
    columns = [("model", False), ("parameters\nactive", True), ("kept", True), ("candidate\nactive", True)]
    columns += [
        ("originals: device\ndevice", True),
        ("originals: host\ndevice + host", True),
        ("FLOPs per\nevaluation", True),
    ]
    columns += [(f"{one.workers} x {one.device.name}\nby FLOPs alone", True) for one in first.devices]
    if first.pilot is not None:
        columns.append(("this machine\nby the pilot", True))
    print_table(f"{first.config.name}: one worker's memory, and estimates", columns, [_row(each) for each in reports])
    for note in (evaluations_note(first), *((BY_FLOPS,) if first.devices else ()), *rounds_notes(first.config)):
        output.print(f"- {note}", soft_wrap=True)


def _row(report: Estimate) -> list[str]:
    full, candidate = report.sizes[0], report.sizes[-1]
    here, there = report.memory["device"], report.memory.get("host")
    cells = [
        report.config.model.path.rstrip("/").rpartition("/")[2],
        f"{parameter_count(full.parameters or 0)}\n{parameter_count(full.active_parameters)}",
        f"{candidate.experts} of {full.experts}\nk = {candidate.active}",
        (
            f"{'-' if candidate.parameters is None else parameter_count(candidate.parameters)}\n"
            f"{parameter_count(candidate.active_parameters)}"
        ),
        bytes_text(here.device),
        "-" if there is None else f"{bytes_text(there.device)}\n+ {bytes_text(there.host)}",
        _operations_text(report.flops[report.counts[-1].kind]),
        *(f"about {hours_text(one.hours)}" for one in report.devices),
    ]
    return cells if report.pilot is None else [*cells, f"about {hours_text(report.pilot.hours)}"]
