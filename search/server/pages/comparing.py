"""Pages that compare individuals, with paired tests, and searches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.scales import SCALES, ScaleName
from moevolve.evaluators.types import SCORED, SPLITS, Split
from moevolve.search.interface.request import one_line_errors
from moevolve.search.interface.results import CompareRequest
from moevolve.search.interface.show import GenomeRequest
from moevolve.search.loop.scores import Score, outcomes_of, score_of
from moevolve.search.loop.significance import Significance, TaskOutcomes, paired_test
from moevolve.search.server.dependencies import NameQuery, RefQuery, ServerDep
from moevolve.search.server.pages.individuals import outlined, size_words
from moevolve.search.server.pages.rendering import render
from moevolve.store.records import CourseAxis, EvaluationRecord, IndividualDetail

routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@dataclass(frozen=True, slots=True)
class PairedScores:
    """Scores of two individuals on one task split.

    Attributes:
        first, second: None for an individual that wasn't evaluated.
        difference: Second score minus first, as `Scale.additive`; None unless both have a score.
        test: Paired test over the examples; None unless both have stored outcomes on the same examples.
        first_better, second_better: Number of examples on which one scored more than the other.
        scale: Scale that scores and difference are shown on.
    """

    task: str
    split: Split
    first: Score | None
    second: Score | None
    difference: float | None = None
    test: Significance | None = None
    first_better: int = 0
    second_better: int = 0
    scale: ScaleName = "percent"


@routes.get("/compare/individuals")
def show_individuals(request: Request, server: ServerDep, a: RefQuery = "", b: RefQuery = "") -> HTMLResponse:
    """Two individuals and their scores, or the form that asks for them."""
    refs = a.strip(), b.strip()
    pair = [server.store.individual(ref) for ref in refs] if all(refs) else []
    return render(
        request,
        "individuals_compared.jinja",
        refs=refs,
        pair=pair,
        words=[size_words(detail) for detail in pair],
        rows=paired(pair[0], pair[1]) if pair else [],
    )


@routes.get("/compare/individuals/genomes")
def show_genomes(request: Request, server: ServerDep, a: RefQuery, b: RefQuery) -> HTMLResponse:
    """What each of two individuals keeps."""
    note, outlines = "", []
    try:
        view = GenomeRequest(a.strip(), against=b.strip()).answer(server.store)
        outlines = [each for each in (view.outline, view.other) if each is not None]
    except UserError as error:
        note = f"They can't be shown: {' '.join(str(error).split())}"
    return render(request, "genomes.jinja", note=note, **outlined((a.strip(), b.strip()), outlines))


@routes.get("/compare")
def show_comparison(
    request: Request,
    server: ServerDep,
    searches: Annotated[list[NameQuery], Query()] = [],  # noqa: B006
    by: CourseAxis = "evaluations",
) -> HTMLResponse:
    """Searches beside each other, or what to do to see some."""
    names = [name.strip() for each in searches for name in each.split(",") if name.strip()]
    found, link = None, ""
    if names:
        with one_line_errors():
            asked = CompareRequest(names, by=by)
        found = server.listings.cached(repr(asked), partial(asked.answer, server.store))
        link = urlencode({"searches": names}, doseq=True)
    return render(
        request,
        "compare.jinja",
        found=found,
        names=names,
        by=by,
        axes=get_args(CourseAxis),
        link=link,
        splits=SCORED,
        records={} if found is None else {one.name: server.store.search(one.name) for one in found.searches},
    )


def paired(first: IndividualDetail, second: IndividualDetail) -> list[PairedScores]:
    """Scores of two individuals by task and split, with a test where both were scored on the same examples."""
    left, right = (
        {(each.task, each.split, each.task_fingerprint): each for each in detail.evaluations}
        for detail in (first, second)
    )
    rows = [_pair(left.get(key), right.get(key)) for key in dict.fromkeys([*left, *right])]
    return sorted(rows, key=lambda row: (row.task, SPLITS.index(row.split)))


def _pair(first: EvaluationRecord | None, second: EvaluationRecord | None) -> PairedScores:
    known = first or second
    assert known is not None
    scores = [None if one is None else score_of(one) for one in (first, second)]
    row = PairedScores(known.task, known.split, scores[0], scores[1], scale=known.scale)
    if first is None or second is None or first.score is None or second.score is None:
        return row
    scale = SCALES[row.scale]
    row = replace(row, difference=scale.additive(second.score) - scale.additive(first.score))
    left, right = (
        [TaskOutcomes(outcomes_of(one)[None], one.metric, 1.0)] if one.outcomes else [] for one in (first, second)
    )
    test = paired_test(left, right)
    if test is None:
        return row
    gain = right[0].values - left[0].values
    return replace(row, test=test, first_better=int((gain < 0).sum()), second_better=int((gain > 0).sum()))
