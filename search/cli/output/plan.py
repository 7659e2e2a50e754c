"""What `plan` prints: one plan in tables, or several models in one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from moevolve.search.cli._console import millions, output, print_table
from moevolve.search.loop.schedule import rounds_notes
from moevolve.search.service.estimate import bytes_text, notes

if TYPE_CHECKING:
    from moevolve.search.estimate.estimate import Estimate
    from moevolve.search.estimate.measured import MeasuredEstimate
    from moevolve.search.estimate.timing import Range


def _span_text(found: Range, text: Callable[[float], str]) -> str:
    least, most = text(found.least), text(found.most)
    return least if least == most else f"{least} - {most}"


def _seconds_text(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def _rate_text(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.1f}"


def _hours_text(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:,.1f}"


def _operations_text(flops: float) -> str:
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if flops >= unit:
            return f"{flops / unit:,.2f} {name}"
    return f"{flops / 1e6:,.2f} M"


def print_plan(report: Estimate, comparisons: Sequence[MeasuredEstimate]) -> None:
    """Tables of sizes, memory, work and time, what was measured, and what all of it rests on."""
    config, facts = report.config, report.outline.facts
    print_table(
        f"{config.name}: {config.model.path} ({facts.family}, {facts.dtype}), one worker of "
        f"{config.workers.count}; nothing was loaded",
        [("model", False), ("experts", True), ("parameters", True), ("active", True), ("FLOPs/token", True)],
        [
            [
                size.title if size.title == "full model" else f"{size.title} candidate",
                f"{size.experts}, {size.active} active" if size.experts else "-",
                "-" if size.parameters is None else millions(size.parameters),
                millions(size.active_parameters),
                _operations_text(size.token_flops),
            ]
            for size in report.sizes
        ],
    )
    _print_memory(report)
    _print_work(report)
    if report.repairs:
        _print_repairs(report)
    _print_devices(report)
    if comparisons:
        _print_comparisons(comparisons)
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
    for kind, flops in report.flops:
        output.print(
            f"FLOPs per evaluation ({kind}): {_span_text(flops, _operations_text)}",
            soft_wrap=True,
        )


def _print_repairs(report: Estimate) -> None:
    print_table(
        None,
        [
            *(("repair of a candidate", False), ("tokens", True), ("FLOPs", True), ("in passes", True)),
            *(("in fits", True), ("a fit takes", True), ("allowed", True)),
        ],
        [
            [
                *(f"phase {work.phase}: {work.kind}", f"{work.tokens:,}", _operations_text(work.flops)),
                *(_operations_text(work.forward), _operations_text(work.fitting)),
                *(bytes_text(work.needed), bytes_text(work.allowed)),
            ]
            for work in report.repairs
        ],
    )


def _print_devices(report: Estimate) -> None:
    originals = report.config.model.originals
    rows = []
    for estimate in report.devices:
        where = originals if originals in estimate.fits else "device"
        other = next((place for place in estimate.fits if place != where), None)
        fits = estimate.fits[where] + (
            f"\n{other}: {estimate.fits[other]}" if other and estimate.placement.memory else ""
        )
        per_phase = "\n".join(
            f"{p.kind}: {_span_text(p.scoring, _seconds_text)}{_edit(p.edit)}{_repair(p.repair)}"
            for p in estimate.phases
        )
        rows.append(
            [
                f"{estimate.placement.workers:g} x {estimate.placement.device.name}",
                fits,
                per_phase,
                _span_text(estimate.rate, _rate_text),
                _span_text(estimate.hours, _hours_text),
            ]
        )
    named = f" (originals: {originals})" if len(report.memory) > 1 else ""
    print_table(
        None,
        [
            ("workers", False),
            (f"fits{named}", False),
            (f"s per evaluation + edit{' + repair' if report.repairs else ''}", False),
            ("evaluations/s", True),
            ("hours at most", True),
        ],
        rows,
    )


def _print_comparisons(comparisons: Sequence[MeasuredEstimate]) -> None:
    print_table(
        "scoring one candidate, edit left out: estimated and measured",
        [
            *(("device", False), ("task", False), ("split", False), ("evaluations", True)),
            *(("estimated s", True), ("measured s", True), ("measured / estimated", True)),
        ],
        [
            [
                *(c.device, c.task, c.split, f"{c.evaluations:,}"),
                *(
                    _span_text(c.estimated, _seconds_text),
                    _seconds_text(c.measured),
                    _span_text(c.ratio, lambda x: f"{x:.2f}"),
                ),
            ]
            for c in comparisons
        ],
    )


def _edit(seconds: float | None) -> str:
    return " + ?" if seconds is None else f" + {_seconds_text(seconds)}"


def _repair(seconds: float) -> str:
    return f" + {_seconds_text(seconds)}" if seconds else ""


def print_summary(reports: Sequence[Estimate]) -> None:
    """Sizes, one worker's memory with original experts on the device and on the host, and times on every device."""
    first = reports[0]
    columns = [("model", False), ("parameters\nactive", True), ("kept", True), ("candidate\nactive", True)]
    columns += [
        ("originals: device\ndevice", True),
        ("originals: host\ndevice + host", True),
        ("FLOPs per\nevaluation", True),
    ]
    for estimate in first.devices:
        name = f"{estimate.placement.workers:g} x {estimate.placement.device.name}"
        columns.append((f"{name}\nevaluations/s, hours", True))
    print_table(f"{first.config.name}: one worker's memory, and estimates", columns, [_row(each) for each in reports])
    for note in (*notes(first)[: 2 + len(first.devices)], *rounds_notes(first.config)):
        output.print(f"- {note}", soft_wrap=True)


def _row(report: Estimate) -> list[str]:
    full, candidate = report.sizes[0], report.sizes[-1]
    here, there = report.memory["device"], report.memory.get("host")
    cells = [
        report.config.model.path.rstrip("/").rpartition("/")[2],
        f"{millions(full.parameters or 0)}\n{millions(full.active_parameters)}",
        f"{candidate.experts} of {full.experts}\nk = {candidate.active}",
        (
            f"{'-' if candidate.parameters is None else millions(candidate.parameters)}\n"
            f"{millions(candidate.active_parameters)}"
        ),
        bytes_text(here.device),
        "-" if there is None else f"{bytes_text(there.device)}\n+ {bytes_text(there.host)}",
        _operations_text(report.flops[-1][1].most),
    ]
    for estimate in report.devices:
        rate, hours = _span_text(estimate.rate, _rate_text), _span_text(estimate.hours, _hours_text)
        cells.append(f"{rate}\n{hours}")
    return cells
