"""Records of stored searches beside each other."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from moevolve.evaluators.types import Split
from moevolve.search.compare.significance import Significance
from moevolve.search.loop.final_table import Score
from moevolve.store.records import CourseAxis, SearchStatus


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A setting that differs, by dotted path, with its value in each search as JSON; `-` where it doesn't exist.

    A whole section that some searches don't have is `set` in the others.
    """

    name: str
    values: tuple[str, ...]

    @property
    def is_partial(self) -> bool:
        return "-" in self.values


@dataclass(frozen=True, slots=True)
class ContrastedSearch:
    """One of several searches.

    Attributes:
        group: Place of its group.
        individuals: Number of individuals that were made.
        best: Highest fitness so far.
    """

    name: str
    seed: int
    group: int
    status: SearchStatus
    individuals: int
    hours: float
    best: float | None


@dataclass(frozen=True, slots=True)
class ContrastedGroup:
    """The course of the searches that differ only in the seed: the best fitness so far.

    Attributes:
        searches: Names of its searches, by seed.
        mean, low, high: Mean, lowest and highest over the searches, at the places `Contrast.x`; None where one of the
            searches has no fitness yet, or has ended.
    """

    place: int
    searches: tuple[str, ...]
    mean: tuple[float | None, ...] = field(repr=False)
    low: tuple[float | None, ...] = field(repr=False)
    high: tuple[float | None, ...] = field(repr=False)

    def at(self, place: int) -> tuple[float, float, float] | None:
        """Mean, lowest and highest fitness at a place of `Contrast.x`; None where they aren't known."""
        mean, low, high = self.mean[place], self.low[place], self.high[place]
        return None if mean is None or low is None or high is None else (mean, low, high)


@dataclass(frozen=True, slots=True)
class ContrastedModel:
    """The full model, or the winners of a group's searches.

    Attributes:
        label: Names of the searches, or `full model`, with the name of a search if the searches have several models.
        group: Place of the group; None for the full model.
        refs: The winners as SEARCH:INDEX.
        scores: Means over tasks and searches, one per split; intervals are over examples and, with several searches,
            over seeds.
        parameters: Number of parameters, mean over the winners.
        test: Paired test on `test` against the first group's winners; None for those, and where there are no outcomes
            on the same examples.
        corrected: The test's p-value, corrected for the number of tests (Holm).
    """

    label: str
    group: int | None
    refs: tuple[str, ...]
    scores: tuple[Score, ...]
    parameters: int | None
    test: Significance | None = None
    corrected: float | None = None

    def score(self, split: Split) -> Score | None:
        """The score on a split; None where not all winners were scored."""
        return next((each for each in self.scores if each.split == split), None)


@dataclass(frozen=True, slots=True)
class Contrast:
    """Searches beside each other.

    Attributes:
        by: What `x` counts: evaluated individuals, or hours in which the searches ran.
        searches: The searches, group by group, then by seed.
        settings: Settings in which they differ; values are in the order of `searches`.
        x: Places of the courses' points.
        models: The full model, and the winners of every group.
        comparable: Whether all have the same tasks with the same examples, without which scores can't be compared.
    """

    by: CourseAxis
    searches: tuple[ContrastedSearch, ...]
    settings: tuple[SettingRow, ...]
    groups: tuple[ContrastedGroup, ...]
    x: tuple[float, ...] = field(repr=False)
    models: tuple[ContrastedModel, ...] = field(repr=False)
    comparable: bool = True

    def points(self, count: int = 10) -> list[tuple[float, list[tuple[float, float, float] | None]]]:
        """At most `count` evenly spread places of the axis, with `ContrastedGroup.at` of every group, for tables."""
        if not self.x:
            return []
        places = sorted({bisect_right(self.x, self.x[-1] * part / count) - 1 for part in range(1, count + 1)} - {-1})
        return [(self.x[place], [group.at(place) for group in self.groups]) for place in places]

    @property
    def note(self) -> str:
        """How to read the scores and the tests."""
        said = "p: paired tests on test against the first group's winners, two-sided, corrected for their number."
        if any(model.test is not None and model.test.seeds == 1 for model in self.models):
            said += " With one seed they say nothing of what another seed would find."
        if not self.comparable:
            said += " The searches were scored on different tasks or examples: their scores can't be compared."
        return said
