"""What moved the score in a search: effects of operators, and of what genomes choose.

The score of an individual is explained by a sum over its choices: which experts a layer keeps, a layer's size, a
setting. The weights of the sum have a normal posterior (`LinearPosterior`, which the strategy `surrogate` draws from,
too), whose prior and noise maximise the marginal likelihood (MacKay, Neural Computation 4, 1992). Effects and their
intervals are quantiles of draws. Numbers are divided by two standard deviations, so that their effects compare with
those of options that an individual has or hasn't (Gelman, doi:10.1002/sim.3107).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.records import short_repr
from moevolve.evaluators.scales import SCALES, Scale, ScaleName
from moevolve.evaluators.types import Floats
from moevolve.search.genomes.contract.outline import GenomeOutline
from moevolve.search.genomes.registry import outline_of
from moevolve.search.running.candidates import find_candidate
from moevolve.search.strategies.surrogate import LinearPosterior
from moevolve.search.text import ranges
from moevolve.store.reader import StoreReader
from moevolve.store.records import IndividualRecord, SearchRecord

Values = tuple[float | str | None, ...]
"""The value of every individual, None where it has none."""
_MOST = 1000
"""Most individuals that are used: the time of the fit grows with the cube of their number."""
_FEWEST = 10
"""Fewest individuals that are explained: fewer differ in far more choices than there are scores."""
_DRAWS = 1000
_MOST_NAMES = 12
"""Largest number of names that a setting may have as options; one with more is no choice of the regression."""
_WIDE = 20.0
"""Ratio of the largest to the smallest of positive numbers above which their logarithms are used."""
_NUMBER = re.compile(r"[+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?(?=$|[\s%])")
_INTERVAL = (2.5, 50.0, 97.5)


@dataclass(frozen=True, slots=True)
class OperatorEffect:
    """What came of the individuals that one operator made.

    Attributes:
        individuals: Number of individuals with a score.
        bests: Number of them that were the search's best so far.
        children: Number of them whose parents have scores.
        better: Number of these children that beat all their parents.
        gain, low, high: Mean of child's score less its best parent's, with its 95 % confidence interval; None for fewer
            than two children. As all effects, it is a difference of `Scale.additive`.
    """

    operator: str
    individuals: int
    bests: int
    children: int = 0
    better: int = 0
    gain: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class ChoiceEffect:
    """How far one choice of genomes moved scores: the standard deviation over individuals of its part of the score.

    Attributes:
        choice: What is chosen, such as `experts of layer 3` or `ridge lambda`.
        spread, low, high: Median and 95 % credible interval.
    """

    choice: str
    spread: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class OptionEffect:
    """What one option of a choice adds to scores, other choices being equal.

    Attributes:
        option: The option, such as `expert 5`, compared with the mean of the choice's options; of a number, an increase
            by two standard deviations, from one below the mean to one above it.
        individuals: Number of individuals that have the option; all of them for a number.
        effect, low, high: Median and 95 % credible interval.
    """

    choice: str
    option: str
    individuals: int
    effect: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class GeneRow:
    """The numbers and names that one individual's settings and sizes have, in the order of `Effects.genes`."""

    index: int
    score: float
    values: tuple[float | str | None, ...]


