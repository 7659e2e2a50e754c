"""Compares stored searches: settings that differ, and winners' scores with tests.

Searches whose settings differ only in the seed are a group. Means, intervals and tests are over the searches of a
group.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moevolve.evaluators.records import short_repr
from moevolve.evaluators.scales import ScaleName
from moevolve.evaluators.types import SCORED, Split
from moevolve.search.loop.final_table import FULL_LABEL
from moevolve.search.loop.scores import ModelScores, Score, SearchScores, compare, mean_score
from moevolve.search.loop.significance import Significance, holm
from moevolve.store.errors import parsing
from moevolve.store.reader import StoreReader
from moevolve.store.records import FULL_MODEL, SearchRecord, SearchStatus, SearchSummary

# Settings that say where a search is, not what it does.
_NEVER = ("name", "store")
# Settings in which the searches of a group may differ.
_OF_A_RUN = ("seed", "workers", "loggers")


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A setting that differs, by dotted path, with its value in each search as JSON; `-` where it doesn't exist.

    A whole section that some searches don't have is `set` in the others.
    """

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ComparedSearch:
    """One of several searches.

    Attributes:
        group: Place of its group.
        individuals: Number of individuals that were made.
        hours: Hours in which it ran.
        best: Highest fitness so far.
        scale: Scale that the fitness is shown on.
    """

    name: str
    seed: int
    group: int
    status: SearchStatus
    individuals: int
    hours: float
    best: float | None
    scale: ScaleName = "percent"


@dataclass(frozen=True, slots=True)
class ComparedModel:
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
        """Return the score on a split; None where not all winners were scored."""
        return next((each for each in self.scores if each.split == split), None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Searches beside each other.

    Attributes:
        searches: The searches, group by group, then by seed.
        settings: Settings in which they differ; values are in the order of `searches`.
        models: The full model, and the winners of every group.
        comparable: Whether all have the same tasks with the same examples, without which scores can't be compared.
    """

    __repr__ = short_repr

    searches: tuple[ComparedSearch, ...]
    settings: tuple[SettingRow, ...]
    models: tuple[ComparedModel, ...] = field(repr=False)
    comparable: bool = True

    @property
    def note(self) -> str:
        """How to read the scores and the tests."""
        note = "p: paired tests on test against the first group's winners, two-sided, corrected for their number."
        if any(model.test is not None and model.test.seeds == 1 for model in self.models):
            note += " With one seed they don't cover the variation between seeds."
        if not self.comparable:
            note += " The searches were scored on different tasks or examples: their scores can't be compared."
        return note


@dataclass(frozen=True)
class _Member:
    """One search: its summary, flat settings, and scores of its winner, if any, and of its full model."""

    summary: SearchSummary
    settings: Mapping[str, str]
    fingerprints: frozenset[tuple[str, str, str]]
    winner: ModelScores | None
    full: ModelScores
    parameters: int | None
    parameters_full: int | None

    @property
    def search(self) -> SearchRecord:
        return self.summary.search


def compare_searches(store: StoreReader, names: Sequence[str]) -> Comparison:
    """Compare stored searches, by name or id, with tests against the first one's group. Nothing is evaluated.

    Raises:
        StoreError: There is no such search.
    """
    wanted = dict.fromkeys(store.search(name).id for name in names)
    summaries = {summary.search.id: summary for summary in store.searches()}
    members = [_member(store, summaries[search_id]) for search_id in wanted]
    groups = _grouped(members)
    tests = [None, *(_test(group, groups[0]) for group in groups[1:])]
    corrected = holm([None if test is None else test.p for test in tests])
    winners = [
        replace(_winners(place, group), test=test, corrected=p)
        for place, (group, test, p) in enumerate(zip(groups, tests, corrected, strict=True))
    ]
    return Comparison(
        searches=tuple(
            ComparedSearch(
                one.search.name,
                one.search.seed,
                place,
                one.search.status,
                one.summary.individuals,
                store.hours(one.search.id),
                one.summary.best_fitness,
                one.summary.scale,
            )
            for place, group in enumerate(groups)
            for one in group
        ),
        settings=tuple(_differing([one for group in groups for one in group])),
        models=tuple(model for model in (*_full_models(members), *winners) if model.scores),
        comparable=len({one.fingerprints for one in members}) == 1,
    )


def _member(store: StoreReader, summary: SearchSummary) -> _Member:
    record = summary.search
    with parsing(f"the configuration of search {record.name}"):
        settings = dict(_flat(json.loads(record.config)))
    winner = None if record.winner is None else store.individual(f"{record.id}:{record.winner}").individual
    tasks = [task for task in store.search_tasks(record.id) if task.split in SCORED]
    full, *won = SearchScores(store, record).of([FULL_MODEL, *([] if winner is None else [winner.phenotype_hash])])
    return _Member(
        summary=summary,
        settings=settings,
        fingerprints=frozenset((task.task, task.split, task.task_fingerprint) for task in tasks),
        winner=won[0] if won and won[0].evaluations else None,
        full=full,
        parameters=None if winner is None else winner.parameters,
        parameters_full=None if winner is None else winner.parameters_full,
    )


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Return the leaves of nested settings by dotted path, as JSON, and `set` for every section."""
    sections = isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value)
    if sections or (isinstance(value, dict) and value):
        if isinstance(value, dict) and path:
            yield path, "set"
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        yield path, ", ".join(map(str, value))
    else:
        yield path, value if isinstance(value, str) else json.dumps(value)


