"""Which waiting candidates go to a worker together, to share its passes (`moevolve.workers.population`)."""

from __future__ import annotations

from collections.abc import Iterable

from moevolve.workers.edits.eep import EepEdit
from moevolve.workers.edits.population import company_of
from moevolve.workers.messages import EvaluationRequest


def can_share(request: EvaluationRequest) -> bool:
    """Whether its candidate is of a kind that shares passes."""
    return isinstance(request.edit, EepEdit)


def fellows(first: EvaluationRequest, waiting: Iterable[EvaluationRequest], most: int) -> list[int]:
    """Places of waiting requests that go along with another: the first ones for the same splits that can share with it.

    Args:
        first: the other, not among them.
        waiting: in order.
        most: no more than this many.
    """
    if most < 1 or not isinstance(first.edit, EepEdit):
        return []
    company = company_of(first.edit)
    places: list[int] = []
    for place, request in enumerate(waiting):
        edit = request.edit
        if request.splits == first.splits and isinstance(edit, EepEdit) and company_of(edit) == company:
            places.append(place)
            if len(places) == most:
                break
    return places