@dataclass(frozen=True, slots=True)
class Effects:
    """What moved the score in a search.

    Attributes:
        individuals: Number of individuals that were looked at: the newest ones with a score.
        predicted: Share of the variance of their scores that a sum over choices predicts for individuals that it wasn't
            fitted to (leave-one-out); None where there is nothing to predict. At 0 or below, choices and options say
            nothing.
        operators: The one with most individuals first.
        choices: The largest effects first.
        options: Those whose effects are farthest from 0 in standard deviations first.
        genes: Names of the settings and sizes of layers that vary. Empty unless asked for.
        rows: Their values. Empty unless asked for.
        scale: Scale that scores and effects are shown on.
    """

    __repr__ = short_repr

    search: str
    individuals: int
    predicted: float | None
    operators: tuple[OperatorEffect, ...]
    choices: tuple[ChoiceEffect, ...]
    options: tuple[OptionEffect, ...] = field(repr=False)
    genes: tuple[str, ...] = ()
    rows: tuple[GeneRow, ...] = field(default=(), repr=False)
    scale: ScaleName = "percent"

    @property
    def note(self) -> str:
        """In words, what the effects are worth."""
        if self.predicted is None:
            return "There are too few individuals, or no choices that differ, to tell what mattered."
        share = f"{max(self.predicted, 0):.0%} of the variance of {self.individuals:,} individuals' scores"
        if self.predicted < 0.1:
            return f"A sum over choices predicts {share}: take nothing from the effects of choices and options."
        return (
            f"A sum over choices predicts {share}, each left out of the fit in turn. Individuals are related and were "
            "selected, so this is the most that it may predict of others."
        )


@dataclass(frozen=True)
class _Choice:
    """One choice as columns of the regression.

    Attributes:
        name: What is chosen.
        options: Names of the columns.
        columns: Float64 [individuals, options], with mean 0.
        counts: Number of individuals that have each option.
        contrasted: True if effects are differences from the mean of the options.
    """

    name: str
    options: tuple[str, ...]
    columns: Floats
    counts: tuple[int, ...]
    contrasted: bool


def effects(store: StoreReader, name: str, limit: int, genes: bool = False) -> Effects:
    """Estimate what moved the score in a search, with `limit` options and, if `genes`, what every individual chose.

    Raises:
        StoreError: there is no such search.
        UserError: the search was stored without the facts of its model.
    """
    search = store.search(name)
    rows = [row for row in store.page(search.id, "newest", limit=_MOST) if row.fitness is not None][::-1]
    space = find_candidate(store, f"{search.id}:{rows[0].index}", weights=False).space if rows else None
    outlines = [outline_of(space.from_bytes(row.genome)) for row in rows] if space is not None else []
    named = store.scales(search.id).fitness
    scale = SCALES[named]
    scores = np.array([scale.additive(row.fitness or 0.0) for row in rows], dtype=np.float64)
    varying = genes_of(outlines)
    predicted, choices, options = effects_of_choices(outlines, varying, scores)
    shown = varying if genes else {}
    return Effects(
        search.name,
        len(rows),
        predicted,
        tuple(_operators(store, search, rows, scale)),
        tuple(choices),
        tuple(options[:limit]),
        tuple(shown),
        tuple(
            GeneRow(row.index, row.fitness or 0.0, values)
            for row, values in zip(rows, zip(*shown.values(), strict=True), strict=False)
        ),
        named,
    )


def _operators(
    store: StoreReader, search: SearchRecord, rows: Sequence[IndividualRecord], scale: Scale
) -> Iterator[OperatorEffect]:
    """Effects of operators, the one with most individuals first."""
    from scipy.special import stdtrit  # takes a third of a second, and 26 MB in a server

    first = min((parent for row in rows for parent in row.parents), default=None)
    known = {} if first is None else dict(store.fitness_by_index(search.id, first))
    bests = {step.index for step in store.course(search.id).steps}
    made: dict[str, list[IndividualRecord]] = defaultdict(list)
    for row in rows:
        made[row.operator].append(row)
    for operator, individuals in sorted(made.items(), key=lambda item: -len(item[1])):
        gains = [
            scale.additive(row.fitness) - scale.additive(max(known[parent] for parent in row.parents))
            for row in individuals
            if row.fitness is not None and row.parents and known.keys() >= set(row.parents)
        ]
        found = OperatorEffect(operator, len(individuals), sum(row.index in bests for row in individuals))
        if len(gains) > 1:
            mean, half = fmean(gains), float(stdtrit(len(gains) - 1, 0.975)) * np.std(gains, ddof=1) / len(gains) ** 0.5
            low, high = float(mean - half), float(mean + half)
            better = sum(gain > 0 for gain in gains)
            found = replace(found, children=len(gains), better=better, gain=mean, low=low, high=high)
        yield found