def _grouped(members: Sequence[_Member]) -> list[list[_Member]]:
    """Return the searches that differ only in the seed and in their workers, by seed."""
    groups: dict[tuple[object, ...], list[_Member]] = {}
    for one in members:
        own = {key: value for key, value in one.settings.items() if key.split(".")[0] not in (*_NEVER, *_OF_A_RUN)}
        # An imported search has no settings of its own.
        key = (frozenset(own.items()), one.search.model_fingerprint, "" if own else one.search.id)
        groups.setdefault(key, []).append(one)
    return [sorted(group, key=lambda one: one.search.seed) for group in groups.values()]


def _differing(members: Sequence[_Member]) -> Iterator[SettingRow]:
    names = dict.fromkeys(name for one in members for name in one.settings)
    for name in names:
        values = tuple(one.settings.get(name, "-") for one in members)
        if name.split(".")[0] not in _NEVER and len(set(values)) > 1:
            yield SettingRow(name, values)


def _full_models(members: Sequence[_Member]) -> list[ComparedModel]:
    """Return the unedited model of the searches, or each one if they have several."""
    firsts = {one.search.model_fingerprint: one for one in reversed(members)}
    several = len(firsts) > 1
    return [
        ComparedModel(
            f"{FULL_LABEL} of {one.search.name}" if several else FULL_LABEL,
            None,
            (),
            _scores([one.full]),
            one.parameters_full,
        )
        for one in reversed(firsts.values())
    ]


def _winners(place: int, group: Sequence[_Member]) -> ComparedModel:
    won = [one for one in group if one.winner is not None]
    sizes = [one.parameters for one in won if one.parameters is not None]
    return ComparedModel(
        ", ".join(one.search.name for one in group),
        place,
        tuple(f"{one.search.name}:{one.search.winner}" for one in won),
        _scores([one.winner for one in won if one.winner is not None]),
        round(sum(sizes) / len(sizes)) if sizes else None,
    )


def _scores(models: Sequence[ModelScores]) -> tuple[Score, ...]:
    """Return the mean over tasks and seeds of every split on which all models were scored."""
    return tuple(score for split in SCORED if (score := mean_score(models, split)) is not None)


def _test(group: Sequence[_Member], first: Sequence[_Member]) -> Significance | None:
    """Return the paired test on `test` against the first group: searches of the same seed, or in the order of seeds."""
    mine, theirs = ([one.winner for one in side if one.winner is not None] for side in (group, first))
    common = {one.seed for one in mine} & {one.seed for one in theirs}
    if common:
        mine, theirs = ([one for one in side if one.seed in common] for side in (mine, theirs))
    else:
        pairs = list(zip(mine, theirs, strict=False))
        mine, theirs = ([replace(pair[side], seed=place) for place, pair in enumerate(pairs)] for side in (0, 1))
    return compare(mine, theirs, "test")
