"""What `plan` prints: one plan in tables, several models in one table, or JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from moevolve.search.cli._console import millions, output, print_table

if TYPE_CHECKING:
    from moevolve.search.estimate.estimate import DeviceEstimate, Estimate
    from moevolve.search.estimate.measured import Comparison
    from moevolve.search.estimate.timing import Range


def span_text(found: Range, text: Callable[[float], str]) -> str:
    least, most = text(found.least), text(found.most)
    return least if least == most else f"{least} - {most}"


def seconds_text(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def rate_text(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.1f}"


def hours_text(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:,.1f}"


def bytes_text(size: int) -> str:
    if not size:
        return "-"
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def operations_text(flops: float) -> str:
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if flops >= unit:
            return f"{flops / unit:,.2f} {name}"
    return f"{flops / 1e6:,.2f} M"


def plan_json(report: Estimate, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The plan as plain values; ranges are `{least, most}`, memory is in bytes, times are in seconds."""
    facts, ranked_tested = report.outline.facts, report.final
    return {
        "name": report.config.name,
        "model": report.config.model.path,
        "family": facts.family,
        "dtype": report.config.model.dtype,
        "sizes": report.sizes,
        "memory": {
            where: {
                "items": memory.items,
                "device_bytes": memory.device,
                "host_bytes": memory.host,
                "loading_host_bytes": memory.loading,
            }
            for where, memory in report.memory.items()
        },
        "originals": report.config.model.originals,
        "splits": [
            {"task": s.task, "split": s.split, "examples": s.examples, "tokens": s.tokens, "source": s.source}
            for s in report.splits
        ],
        "evaluation_flops": dict(report.flops),
        "phases": report.counts,
        "final": {"ranked": ranked_tested[0], "tested": ranked_tested[1]},
        "devices": [_device_json(device) for device in report.devices],
        "measured": [
            {
                "device": c.device,
                "task": c.task,
                "split": c.split,
                "evaluations": c.evaluations,
                "measured_seconds": c.measured,
                "estimated_seconds": c.estimated,
                "ratio": c.ratio,
            }
            for c in comparisons
        ],
        "notes": notes(report),
    }


def _device_json(estimate: DeviceEstimate) -> dict[str, Any]:
    placement = estimate.placement
    return {
        "name": placement.device.name,
        "title": placement.device.title,
        "workers": placement.workers,
        "share": placement.share,
        "flops_per_second": placement.device.flops(placement.dtype),
        "bytes_per_second": placement.device.bandwidth,
        "link_bytes_per_second": placement.device.link,
        "layer_seconds": placement.device.layer_seconds,
        "memory_bytes": placement.memory or None,
        "utilisation": placement.utilisation,
        "fits": estimate.fits,
        "phases": estimate.phases,
        "evaluations_per_second": estimate.rate,
        "hours": estimate.hours,
    }


def print_plan(report: Estimate, comparisons: Sequence[Comparison]) -> None:
    """Tables of sizes, memory, work and time, what was measured, and what all of it rests on."""
    config, facts = report.config, report.outline.facts
    print_table(
        f"{config.name}: {config.model.path} ({facts.family}, {config.model.dtype}), one worker of "
        f"{config.workers.count}; nothing was loaded",
        [("model", False), ("experts", True), ("parameters", True), ("active", True), ("FLOPs/token", True)],
        [
            [
                size.title if size.title == "full model" else f"{size.title} candidate",
                f"{size.experts}, {size.active} active" if size.experts else "-",
                "-" if size.parameters is None else millions(size.parameters),
                millions(size.active_parameters),
                operations_text(size.token_flops),
            ]
            for size in report.sizes
        ],
    )
    _print_memory(report)
    _print_work(report)
    _print_devices(report)
    if comparisons:
        _print_comparisons(comparisons)
    for note in notes(report):
        output.print(f"- {note}", markup=False, highlight=False, soft_wrap=True)


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
            f"FLOPs per evaluation ({kind}): {span_text(flops, operations_text)}",
            markup=False,
            highlight=False,
            soft_wrap=True,
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
        per_phase = "\n".join(f"{p.kind}: {span_text(p.scoring, seconds_text)}{_edit(p.edit)}" for p in estimate.phases)
        rows.append(
            [
                f"{estimate.placement.workers:g} x {estimate.placement.device.name}",
                fits,
                per_phase,
                span_text(estimate.rate, rate_text),
                span_text(estimate.hours, hours_text),
            ]
        )
    named = f" (originals: {originals})" if len(report.memory) > 1 else ""
    print_table(
        None,
        [
            ("workers", False),
            (f"fits{named}", False),
            ("s per evaluation + edit", False),
            ("evaluations/s", True),
            ("hours at most", True),
        ],
        rows,
    )


