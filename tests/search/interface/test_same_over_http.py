"""A server answers as its store does: every use case with an HTTP path, and its errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
from pydantic import TypeAdapter
from search_lab import UnrulyPool, drive, run_config, start
from server_tokens import WRITE
from starlette.testclient import TestClient
from store_samples import scored, search, split

import moevolve
from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.outline import GenomeOutline, LayerOutline
from moevolve.search.interface.control import CancelRequest, PauseRequest, ScaleRequest, StopRequest
from moevolve.search.interface.individuals import GenomeRequest, LineageRequest, ShowRequest
from moevolve.search.interface.rankings import BestRequest, ParetoRequest
from moevolve.search.interface.request import one_line_errors
from moevolve.search.interface.searches import (
    CompareRequest,
    EffectsRequest,
    FinalTableRequest,
    OverviewRequest,
    SearchesRequest,
)
from moevolve.search.server.api.requests import REQUESTS
from moevolve.search.server.app import make_app
from moevolve.search.server.settings import ServerSettings
from moevolve.store.errors import NotFoundError, StoreError
from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store

QUESTIONS: list[Any] = [
    SearchesRequest(),
    SearchesRequest(text="ALP", status="created", sort="best"),
    OverviewRequest("lab"),
    FinalTableRequest("lab-1"),
    EffectsRequest("lab"),
    BestRequest(task="rte", limit=2),
    BestRequest(search="alpha", split="search"),
    CompareRequest(["lab", "alpha"]),
    ParetoRequest("rte", size="active_parameters"),
    ShowRequest("lab:7"),
    GenomeRequest("lab:7"),
    LineageRequest("lab:50"),
    LineageRequest("lab:1"),
    PauseRequest("beta"),
    StopRequest("beta"),
    ScaleRequest("beta", 3),
    CancelRequest("beta"),
    SearchesRequest(text="BETA"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """With `lab`, a search of 60 individuals, `alpha`, that is ranked for the task `rte`, and `beta`, which runs."""
    with Store.open(f"sqlite:///{tmp_path_factory.mktemp('service') / 'lab.db'}") as opened:
        drive(opened, start(opened, run_config()), UnrulyPool(seed=1))
        for name in ("alpha", "beta"):
            opened.create_search(search(name), [split()])
        for index, score in enumerate((0.5, 0.75, 0.25)):
            scored(opened, "id-alpha", index, score)
        opened.acquire("id-beta", "driver", 3600)
        yield opened


def view(request: GenomeRequest, store: StoreReader) -> GenomeOutline:
    """In the place of a genome, for which the search's model would have to be there."""
    layers = (LayerOutline(3, (1, 2), (96,)),)
    return GenomeOutline((("of", store.individual(request.individual).ref),), 8, (("neurons", 128),), layers)


@pytest.fixture(scope="module")
def served(store: Store) -> Iterator[TestClient]:
    """A client of a server of this store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEVOLVE_WRITE_TOKEN", WRITE)
        patch.setattr(GenomeRequest, "answer", view)
        app = make_app(store, ServerSettings.model_validate({"store": store.url}))
        headers = {"authorization": f"Bearer {WRITE}", "x-moevolve": "1"}
        yield TestClient(app, "http://localhost:8080", headers=headers)


def over_http(client: TestClient, request: Any) -> Any:
    """The response to a request: what its path doesn't name is in the query or in the body."""
    kind = type(request)
    values = TypeAdapter(kind).dump_python(request, mode="json", exclude_none=True)
    path = "/api" + kind.route.format(**{name: quote(str(value), safe="") for name, value in values.items()})
    others = {name: value for name, value in values.items() if f"{{{name}}}" not in kind.route}
    return client.post(path, json=others) if kind.writes else client.get(path, params=others)


def test_a_server_answers_as_its_store_does(store: Store, served: TestClient) -> None:
    for question in QUESTIONS:
        here, there = moevolve.as_data(question.answer(store)), over_http(served, question)
        assert there.status_code == 200, (question, there.text)
        if isinstance(question, PauseRequest | StopRequest | CancelRequest | ScaleRequest):
            assert all(there.json()[name] == here[name] for name in ("owner", "desired_state", "workers"))
        else:
            assert there.json() == here and here, question
    assert {type(question) for question in QUESTIONS} == set(REQUESTS)


WRONG: list[tuple[Any, type[Exception], int, str]] = [
    (ShowRequest("lab:60"), NotFoundError, 404, "no individual 'lab:60'; nearest: lab:59"),
    (StopRequest("lab"), StoreError, 409, "isn't being run"),
    (ShowRequest("a ?c#d%:1"), NotFoundError, 404, "a ?c#d%"),
]


def test_what_is_wrong_is_the_same_error(store: Store, served: TestClient) -> None:
    for question, error, status, said in WRONG:
        with pytest.raises(error) as caught:
            moevolve.ask(store, question)
        there = over_http(served, question)
        assert there.status_code == status and there.json()["detail"] == str(caught.value)
        assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: BestRequest(limit=0),
        lambda: BestRequest(split="training"),  # type: ignore[arg-type]
        lambda: ScaleRequest("beta", 0),
        lambda: ShowRequest("x" * 300),
    ],
)
def test_a_record_refuses_what_is_out_of_range(make: Callable[[], object]) -> None:
    with pytest.raises(UserError), one_line_errors():
        make()
