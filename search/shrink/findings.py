"""What the steps of a shrink find: answers of the full model, checks of the winner, the checkpoint and its speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moevolve.evaluators.scales import SCALES, ScaleName
from moevolve.search.text import percent

# Ratio of the largest to the smallest gain in speed of single runs above which the machine did something else as well:
# on an idle one they differ by a few percent.
_BUSY = 1.3


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
        low, high: Smallest and largest ratio of the two in runs of both, one after the other.
        full_bytes, shrunk_bytes: Peak memory; None if it can't be measured.
    """

    device: str
    full: float
    shrunk: float
    low: float
    high: float
    full_bytes: int | None
    shrunk_bytes: int | None

    @property
    def times(self) -> float:
        """The new checkpoint's tokens per second as a multiple of the full model's."""
        return self.shrunk / self.full

    def __str__(self) -> str:
        return f"{self.shrunk:.4g} ({self.times:.2f}x; {self.low:.2f}x to {self.high:.2f}x)"

    @property
    def about(self) -> str:
        """What was measured, as a sentence without its full stop."""
        said = f"tokens/s and memory are those of plain transformers and one sequence on {self.device}"
        if self.high > _BUSY * self.low:
            said += ", which was busy: how much faster it is differs between runs, so measure it again"
        return said


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """What a winner's answers to held-out prompts of one task are like; see `moevolve.search.shrink.guard`.

    Attributes:
        task: Name of the task, or `general` and a domain of the general set.
        prompts: Number of prompts that were answered, the first ones of `test`.
        loops_full, loops: Number of the full model's and of the winner's answers that repeat themselves; the former is
            None if the winner alone has answered.
        structured: Number of the full model's answers that have JSON or a tool call; if it hasn't answered, of expected
            answers that are one, to prompts that the winner has answered completely.
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
    loops_full: int | None = 0
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
        loops = str(self.loops) if self.loops_full is None else f"{self.loops} (full model {self.loops_full})"
        return (
            str(self.prompts),
            loops if self.prompts else "-",
            f"{self.broken} of {self.structured}" if self.structured else "-",
            f"{percent(self.agreement)} %",
            "-" if self.perplexity is None else f"{self.perplexity:.2f}x",
            self.recovered,
        )

    @property
    def recovered(self) -> str:
        """The score on `test` beside the full model's: its share in %, or how many times the perplexity."""
        if self.recovery is None or not SCALES[self.scale].is_reciprocal:
            return "-" if self.recovery is None else f"{percent(self.recovery)} %"
        return f"{SCALES[self.scale].value(self.recovery):.2f} times"


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

    def lines(self) -> list[str]:
        """Return the same as lines for people."""
        return [str(self), *(f"  {each}" for each in self.examples)]

    def __str__(self) -> str:
        if self.score is None:
            return f"{self.task}: candidates are compared with the full model"
        scale, rows = SCALES[self.scale], f"on {self.rows} rows of `search`"
        return (
            f"{self.task}: the full model {'has' if scale.is_reciprocal else 'scores'} {scale.phrase(self.score)} "
            f"{rows} (a search needs {scale.phrase(self.least)})"
        )
