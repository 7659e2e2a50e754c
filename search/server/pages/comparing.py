"""Two individuals beside each other, and whether what they score differs by more than chance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.search.compare.significance import Outcomes, Significance, paired_test
from moevolve.search.loop.final_table import Score, score_of
from moevolve.search.operations.subject import find_subject
from moevolve.search.server.pages.experts import experts_of
from moevolve.search.server.pages.individuals import described
from moevolve.search.server.pages.rendering import render
from moevolve.search.server.service import ServiceDep
from moevolve.store.records import SPLITS, EvaluationRecord, IndividualDetail, Split

RefQuery = Annotated[str, Query(max_length=220)]


@dataclass(frozen=True, slots=True)
class Paired:
    """What two individuals scored on one task split.

    Attributes:
        task, split: which.
        one, other: their scores; None where they weren't evaluated.
        difference: of the second from the first, in [-1, 1]; None unless both are scored.
        test: a paired test on the examples; None where outcomes of both on the same ones aren't kept.
        only_one, only_other: examples on which the first, or the second, did better.
    """

    task: str
    split: Split
    one: Score | None
    other: Score | None
    difference: float | None = None
    test: Significance | None = None
    only_one: int = 0
    only_other: int = 0


routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@routes.get("/compare")
def show_comparison(request: Request, service: ServiceDep, a: RefQuery = "", b: RefQuery = "") -> HTMLResponse:
    """Two individuals and their scores, or the form that asks for them."""
    refs = a.strip(), b.strip()
    pair = [service.store.individual(ref) for ref in refs] if all(refs) else []
    return render(
        request,
        "compare.jinja",
        refs=refs,
        pair=pair,
        words=[described(detail) for detail in pair],
        rows=paired(pair[0], pair[1]) if pair else [],
    )


@routes.get("/compare/experts")
def show_experts(request: Request, service: ServiceDep, a: RefQuery, b: RefQuery) -> HTMLResponse:
    """The experts that the two keep."""
    refs, rows, note = (a.strip(), b.strip()), [], ""
    try:
        one, other = (find_subject(service.store, ref, weights=False).genome for ref in refs)
        rows = experts_of(one, other) if one is not None and other is not None else []
    except (UserError, OSError) as error:
        note = " ".join(str(error).split())
    return render(request, "experts.jinja", refs=refs, rows=rows, note=note)


def paired(one: IndividualDetail, other: IndividualDetail) -> list[Paired]:
    """Scores of two individuals, task split by task split; those that both have on the same examples are compared."""
    left, right = (
        {(each.task, each.split, each.task_fingerprint): each for each in detail.evaluations} for detail in (one, other)
    )
    rows = [_pair(left.get(key), right.get(key)) for key in dict.fromkeys([*left, *right])]
    return sorted(rows, key=lambda row: (row.task, SPLITS.index(row.split)))


def _pair(one: EvaluationRecord | None, other: EvaluationRecord | None) -> Paired:
    known = one or other
    assert known is not None
    row = Paired(
        known.task, known.split, None if one is None else score_of(one), None if other is None else score_of(other)
    )
    if one is None or other is None or one.score is None or other.score is None:
        return row
    row = replace(row, difference=other.score - one.score)
    left, right = _outcomes(one), _outcomes(other)
    if not left.size or left.size != right.size:
        return row
    return replace(
        row,
        test=paired_test([Outcomes(left[None], one.metric, 1.0)], [Outcomes(right[None], one.metric, 1.0)]),
        only_one=int((left > right).sum()),
        only_other=int((right > left).sum()),
    )


def _outcomes(record: EvaluationRecord) -> NDArray[np.float64]:
    return np.frombuffer(record.outcomes or b"", dtype="<f4").astype(np.float64)
