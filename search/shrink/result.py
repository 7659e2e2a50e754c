"""The answer to a request to shrink a checkpoint, from the record of the shrink and the store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from moevolve.evaluators.records import short_repr
from moevolve.search.config.files import parse_stored_config
from moevolve.search.loop.final_table import FinalTable, build_final_table
from moevolve.search.results.gain import Gain, search_gain
from moevolve.search.running.weights import stored_facts
from moevolve.search.shrink.findings import Written, advice
from moevolve.search.shrink.record import ShrinkRecord
from moevolve.search.text import duration, memory_size, parameter_count
from moevolve.store.errors import NotFoundError
from moevolve.store.reader import StoreReader


@dataclass(frozen=True, slots=True)
class ShrinkPlan:
    """The run file of a dry run, for `moevolve launch`, and its content."""

    __repr__ = short_repr

    run_file: Path
    content: str


@dataclass(frozen=True)
class ShrinkResult:
    """A shrunk model, or a search without a candidate to export.

    Attributes:
        record: What the shrink has decided, done and found. Its `checks` are None without a winner, `written` is None
            if every candidate failed or the checks refused the winner, and `speed` if it couldn't be measured.
        store: URL of the store.
        experts_full, experts: Experts per layer before and after; the former is 0 for a dense model, the latter 1 for a
            narrower one and None without a winner.
        layers: Layers that have them.
        gain: What the search gained over the best one-shot choice; None without a winner, or without such a choice.
    """

    __repr__ = short_repr

    record: ShrinkRecord
    store: str
    table: FinalTable = field(repr=False)
    experts_full: int
    experts: int | None
    layers: int
    gain: Gain | None

    def sides(self) -> list[dict[str, str]]:
        """Return the model before and after, as rows of a table; empty if nothing was written."""
        best, written, speed = self.table.best, self.record.written, self.record.speed
        if best is None or written is None:
            return []
        layers = f"in each of {self.layers} layers"
        full, kept = f"{self.experts_full} {layers}", f"{self.experts} {layers}"
        if not self.experts_full:
            full, kept = "dense", kept if self.experts != 1 else "dense, narrower"
        names = ["model", "experts", "parameters", "weight files"]
        before = ["before", full, parameter_count(self.table.parameters_full), memory_size(self.record.weight_bytes)]
        after = ["after", kept, parameter_count(best.parameters), memory_size(written.weight_bytes)]
        if speed is not None:
            names += ["tokens/s", "peak memory"]
            before += [f"{speed.full:.4g}", memory_size(speed.full_bytes)]
            after += [str(speed), memory_size(speed.shrunk_bytes)]
        return [dict(zip(names, cells, strict=True)) for cells in (before, after)]

    def size_rows(self) -> list[dict[str, str]]:
        """Return the sizes that --keep-score tried, as rows of a table; empty without it."""
        return [
            {
                f"size {self.record.unit}": str(each.size),
                "by": "a search" if each.searched else "one-shot choices",
                "score kept on dev": "nothing, since all failed" if each.kept is None else str(each.kept),
            }
            for each in self.record.sizes
        ]

    def lines(self) -> list[str]:
        """Return what the checks found, what was written, how it is used and how it came about, as sentences."""
        record, lines = self.record, list[str]()
        if record.checks is not None:
            judged = [check for check in record.checks.tasks if check.known]
            unknown = [check.task for check in record.checks.tasks if not check.known]
            if unknown:
                lines.append(f"not judged, since the full model doesn't know them: {', '.join(unknown)}")
            if len(judged) > 1:
                lines.append(f"least like the full model: {min(judged, key=lambda check: check.agreement).task}")
            lines += [*record.checks.faults, *advice(record.checks.tasks), record.checks.about_loops]
        if self.table.best is None:
            lines.append("every candidate failed; see `moevolve searches` and `moevolve show` for the reasons")
        elif record.status == "refused":
            lines.append(f"{self.table.winner} was not exported; --force exports it all the same")
        elif record.written is None:
            lines.append(f"{self.table.winner} isn't exported yet")
        else:
            lines += self._written_lines(record.written)
        lines.append(f"the search is {self.table.search} in {self.store}; its settings are in {record.run_file}")
        lines += [] if self.gain is None else [str(self.gain)]
        return lines

    def _written_lines(self, written: Written) -> Iterator[str]:
        from moevolve.workers.export.folder import how_to_load, how_to_quantise  # which takes a while

        record = self.record
        if record.speed is not None:
            yield record.speed.about
        yield f"took {', '.join(f'{stage} {duration(seconds)}' for stage, seconds in record.seconds.items())}"
        yield from record.choices
        yield f"wrote {written.directory} ({written.form} checkpoint of {self.table.winner})"
        yield from (f"{title}: {names}" for title, names in written.changes)
        if written.directory.is_dir():
            yield from how_to_load(written.directory, written.form).splitlines()
            yield from how_to_quantise(written.directory, written.form)
        else:
            yield "it has been removed since"


def result_of(store: StoreReader, record: ShrinkRecord) -> ShrinkResult | None:
    """Return the result of a shrink so far; None before its search has ended."""
    if record.search is None:
        return None
    try:
        search = store.search(record.search)
    except NotFoundError:  # it is about to be recorded
        return None
    if search.status != "finished":
        return None
    config = parse_stored_config(search.config, search.name)
    table = build_final_table(store, search, config, store.history(search.id))
    facts = stored_facts(store, search)
    dense = facts.dense
    return ShrinkResult(
        record=record,
        store=store.location,
        table=table,
        experts_full=facts.experts,
        experts=None if table.winner is None else store.individual(table.winner).individual.experts,
        layers=len(facts.moe_layers) if dense is None else dense.layers,
        gain=search_gain(store, table),
    )
