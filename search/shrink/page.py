"""Records that answer a request to shrink a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moevolve.evaluators.records import short_repr
from moevolve.evaluators.scales import SCALES, ScaleName
from moevolve.search.loop.final_table import FinalTable
from moevolve.search.results.gain import Gain
from moevolve.search.results.kept import SizePoint
from moevolve.search.shrink.loops import Loops
from moevolve.search.text import duration, html_lines, html_table, memory_size, parameter_count, percent


@dataclass(frozen=True, slots=True)
class ShrinkPlan:
    """The run file of a dry run, for `moevolve launch`, and its content."""

    __repr__ = short_repr

    run_file: Path
    content: str


@dataclass(frozen=True, slots=True)
class Written:
    """The new checkpoint.

    Attributes:
        weight_bytes: Size of its weight files.
        loads_in: Programs that load it; see `moevolve.workers.export.servers`.
        changes: See `ExportReport`; empty if an earlier command wrote it.
    """

    directory: Path
    form: str
    weight_bytes: int
    loads_in: tuple[str, ...]
    changes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast the full model and a new checkpoint generate, and in how much memory, in plain `transformers`.

    Attributes:
        device: Name of the device.
        full, shrunk: New tokens per second, one sequence at once.
        full_bytes, shrunk_bytes: Peak memory; None if it can't be measured.
    """

    device: str
    full: float
    shrunk: float
    full_bytes: int | None
    shrunk_bytes: int | None

    @property
    def times(self) -> float:
        """The new checkpoint's tokens per second as a multiple of the full model's."""
        return self.shrunk / self.full


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """What a winner's answers to held-out prompts of one task are like; see `moevolve.search.shrink.guard`.

    Attributes:
        task: Name of the task, or `general` and a domain of the general set.
        prompts: Number of prompts that were answered, the first ones of `test`.
        loops_full, loops: Number of the full model's and of the winner's answers that repeat themselves.
        structured: Number of the full model's answers that have JSON or a tool call.
        broken: Number of those where the winner's answer doesn't have the same.
        agreement: Overlap with the full model's predictions on the first of these rows, in [0, 1].
        perplexity: The winner's perplexity on them as a multiple of the full model's; None if it has none.
        recovery: Score on `test` as a share of the full model's; None if it isn't known.
        known: False for a domain of the general set that the full model doesn't know itself.
        graded: True if the task's answers are right or wrong, so that `recovery` says what it lost. Its perplexity,
            which is mostly of prompts, isn't judged then.
        unscored: Why the winner or the full model has no score on `test`; None if both have one, or none was asked for.
        scale: Scale that the scores on `test` are shown on.
        general: True for a domain of the general set that ships.
        faults: What exceeds the limits, each as the end of a sentence that begins with the candidate.
    """

    task: str
    prompts: int = 0
    loops_full: int = 0
    loops: int = 0
    structured: int = 0
    broken: int = 0
    agreement: float = 0.0
    perplexity: float | None = None
    recovery: float | None = None
    known: bool = True
    graded: bool = False
    unscored: str | None = None
    scale: ScaleName = "percent"
    general: bool = False
    faults: tuple[str, ...] = ()

    @property
    def cells(self) -> tuple[str, ...]:
        """The numbers as texts of a table: prompts, loops, broken answers, agreement, perplexity and recovery."""
        return (
            str(self.prompts),
            f"{self.loops} (full model {self.loops_full})",
            f"{self.broken} of {self.structured}" if self.structured else "-",
            percent(self.agreement),
            "-" if self.perplexity is None else f"{self.perplexity:.2f} times",
            self.recovered,
        )

    @property
    def recovered(self) -> str:
        """The score on `test` beside the full model's: its share in %, or how many times the perplexity."""
        if self.recovery is None or not SCALES[self.scale].is_reciprocal:
            return percent(self.recovery)
        return f"{SCALES[self.scale].value(self.recovery):.2f} times"


