"""Compares stored searches: best fitness over evaluations or hours, settings that differ, winners' scores with tests.

Searches whose settings differ only in the seed are a group. Means, ranges, intervals and tests are over the searches
of a group.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.types import SCORED, Split
from moevolve.search.compare.contrasted import (
    Contrast,
    ContrastedGroup,
    ContrastedModel,
    ContrastedSearch,
    SettingRow,
)
from moevolve.search.compare.significance import Significance, TaskOutcomes, holm, paired_test, score_interval
from moevolve.search.loop.final_table import FULL_LABEL, Score
from moevolve.search.loop.scores import outcomes_of
from moevolve.store.reader import StoreReader
from moevolve.store.records import FULL_MODEL, Course, CourseAxis, EvaluationRecord, SearchRecord

_NEVER = ("name", "store")
"""Settings that say where a search is, not what it does."""
_OF_A_RUN = ("seed", "workers")
"""Settings in which the searches of a group may differ."""


@dataclass(frozen=True)
class _Member:
    """One search: its record, course, flat settings, and evaluations of a phenotype by task and split."""

    search: SearchRecord
    course: Course
    settings: Mapping[str, str]
    weights: Mapping[tuple[str, Split], float]
    fingerprints: Mapping[tuple[str, Split], str]
    winner: Mapping[tuple[str, Split], EvaluationRecord]
    full: Mapping[tuple[str, Split], EvaluationRecord]
    parameters: int | None
    parameters_full: int | None


def contrast(store: StoreReader, searches: Sequence[str], by: CourseAxis = "evaluations") -> Contrast:
    """Compare stored searches, given by name or id; courses are over `by`."""
    records = {record.id: record for record in map(store.search, searches)}
    members = [_member(store, record) for record in records.values()]
    groups = _grouped(members)
    axis = _axis(members, by)
    winners = [_winners(place, group) for place, group in enumerate(groups)]
    tests = [None, *(_test(group, groups[0]) for group in groups[1:])]
    corrected = iter(holm([test.p for test in tests if test is not None]))
    tested = [
        model if test is None else replace(model, test=test, corrected=next(corrected))
        for model, test in zip(winners, tests, strict=True)
    ]
    return Contrast(
        by=by,
        searches=tuple(_shown(one, place) for place, group in enumerate(groups) for one in group),
        settings=tuple(_differing([one for group in groups for one in group])),
        groups=tuple(_group(place, group, axis, by) for place, group in enumerate(groups)),
        x=tuple(axis.tolist()),
        models=tuple(model for model in (*_full_models(members), *tested) if model.scores),
        comparable=len({frozenset(one.fingerprints.items()) for one in members}) == 1,
    )


def _member(store: StoreReader, record: SearchRecord) -> _Member:
    tasks = [one for one in store.search_tasks(record.id) if one.split in SCORED]
    fingerprints = {(one.task, one.split): one.task_fingerprint for one in tasks}
    winner = None if record.winner is None else store.individual(f"{record.id}:{record.winner}").individual
    hashes = [FULL_MODEL, *([] if winner is None else [winner.phenotype_hash])]
    found = store.evaluations(
        hashes, record.model_fingerprint, record.engine_fingerprint, sorted(set(fingerprints.values()))
    )
    by_model = {
        phenotype: {(one.task, one.split): one for one in found if one.phenotype_hash == phenotype}
        for phenotype in hashes
    }
    return _Member(
        search=record,
        course=store.course(record.id),
        settings=dict(_flat(json.loads(record.config))),
        weights={(one.task, one.split): one.weight for one in tasks},
        fingerprints=fingerprints,
        winner={} if winner is None else by_model[winner.phenotype_hash],
        full=by_model[FULL_MODEL],
        parameters=None if winner is None else winner.parameters,
        parameters_full=None if winner is None else winner.parameters_full,
    )


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of nested settings by dotted path, as JSON, and `set` for every section."""
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
    """The searches that differ only in the seed and in their workers, by seed."""
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


def _shown(one: _Member, group: int) -> ContrastedSearch:
    best = max((step.fitness for step in one.course.steps), default=None)
    search, course = one.search, one.course
    return ContrastedSearch(search.name, search.seed, group, search.status, course.individuals, course.hours, best)


def _axis(members: Sequence[_Member], by: CourseAxis) -> NDArray[np.float64]:
    """All points at which the best fitness of a search rises, or the search ends, ascending: float64 [points]."""
    places = [place for one in members for place in (*_steps(one.course, by)[0], _end(one.course, by))]
    return np.unique(np.array(places, dtype=np.float64))


def _end(course: Course, by: CourseAxis) -> float:
    return float(course.individuals) if by == "evaluations" else course.hours


