"""Requests for what stored searches found."""

from __future__ import annotations

from moevolve.evaluators.errors import UserError
from moevolve.search.loop.scores import FULL
from moevolve.search.operations.answers import prepared_split
from moevolve.search.operations.subject import find_subject
from moevolve.search.report.contents import gather
from moevolve.search.requests.models import AnalyseRequest
from moevolve.search.requests.searches import ContrastRequest, EffectsRequest, ReportRequest
from moevolve.search.results import contrast as contrasts
from moevolve.search.results import effects as regressions
from moevolve.search.results import expert_usage
from moevolve.store.reader import StoreReader


def contrast(store: StoreReader, request: ContrastRequest) -> contrasts.Contrast:
    """Answer a `ContrastRequest`."""
    return contrasts.contrast(store, request.searches, request.by)


def effects(store: StoreReader, request: EffectsRequest) -> regressions.Effects:
    """Answer an `EffectsRequest`."""
    return regressions.effects(store, request.search, request.limit, request.genes)


def page_of(store: StoreReader, request: ReportRequest) -> bytes:
    """Answer a `ReportRequest`."""
    from moevolve.search.report.page import render_page

    return render_page(gather(store, request.search, request.limit)).encode()


def analyse(store: StoreReader, request: AnalyseRequest) -> expert_usage.Analysis:
    """Answer an `AnalyseRequest`."""
    if request.individual == FULL:
        raise UserError(f"{FULL}: an analysis compares an individual with the full model; name one as SEARCH:INDEX")
    subject = find_subject(store, request.individual, model=request.model)
    assert subject.detail is not None
    prepared, full = prepared_split(subject, request.task, request.split), bool(subject.facts.moe_layers)
    return expert_usage.analyse(subject.detail, subject.edit, subject.config, prepared, request.tokens, full)