def faults_found(checks: Sequence[TaskCheck], loops: Loops | None) -> list[str]:
    """What the checks of a winner have found, as sentences."""
    found = [f"{check.task}: the candidate {fault}" for check in checks for fault in check.faults]
    return found if loops is None or loops.fault is None else [*found, f"all prompts: the candidate {loops.fault}"]


def advice(checks: Sequence[TaskCheck]) -> list[str]:
    """Say what to do about text outside the data that got too much worse; empty if none did."""
    lost = [check.task for check in checks if check.general and check.faults]
    if not lost:
        return []
    text = (
        f"{', '.join(lost)}: the data has no such text, so nothing kept what it needs; give some with another --data "
        "FILE, which then has as many rows in the calibration as every other file, or keep more of the model"
    )
    return [text]


@dataclass(frozen=True, slots=True)
class TaskLook:
    """The full model's answers to one task, before a search.

    Attributes:
        rows: Number of rows of `search` that are scored.
        score: Score of these rows, in [0, 1]; None if a candidate's answers are compared with the full model's.
        least: Score below which the full model doesn't know the task: what guessing among choices, or among all tokens,
            gives, or 0.2.
        examples: Lines on the first prompts with the expected and the given answers, or on the first texts with their
            perplexity, if these are the score; empty if there are none to show.
        scale: Scale that the score is shown on.
    """

    task: str
    rows: int = 0
    score: float | None = None
    least: float = 0.0
    examples: tuple[str, ...] = ()
    scale: ScaleName = "percent"

    def __str__(self) -> str:
        if self.score is None:
            return f"{self.task}: candidates are compared with the full model"
        scale, rows = SCALES[self.scale], f"on {self.rows} rows of `search`"
        return (
            f"{self.task}: the full model {'has' if scale.is_reciprocal else 'scores'} {scale.phrase(self.score)} "
            f"{rows} (a search needs {scale.phrase(self.least)})"
        )


@dataclass(frozen=True, slots=True)
class KeptMass:
    """How much of one task's routing the kept experts would have, before a search has chosen them.

    Attributes:
        mass: Share of the full model's routing weights on the experts that all tasks together use most, in [0, 1].
        alone: The same for the experts that this task uses most.
    """

    task: str
    mass: float
    alone: float

    def __str__(self) -> str:
        return (
            f"{self.task}: the experts that all tasks use most have {self.mass:.0%} of its routing weights, those that "
            f"it uses most itself {self.alone:.0%}"
        )


@dataclass(frozen=True, slots=True)
class FirstLook:
    """What the full model makes of the data, before a search.

    Attributes:
        tasks: Its answers and scores by task.
        routing: How much of each task's routing as many experts have as are kept; empty if all are kept, or their
            number is searched.
    """

    tasks: tuple[TaskLook, ...]
    routing: tuple[KeptMass, ...]

    def lines(self) -> list[str]:
        """The same as lines for people."""
        lines = [text for task in self.tasks for text in (str(task), *(f"  {each}" for each in task.examples))]
        return [*lines, *map(str, self.routing)]


