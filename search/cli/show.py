"""`show`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import moevolve
from moevolve.search.cli._console import output, percent, print_json, print_table
from moevolve.search.cli._options import DEFAULT_STORE, IndividualArgument, JsonOption, StoreOption
from moevolve.search.genomes.registry import counted, parts_of

if TYPE_CHECKING:
    from moevolve.store.records import IndividualRecord


def show(individual: IndividualArgument, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """Everything the store knows of one individual."""
    detail = moevolve.show(individual, store=store)
    if as_json:
        print_json(detail)
        return
    record, kind = detail.individual, detail.search.genome_kind
    lines = [
        ("individual", detail.ref),
        ("genome", f"{detail.search.genome_kind}: {record.summary}"),
        ("made by", f"{record.operator} in phase {record.phase}, depth {record.depth}"),
        ("parents", ", ".join(f"{detail.search.name}:{parent}" for parent in record.parents) or "none"),
        (parts_of([kind]), counted(kind, record.experts, record.active)),
        (
            "parameters",
            (
                f"{record.parameters:,} of {record.parameters_full:,} "
                f"({100 * record.parameters / record.parameters_full:.1f} %), {record.active_parameters:,} active"
            ),
        ),
        ("status", _status(record)),
        (
            "fitness",
            "-" if record.fitness is None else f"{percent(record.fitness)} (tie-break {record.tie_break:.4f})",
        ),
        ("content hash", record.content_hash),
        ("exports", ", ".join(f"{export.path} ({export.form})" for export in detail.exports) or "none"),
    ]
    for label, value in lines:
        output.print(f"{label:>13}  ", style="bold", end="")
        output.print(value, soft_wrap=True)
    columns = [
        ("task", False),
        ("split", False),
        ("score", True),
        ("gold log-prob", True),
        ("examples", True),
        ("seconds", True),
        ("attempt", True),
        ("failure", False),
    ]
    rows = [
        [
            item.task,
            item.split,
            percent(item.score),
            "-" if item.gold_logprob is None else f"{item.gold_logprob:.4f}",
            str(item.examples_seen),
            f"{item.seconds:.2f}",
            str(item.attempt),
            item.failure or "",
        ]
        for item in detail.evaluations
    ]
    print_table(None, columns, rows)


def _status(one: IndividualRecord) -> str:
    """The status, and of a failed one whose fault it was and why."""
    return one.status + (f" ({one.failure_kind}): {one.failure}" if one.failure else "")
