"""Plans of several models side by side: a line each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moevolve.search.cli.console import millions, output, print_table
from moevolve.search.cli.plan_output import notes
from moevolve.search.cli.plan_texts import bytes_text, hours_text, operations_text, rate_text, span_text

if TYPE_CHECKING:
    from moevolve.search.planning.report import PlanReport


def print_summary(reports: Sequence[PlanReport]) -> None:
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
    for note in notes(first)[: 2 + len(first.devices)]:
        output.print(f"- {note}", markup=False, highlight=False, soft_wrap=True)


def _row(report: PlanReport) -> list[str]:
    full, candidate = report.sizes[0], report.sizes[-1]
    here, there = report.memory["device"], report.memory.get("host")
    cells = [
        report.config.model.path.rstrip("/").rpartition("/")[2],
        f"{millions(full.parameters or 0)}\n{millions(full.active_parameters)}",
        f"{candidate.experts} of {full.experts}\nk = {candidate.active}",
        f"{'-' if candidate.parameters is None else millions(candidate.parameters)}\n"
        f"{millions(candidate.active_parameters)}",
        bytes_text(here.device),
        "-" if there is None else f"{bytes_text(there.device)}\n+ {bytes_text(there.host)}",
        operations_text(report.flops[-1][1].most),
    ]
    for estimate in report.devices:
        rate, hours = span_text(estimate.rate, rate_text), span_text(estimate.hours, hours_text)
        cells.append(f"{rate}\n{hours}")
    return cells