def _print_comparisons(comparisons: Sequence[Comparison]) -> None:
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
                    span_text(c.estimated, seconds_text),
                    seconds_text(c.measured),
                    span_text(c.ratio, lambda x: f"{x:.2f}"),
                ),
            ]
            for c in comparisons
        ],
    )


def notes(report: Estimate) -> list[str]:
    """What the numbers rest on, and what they leave out."""
    counts = ", ".join(f"{c.individuals} {c.kind} (at most {c.different} different)" for c in report.counts)
    ranked, tested = report.final
    found = [
        f"evaluations: {counts}, then {ranked} on dev and {tested} on test; a candidate that repeats another is looked "
        "up, how many do is not known beforehand",
        "ranges: from no answer decoded beyond what the pass over the gold answers shows, to every answer decoded to "
        "its last token",
    ]
    for estimate in report.devices:
        placement, device, used = estimate.placement, estimate.placement.device, estimate.placement.utilisation
        if device.memory:
            found.append(
                f"{device.name} ({device.title}): assumed are {used.compute:.0%} of "
                f"{device.flops(placement.dtype) / 1e12:.4g} TFLOP/s, {used.memory:.0%} of "
                f"{device.bandwidth / 1e9:,.0f} GB/s, {used.link:.0%} of {device.link / 1e9:.0f} GB/s from the host, "
                f"{1e3 * device.layer_seconds:.1f} ms per layer and pass at least"
            )
        else:
            found.append(
                f"cpu: measured just now with {device.title.split(', ')[-1]}: {device.half_flops / 1e9:.1f} GFLOP/s, "
                f"copying {device.bandwidth / 1e9:.1f} GB/s, {1e3 * device.layer_seconds:.2f} ms per layer; passes are "
                f"assumed to get {used.compute:.0%} of the first"
            )
    if any(phase.edit is None for estimate in report.devices for phase in estimate.phases):
        found.append(
            f"making a {report.config.genome.kind} candidate of the resident model takes time that isn't counted"
        )
    busy = min((estimate.placement.workers for estimate in report.devices), default=report.config.workers.count)
    if busy < report.config.workers.count:
        found.append(
            f"the run's window, or this machine's cores, keep {busy:g} of {report.config.workers.count} workers busy"
        )
    if any(not estimate.placement.device.memory for estimate in report.devices):
        found.append("on a CPU, device and host are the same memory")
    used_host = report.memory.get(report.config.model.originals)
    if used_host is not None and used_host.loading:
        found.append(f"loading takes {bytes_text(used_host.loading)} of host memory for a while, in every worker")
    found.append(
        "not counted: calibration, loading, the CUDA context and the allocator's spare room, and hidden states reused"
    )
    return found


def _edit(seconds: float | None) -> str:
    return " + ?" if seconds is None else f" + {seconds_text(seconds)}"


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
    for note in notes(first)[: 2 + len(first.devices)]:
        output.print(f"- {note}", markup=False, highlight=False, soft_wrap=True)


def _row(report: Estimate) -> list[str]:
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
