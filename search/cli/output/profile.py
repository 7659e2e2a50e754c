"""Prints profiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moevolve.search.cli.output.console import output, print_table
from moevolve.search.text import flop_count, memory_size, parameter_count, percent

if TYPE_CHECKING:
    from moevolve.workers.profiling.report import BatchProfile, ModelProfile, ProfileReport, ProfileSettings


def print_profile(report: ProfileReport) -> None:
    """Print a line per model and batch size."""
    settings, reference = report.settings, report.reference
    scored = any(model.score is not None for model in report.models)
    columns = [("model", False), *([("score", True)] if scored else [])]
    columns += [("parameters", True), ("active", True), ("weights", True), ("FLOPs\nper token", True)]
    columns += [("batch", True), ("peak\nmemory", True), ("prefill\ntokens/s", True), ("decode\ntokens/s", True)]
    columns.append(("answers/s", True))
    rows = [row for model in report.models for row in _rows(model, reference, scored)]
    ran = reference.load
    print_table(
        f"{_machine(report)}, {ran.dtype}, {_prompts(settings)} and {settings.new_tokens} new tokens, "
        f"medians of {settings.repeats}; ratios to {reference.label}",
        columns,
        rows,
    )
    output.print(f"peak memory: {report.peak_memory}")
    for note in report.notes:
        output.print(note, soft_wrap=True)


def _rows(model: ModelProfile, reference: ModelProfile, scored: bool) -> Iterator[list[str]]:
    """Make a line per batch size; cells that don't depend on it are in the first line only."""
    load, other = model.load, reference.load
    head = [
        model.label,
        *([percent(model.score)] if scored else []),
        f"{parameter_count(load.parameters)}\n{_share(load.parameters, other.parameters)}",
        f"{parameter_count(load.active_parameters)}\n{_share(load.active_parameters, other.active_parameters)}",
        f"{memory_size(load.weight_bytes)}\n{_share(load.weight_bytes, other.weight_bytes)}",
        f"{flop_count(model.flops)}\n{_share(model.flops, reference.flops)}",
    ]
    for mine, theirs in zip(model.batches, reference.batches, strict=True):
        yield [
            *head,
            str(mine.batch_size),
            _peak(mine, theirs),
            f"{mine.prefill_rate:,.0f}\n{mine.prefill_rate / theirs.prefill_rate:.2f}x",
            f"{mine.decode_rate:,.0f}\n{mine.decode_rate / theirs.decode_rate:.2f}x",
            f"{mine.answer_rate:,.1f}\n{mine.answer_rate / theirs.answer_rate:.2f}x",
        ]
        head = [""] * len(head)


def _prompts(settings: ProfileSettings) -> str:
    task = settings.prompts
    if task is None:
        return f"{settings.prompt_tokens} prompt"
    return f"prompts of {task.task} ({task.split}), {task.shortest} to {task.longest} tokens, {task.mean} on average,"


def _peak(mine: BatchProfile, theirs: BatchProfile) -> str:
    if mine.peak_bytes is None:
        return "-"
    share = f"\n{_share(mine.peak_bytes, theirs.peak_bytes)}" if theirs.peak_bytes else ""
    return memory_size(mine.peak_bytes) + share


def _machine(report: ProfileReport) -> str:
    ran = report.reference.load
    return ran.device_name if ran.device == "cuda" else f"CPU, {ran.threads} thread{'s' if ran.threads > 1 else ''}"


def _share(mine: int, theirs: int) -> str:
    return f"{100 * mine / theirs:.0f} %"