def _kept_experts(outlines: Sequence[GenomeOutline]) -> Iterator[_Choice]:
    """Which experts each layer keeps; layers that always keep the same ones are one choice."""
    experts = max((outline.experts for outline in outlines), default=0)
    if not experts:
        return
    layers: dict[bytes, list[int]] = defaultdict(list)
    kept: dict[bytes, NDArray[np.bool_]] = {}
    for place, layer in enumerate(outlines[0].layers):
        table = np.zeros((len(outlines), experts), dtype=np.bool_)
        for row, outline in zip(table, outlines, strict=True):
            row[list(outline.layers[place].experts)] = True
        layers[table.tobytes()].append(layer.layer)
        kept[table.tobytes()] = table
    for key, table in kept.items():
        had = {f"expert {one}": table[:, one] for one in range(experts)}
        yield from _options(f"experts of {_layers(layers[key])}", had)


def genes_of(outlines: Sequence[GenomeOutline]) -> dict[str, Values]:
    """Return the settings and sizes of layers that vary, by name; those with equal values are one."""
    names: dict[Values, str] = {}
    settings = [dict(outline.settings) for outline in outlines]
    for name in dict.fromkeys(name for each in settings for name in each):
        names.setdefault(_numbers([each.get(name) for each in settings]), name)
    sizes: dict[str, dict[Values, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, layer in enumerate(outlines[0].layers if outlines else ()):
        counts = tuple(float(len(outline.layers[place].experts)) for outline in outlines)
        sizes["number of experts"][counts].append(layer.layer)
        for size, (label, _) in enumerate(outlines[0].sizes):
            sizes[label][tuple(float(outline.layers[place].sizes[size]) for outline in outlines)].append(layer.layer)
    for label, layers in sizes.items():
        for values, where in layers.items():
            names.setdefault(values, f"{label} of {_layers(where)}")
    return {name: values for values, name in names.items() if len(set(values)) > 1}


def _layers(numbers: Sequence[int]) -> str:
    return f"layer{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def _numbers(texts: Sequence[str | None]) -> Values:
    """A setting's values, as numbers if all begin with one."""
    found = [None if text is None else _NUMBER.match(text) for text in texts]
    if all(number or text is None for number, text in zip(found, texts, strict=True)):
        return tuple(None if number is None else float(number[0].replace(",", "")) for number in found)
    return tuple(texts)


def _chosen(name: str, values: Values) -> Iterator[_Choice]:
    """A setting or size as a number, with its mean where it is missing, or as options."""
    if any(isinstance(value, str) for value in values):
        names = sorted({str(value) for value in values})
        if len(names) <= _MOST_NAMES:
            yield from _options(name, {each: np.array([str(value) == each for value in values]) for each in names})
        return
    numbers = np.array(values, dtype=np.float64)  # None becomes NaN
    if not np.isfinite(numbers).any():
        return
    least, most = float(np.nanmin(numbers)), float(np.nanmax(numbers))
    logarithmic = least > 0 and most > _WIDE * least
    numbers = np.log(numbers) if logarithmic else numbers
    mean, spread = float(np.nanmean(numbers)), float(np.nanstd(numbers))
    if spread > 1e-9 * max(abs(mean), 1e-9):
        ends = [mean - spread, mean + spread]
        low, high = np.clip(np.exp(ends) if logarithmic else ends, least, most)
        columns = np.nan_to_num((numbers - mean) / (2 * spread))[:, None]
        yield _Choice(name, (f"from {low:.3g} to {high:.3g}",), columns, (len(values),), contrasted=False)


def _options(name: str, had: dict[str, NDArray[np.bool_]]) -> Iterator[_Choice]:
    """Options that an individual has or hasn't, without those that all or none have."""
    varying = {option: column for option, column in had.items() if column.any() and not column.all()}
    if len(varying) > 1:
        table = np.stack(list(varying.values()), axis=1)
        columns = table - table.mean(axis=1, keepdims=True)
        counts = tuple(table.sum(axis=0).tolist())
        yield _Choice(name, tuple(varying), columns - columns.mean(axis=0), counts, contrasted=True)


def effects_of_choices(
    outlines: Sequence[GenomeOutline], genes: Mapping[str, Values], scores: Floats
) -> tuple[float | None, list[ChoiceEffect], list[OptionEffect]]:
    """Explain scores by what genomes choose.

    Args:
        outlines: The individuals' genomes in columns.
        genes: See `genes_of`.
        scores: Float64 [individuals].

    Returns:
        The share of variance that is predicted, the effects of choices, and those of their options, as in `Effects`.
    """
    choices = list(_kept_experts(outlines))
    choices.extend(choice for name, values in genes.items() for choice in _chosen(name, values))
    if not choices or len(scores) < _FEWEST or np.ptp(scores) == 0:
        return None, [], []
    features, targets = np.concatenate([choice.columns for choice in choices], axis=1), scores - scores.mean()
    model, predicted = _regression(features, targets)
    rng = np.random.default_rng(0)
    draws = np.stack([model.draw(rng) for _ in range(_DRAWS)])
    spreads: list[ChoiceEffect] = []
    options: list[tuple[float, OptionEffect]] = []
    start = 0
    for choice in choices:
        drawn = draws[:, start : (start := start + len(choice.options))]
        moments = choice.columns.T @ choice.columns / len(scores)
        low, middle, high = np.percentile(np.sqrt(np.maximum(((drawn @ moments) * drawn).sum(axis=1), 0)), _INTERVAL)
        spreads.append(ChoiceEffect(choice.name, float(middle), float(low), float(high)))
        options.extend(_option_effects(choice, drawn))
    spreads.sort(key=lambda one: -one.spread)
    options.sort(key=lambda one: -one[0])
    return predicted, spreads, [effect for _, effect in options]


def _option_effects(choice: _Choice, drawn: Floats) -> Iterator[tuple[float, OptionEffect]]:
    """Effects of a choice's options, each with its distance from 0 in standard deviations."""
    weights = drawn - drawn.mean(axis=1, keepdims=True) if choice.contrasted else drawn
    quantiles: Any = np.percentile(weights, _INTERVAL, axis=0).T
    away = np.abs(weights.mean(axis=0)) / weights.std(axis=0)
    for option, count, sure, (low, middle, high) in zip(choice.options, choice.counts, away, quantiles, strict=True):
        yield sure, OptionEffect(choice.name, option, count, float(middle), float(low), float(high))


def _regression(features: Floats, targets: Floats) -> tuple[LinearPosterior, float]:
    """Fit weights with the prior variance and noise of the largest marginal likelihood.

    Args:
        features: Float64 [individuals, features], columns with mean 0.
        targets: Float64 [individuals], with mean 0.

    Returns:
        The posterior, and the share of the targets' variance that is predicted leave-one-out.
    """
    count = len(targets)
    values, vectors = np.linalg.eigh(features @ features.T)
    values, rotated = np.maximum(values, 0), vectors.T @ targets
    # The targets are N(0, noise^2 (features features' / ridge + 1)). For each ridge the best noise is known.
    ridges = values.mean() * np.logspace(-4, 6, 101)
    noises = np.array([(rotated**2 / (values / ridge + 1)).sum() / (count - 1) for ridge in ridges])
    evidence = -(count - 1) * np.log(noises) - np.array([np.log1p(values / ridge).sum() for ridge in ridges])
    best = int(np.argmax(evidence))
    ridge, noise = float(ridges[best]), float(noises[best]) ** 0.5
    leverage = (vectors**2) @ (values / (values + ridge)) + 1 / count  # the mean was fitted, too
    left_out = vectors @ (rotated * (ridge / (values + ridge))) / (1 - leverage)
    total = ((targets * count / (count - 1)) ** 2).sum()
    return LinearPosterior(features, targets, ridge / noise**2, noise), float(1 - (left_out**2).sum() / total)