def _steps(course: Course, by: CourseAxis) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The points at which the best fitness rises, and its values there: float64 [steps] each."""
    if by == "hours":
        pairs = [(step.hours, step.fitness) for step in course.steps]
    else:
        pairs = sorted((step.index + 1.0, step.fitness) for step in course.steps)
    risen: list[tuple[float, float]] = []
    for place, fitness in pairs:
        if not risen or fitness > risen[-1][1]:
            risen.append((place, fitness))
    both = np.array(risen, dtype=np.float64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _group(place: int, group: Sequence[_Member], axis: NDArray[np.float64], by: CourseAxis) -> ContrastedGroup:
    """Mean and range of the best fitness over a group's searches; None where not all of them have one."""
    curves = np.full((len(group), len(axis)), np.nan)
    for curve, one in zip(curves, group, strict=True):
        places, fitness = _steps(one.course, by)
        at = np.searchsorted(places, axis, side="right") - 1
        known = (at >= 0) & (axis <= _end(one.course, by))
        curve[known] = fitness[at[known]]
    whole = ~np.isnan(curves).any(axis=0)
    mean, low, high = (
        tuple(float(value) if there else None for value, there in zip(values, whole, strict=True))
        for values in (curves.mean(axis=0), curves.min(axis=0), curves.max(axis=0))
    )
    return ContrastedGroup(place, tuple(one.search.name for one in group), mean, low, high)


def _full_models(members: Sequence[_Member]) -> list[ContrastedModel]:
    """The unedited model of the searches, or each one if they have several."""
    firsts = {one.search.model_fingerprint: one for one in reversed(members)}
    return [
        ContrastedModel(
            FULL_LABEL if len(firsts) == 1 else f"{FULL_LABEL} of {one.search.name}",
            None,
            (),
            tuple(_scores([one], [one.full])),
            one.parameters_full,
        )
        for one in reversed(firsts.values())
    ]


def _winners(place: int, group: Sequence[_Member]) -> ContrastedModel:
    won = [one for one in group if one.winner]
    sizes = [one.parameters for one in won if one.parameters is not None]
    return ContrastedModel(
        ", ".join(one.search.name for one in group),
        place,
        tuple(f"{one.search.name}:{one.search.winner}" for one in won),
        tuple(_scores(won, [one.winner for one in won])) if won else (),
        round(sum(sizes) / len(sizes)) if sizes else None,
    )


def _scores(
    members: Sequence[_Member], found: Sequence[Mapping[tuple[str, Split], EvaluationRecord]]
) -> Iterator[Score]:
    """Per split, the weighted mean over tasks and the mean over searches; left out where an evaluation is missing."""
    for split in SCORED:
        outcomes = _outcomes(members, found, split)
        if not outcomes:
            continue
        tasks = [task for task, of in members[0].weights if of == split]
        weights = [each.weight for each in outcomes]
        values = [
            sum(weight * (each[task, split].score or 0.0) for task, weight in zip(tasks, weights, strict=True))
            / sum(weights)
            for each in found
        ]
        low, high = score_interval(outcomes)
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
        yield Score("", split, float(np.mean(values)), low, high, spread)


def _outcomes(
    members: Sequence[_Member], found: Sequence[Mapping[tuple[str, Split], EvaluationRecord]], split: Split
) -> list[TaskOutcomes]:
    """Per task of a split, the outcomes of all searches; empty if one has none, or has scored other examples."""
    pieces = []
    for (task, of), weight in members[0].weights.items() if members else ():
        if of != split:
            continue
        rows = [each[task, split] for each in found if (task, split) in each]
        values = [outcomes_of(row) for row in rows]
        same = {one.fingerprints.get((task, split)) for one in members}
        if len(rows) < len(found) or len(same) > 1 or not values[0].size or len({each.size for each in values}) > 1:
            return []
        pieces.append(TaskOutcomes(np.stack(values), rows[0].metric, weight))
    return pieces


def _test(group: Sequence[_Member], first: Sequence[_Member]) -> Significance | None:
    """The paired test on `test` against the first group: searches of the same seed, or in the order of seeds."""
    mine, theirs = ({one.search.seed: one for one in side if one.winner} for side in (group, first))
    common = [seed for seed in mine if seed in theirs]
    pairs = [(mine[seed], theirs[seed]) for seed in common] or list(zip(mine.values(), theirs.values(), strict=False))
    if not pairs:
        return None
    both = [one for pair in pairs for one in pair]
    outcomes = _outcomes(both, [one.winner for one in both], "test")
    if not outcomes:
        return None
    left, right = ([replace(each, values=each.values[side::2]) for each in outcomes] for side in (0, 1))
    return paired_test(left, right)