@dataclass(frozen=True)
class ShrinkResult:
    """A shrunk model, or a search without a candidate to export.

    Attributes:
        choices: Sentences about what was chosen: what is kept, and how it follows from the score or the time that was
            given.
        experts_full, experts: Experts per layer before and after; the former is 0 for a dense model, the latter 1 for a
            narrower one and None without a winner.
        layers: Layers that have them.
        weight_bytes: Size of the checkpoint's weight files.
        first_look: What the full model makes of the data.
        gain: What the search gained over the best one-shot choice; None without a winner, or without such a choice.
        code_gain: What a winner that needs its own code gains over the best of those that don't; None without both.
        sizes: What winners of different sizes keep of the full model's score, with --keep-score; else empty.
        seconds: Duration of each stage by its title; those of a search that was continued are of its last part.
        checks: What the winner's answers are like, by task; empty without a winner.
        loops: How often it repeats itself; None without a winner.
        written: The new checkpoint; None if every candidate failed, or the checks refused the winner.
        speed: Measured speeds; None if nothing was written, or they couldn't be measured.
        pushed: URL of the repository of the hub that has the new checkpoint; None without one.
    """

    __repr__ = short_repr

    model: str
    run_file: Path
    choices: tuple[str, ...]
    store: str
    table: FinalTable = field(repr=False)
    experts_full: int
    experts: int | None
    layers: int
    weight_bytes: int
    first_look: FirstLook
    gain: Gain | None
    code_gain: Gain | None
    sizes: tuple[SizePoint, ...]
    seconds: Mapping[str, float]
    checks: tuple[TaskCheck, ...] = ()
    loops: Loops | None = None
    written: Written | None = None
    speed: Speed | None = None
    pushed: str | None = None

    def sides(self) -> list[dict[str, str]]:
        """The model before and after, as rows of a table; empty if nothing was written."""
        best, written, speed = self.table.best, self.written, self.speed
        if best is None or written is None:
            return []
        layers = f"in each of {self.layers} layers"
        full, kept = f"{self.experts_full} {layers}", f"{self.experts} {layers}"
        if not self.experts_full:
            full, kept = "dense", kept if self.experts != 1 else "dense, narrower"
        names = ["model", "experts", "parameters", "weight files"]
        before = ["before", full, parameter_count(self.table.parameters_full), memory_size(self.weight_bytes)]
        after = ["after", kept, parameter_count(best.parameters), memory_size(written.weight_bytes)]
        if speed is not None:
            names += ["tokens/s", "peak memory"]
            before += [f"{speed.full:.4g}", memory_size(speed.full_bytes)]
            after += [f"{speed.shrunk:.4g} ({speed.times:.2f}x)", memory_size(speed.shrunk_bytes)]
        return [dict(zip(names, cells, strict=True)) for cells in (before, after)]

    def size_rows(self) -> list[dict[str, str]]:
        """What winners of different sizes keep, as rows of a table."""
        return [
            {
                "winner of": each.search,
                "parameters": f"{percent(each.parameters)} %",
                "score kept on dev": str(each.kept),
            }
            for each in self.sizes
        ]

    def lines(self) -> list[str]:
        """The sentences of the page: what the checks found, what was written, how it is used, and how it came about."""
        lines, judged = [], [check for check in self.checks if check.known]
        unknown = [check.task for check in self.checks if not check.known]
        if unknown:
            lines.append(f"not judged, since the full model doesn't know them: {', '.join(unknown)}")
        if judged:
            lines.append(f"least like the full model: {min(judged, key=lambda check: check.agreement).task}")
        lines += faults_found(self.checks, self.loops)
        lines += advice(self.checks)
        lines += [] if self.loops is None else [str(self.loops)]
        if self.table.best is None:
            lines.append("every candidate failed; see `moevolve searches` and `moevolve show` for the reasons")
        elif self.written is None:
            lines.append(f"{self.table.winner} was not exported; --force exports it all the same")
        else:
            lines += self._written_lines(self.written)
        lines.append(f"the search is {self.table.search} in {self.store}; its settings are in {self.run_file}")
        lines += [str(gain) for gain in (self.code_gain, self.gain) if gain is not None]
        return lines if self.pushed is None else [*lines, f"uploaded to {self.pushed}"]

    def _written_lines(self, written: Written) -> Iterator[str]:
        from moevolve.workers.export.folder import how_to_load, how_to_quantise  # which takes a while

        if self.speed is not None:
            yield f"tokens/s and memory are those of plain transformers and one sequence on {self.speed.device}"
        yield f"took {', '.join(f'{stage} {duration(seconds)}' for stage, seconds in self.seconds.items())}"
        yield from self.choices
        yield f"wrote {written.directory} ({written.form} checkpoint of {self.table.winner})"
        yield from (f"{title}: {names}" for title, names in written.changes)
        if written.directory.is_dir():
            yield from how_to_load(written.directory, written.form).splitlines()
            yield from how_to_quantise(written.directory, written.form)
        else:
            yield "it has been removed since"

    def _repr_html_(self) -> str:
        tables = [html_table(rows) for rows in (self.sides(), self.size_rows()) if rows]
        return "".join([self.table._repr_html_(), *tables, html_lines(self.lines())])
