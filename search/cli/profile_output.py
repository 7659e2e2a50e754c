"""How a profile is shown: one table, or one JSON document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moevolve.search.cli._console import millions, output, print_table

if TYPE_CHECKING:
    from moevolve.workers.profiling.report import BatchProfile, ModelProfile, ProfileReport


def report_json(report: ProfileReport) -> dict[str, Any]:
    """Everything that was measured, with ratios to the reference, as plain values."""
    reference = report.reference
    ran = reference.load
    return {
        "device": ran.device,
        "device_name": ran.device_name,
        "threads": ran.threads,
        "settings": asdict(report.settings),
        "context": report.settings.prompt_tokens,
        "memory": _memory(report),
        "reference": reference.label,
        "notes": report.notes,
        "models": [_model_json(model, reference) for model in report.models],
    }


def _model_json(model: ModelProfile, reference: ModelProfile) -> dict[str, Any]:
    load, other = model.load, reference.load
    pairs = zip(model.batches, reference.batches, strict=True)
    return {
        "id": model.label,
        "model_type": load.model_type,
        "dtype": load.dtype,
        "attention": load.attention,
        "experts": load.experts,
        "parameters": load.parameters,
        "active_parameters": load.active_parameters,
        "weight_bytes": load.weight_bytes,
        "flops_per_token": model.flops,
        "linear_flops": load.linear_flops,
        "attention_flops": load.attention_flops,
        "ratios": {
            "parameters": load.parameters / other.parameters,
            "active_parameters": load.active_parameters / other.active_parameters,
            "weight_bytes": load.weight_bytes / other.weight_bytes,
            "flops_per_token": model.flops / reference.flops,
        },
        "batches": [_batch_json(mine, theirs) for mine, theirs in pairs],
    }


def _batch_json(mine: BatchProfile, theirs: BatchProfile) -> dict[str, Any]:
    return {
        "batch_size": mine.batch_size,
        "peak_bytes": mine.peak_bytes,
        "prefill_tokens_per_second": mine.prefill_rate,
        "decode_tokens_per_second": mine.decode_rate,
        "prefill_seconds": mine.prefill_seconds,
        "decode_seconds": mine.decode_seconds,
        "ratios": {
            "peak_bytes": _peak_ratio(mine, theirs),
            "prefill_tokens_per_second": mine.prefill_rate / theirs.prefill_rate,
            "decode_tokens_per_second": mine.decode_rate / theirs.decode_rate,
        },
    }


def _peak_ratio(mine: BatchProfile, theirs: BatchProfile) -> float | None:
    return mine.peak_bytes / theirs.peak_bytes if mine.peak_bytes and theirs.peak_bytes else None


def print_profile(report: ProfileReport) -> None:
    """A line per model and batch size."""
    settings, reference = report.settings, report.reference
    columns = [("model", False), ("parameters", True), ("active", True), ("weights", True), ("FLOPs/token", True)]
    columns += [("batch", True), ("peak memory", True), ("prefill tokens/s", True), ("decode tokens/s", True)]
    rows = [row for model in report.models for row in _rows(model, reference)]
    ran = reference.load
    print_table(
        f"{_machine(report)}, {ran.dtype}, {settings.prompt_tokens} prompt and {settings.new_tokens} new tokens, "
        f"medians of {settings.repeats}; ratios to {reference.label}",
        columns,
        rows,
    )
    output.print(f"peak memory: {_memory(report)}", highlight=False)
    for note in report.notes:
        output.print(note, markup=False, highlight=False, soft_wrap=True)


def _rows(model: ModelProfile, reference: ModelProfile) -> Iterator[list[str]]:
    """One line per batch size; what doesn't depend on it stands in the first."""
    load, other = model.load, reference.load
    head = [
        model.label,
        f"{millions(load.parameters)}\n{_share(load.parameters, other.parameters)}",
        f"{millions(load.active_parameters)}\n{_share(load.active_parameters, other.active_parameters)}",
        f"{_bytes(load.weight_bytes)}\n{_share(load.weight_bytes, other.weight_bytes)}",
        f"{_operations(model.flops)}\n{_share(model.flops, reference.flops)}",
    ]
    for mine, theirs in zip(model.batches, reference.batches, strict=True):
        yield [
            *head,
            str(mine.batch_size),
            _peak(mine, theirs),
            f"{mine.prefill_rate:,.0f} ({mine.prefill_rate / theirs.prefill_rate:.2f}x)",
            f"{mine.decode_rate:,.0f} ({mine.decode_rate / theirs.decode_rate:.2f}x)",
        ]
        head = [""] * len(head)


def _peak(mine: BatchProfile, theirs: BatchProfile) -> str:
    if mine.peak_bytes is None:
        return "-"
    return _bytes(mine.peak_bytes) + (f" ({_share(mine.peak_bytes, theirs.peak_bytes)})" if theirs.peak_bytes else "")


def _machine(report: ProfileReport) -> str:
    ran = report.reference.load
    return ran.device_name if ran.device == "cuda" else f"CPU, {ran.threads} thread{'s' if ran.threads > 1 else ''}"


def _share(mine: int, theirs: int) -> str:
    return f"{100 * mine / theirs:.0f} %"


def _bytes(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 10 * 2**30 else f"{size / 2**20:,.0f} MiB"


def _operations(flops: int) -> str:
    return f"{flops / 1e9:,.2f} G" if flops >= 1e9 else f"{flops / 1e6:,.2f} M"


def _memory(report: ProfileReport) -> str:
    """What `peak memory` is on this device."""
    if report.reference.load.device == "cuda":
        return "torch.cuda.max_memory_allocated, summed over devices"
    if any(batch.peak_bytes is None for model in report.models for batch in model.batches):
        return "not measured: this system doesn't tell a process's peak"
    return "peak resident set of the model's process while it runs, less the one right before it was loaded"
