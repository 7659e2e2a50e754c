"""Access control of every route, by token, host, origin, header and size."""

from __future__ import annotations

import html
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_tokens import READ, WRITE
from starlette.routing import Route
from starlette.testclient import TestClient

from moevolve.evaluators.errors import UserError
from moevolve.search.server.app import make_app, make_routes
from moevolve.search.server.guard import MAX_BODY_BYTES, OPEN_PATHS, SESSION_S, Sessions
from moevolve.search.server.settings import ServerSettings, Token, read_settings
from moevolve.store.repository import Store

Settings = Callable[..., ServerSettings]
HERE = {"search": "lab", "ref": "lab:3", "individual": "lab:3", "name": "chats.jsonl"}


@pytest.fixture
def stranger(lab_app: Any) -> TestClient:
    """A client without a token."""
    return TestClient(lab_app, "http://localhost:8080", follow_redirects=False)


@pytest.fixture(scope="module")
def requests(lab_store: Store, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Method and path of every route, with values for its parameters."""
    app = make_routes(lab_store, ServerSettings(logs=tmp_path_factory.mktemp("logs")))
    routes: list[tuple[str, str]] = []
    for route in all_routes(app):
        path = route.path
        for name, value in HERE.items():
            path = path.replace(f"{{{name}}}", value)
        assert "{" not in path, path
        routes += [(method, path) for method in route.methods or {"GET"}]
    return routes


def all_routes(app: object) -> Iterator[Route]:
    for route in app.routes:  # type: ignore[attr-defined]
        if isinstance(route, Route):
            yield route
        elif hasattr(route, "original_router"):
            prefix = route.include_context.prefix
            for inner in all_routes(route.original_router):
                yield Route(prefix + inner.path, inner.endpoint, methods=list(inner.methods or ()))


def test_every_route_needs_a_token(stranger: TestClient, requests: list[tuple[str, str]]) -> None:
    assert len(requests) > 25 and ("POST", "/api/searches/lab/cancel") in requests
    wrong = {"authorization": "Bearer wrong"}, {"authorization": WRITE}, {"cookie": f"moevolve={WRITE}"}
    for method, path in [*requests, ("GET", "/nothing"), ("DELETE", "/api/searches/lab")]:
        if path in OPEN_PATHS:
            continue
        for headers in ({}, *(wrong if "lab/" in path else ())):
            answer = stranger.request(method, path, headers={**headers, "x-moevolve": "1"})
            assert answer.status_code == 401, (method, path, headers)
            assert "lab" not in answer.text


def test_a_read_token_changes_nothing(stranger: TestClient, requests: list[tuple[str, str]]) -> None:
    headers = {"authorization": f"Bearer {READ}", "x-moevolve": "1"}
    assert stranger.get("/api/searches", headers=headers).status_code == 200
    writes = [(method, path) for method, path in requests if method in ("POST", "PUT")]
    assert len(writes) >= 7
    for method, path in writes:
        if path in OPEN_PATHS:
            continue
        answer = stranger.request(method, path, headers=headers, json={})
        assert (answer.status_code, answer.json()["detail"]) == (403, "this token may read only"), path


FOREIGN: list[tuple[dict[str, str | None], int]] = [
    ({"host": "evil.example"}, 400),
    ({"host": "localhost.evil.example"}, 400),
    ({"host": "LOCALHOST:1234"}, 409),
    ({"host": "[::1]:8080"}, 409),
    ({"host": "[::1]evil"}, 400),
    ({"host": "localhost:evil"}, 400),
    ({"host": "evil.example@localhost"}, 400),
    ({"host": "localhost/evil"}, 400),
    ({"origin": "http://evil.example"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": "http://["}, 403),
    ({"origin": "http://localhost:9999"}, 403),
    ({"origin": "https://localhost:8080"}, 403),
    ({"origin": "https://localhost:8080", "x-forwarded-proto": "https"}, 409),
    ({"origin": "http://localhost:8080", "x-forwarded-proto": "https"}, 403),
    ({"origin": "http://localhost:8080"}, 409),
    ({"sec-fetch-site": "cross-site"}, 403),
    ({"sec-fetch-site": "same-site"}, 403),
    ({"sec-fetch-site": "same-origin"}, 409),
    ({"x-moevolve": None}, 403),
]


def test_other_sites_change_nothing(client: TestClient) -> None:
    """409 is what is answered to a pause that comes through: nobody runs the search."""
    own, visitor = dict(client.headers), TestClient(client.app, "http://localhost:8080")
    for changes, status in FOREIGN:
        visitor.headers = {name: value for name, value in (own | changes).items() if value is not None}
        assert visitor.post("/api/searches/lab/pause").status_code == status, changes


def test_without_tokens_only_this_machine_is_served(
    lab_store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MOEVOLVE_READ_TOKEN", "MOEVOLVE_WRITE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for exposed in ({"host": "0.0.0.0"}, {"hosts": ["localhost", "search.example"]}):
        with pytest.raises(UserError, match="can be reached from other machines, so tokens are needed"):
            settings(tokens=None, **exposed).read_tokens()
    assert settings(tokens=None, hosts=["localhost"]).read_tokens() == {}
    anybody = TestClient(make_app(lab_store, settings(tokens=None)), "http://localhost")
    assert anybody.get("/api/searches").status_code == 200
    assert anybody.get("/api/searches", headers={"host": "rebound.example"}).status_code == 400
    assert anybody.post("/api/searches/lab/pause").status_code == 403
    assert anybody.post("/api/searches/lab/pause", headers={"x-moevolve": "1"}).status_code == 409
    for name in ("X-Forwarded-For", "X-Forwarded-Proto", "Forwarded", "Via", "X-Real-IP"):
        answer = anybody.get("/api/searches", headers={name: "192.0.2.7"})
        assert answer.status_code == 403 and "behind a proxy" in answer.text, name
    check_that_other_sites_cannot_read(anybody)


def test_a_wildcard_address_allows_all_names_of_the_machine(
    lab_store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEVOLVE_READ_TOKEN", READ)
    assert socket.gethostname() == settings(host="::").names[0] and "::" not in settings(host="::").allowed_hosts
    served = settings(host="0.0.0.0", hosts=["search.example"], tokens=None)
    client = TestClient(make_app(lab_store, served), "http://localhost")
    assert client.get("/api/searches").status_code == 401
    client.headers["authorization"] = f"Bearer {READ}"
    for name in (*served.names, socket.gethostname().upper(), "search.example", "127.0.0.1"):
        at = f"[{name}]:8080" if ":" in name else f"{name}:8080"
        found = client.get("/api/searches", headers={"host": at, "x-forwarded-for": "192.0.2.7"})
        assert found.status_code == 200, name
    for name in ("0.0.0.0", "rebound.example"):
        refused = client.get("/api/searches", headers={"host": name})
        assert refused.status_code == 400 and "--hosts" in refused.text


def test_other_sites_cannot_read(lab_app: Any) -> None:
    headers = {"authorization": f"Bearer {READ}"}
    check_that_other_sites_cannot_read(TestClient(lab_app, "http://localhost:8080", headers=headers))


def check_that_other_sites_cannot_read(visitor: TestClient) -> None:
    visit = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    for changes, status in (
        ({}, 200),
        ({"sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}, 403),
        ({"sec-fetch-mode": "cors", "sec-fetch-dest": "empty"}, 403),
        ({"sec-fetch-mode": "cors", "sec-fetch-dest": "empty", "origin": "https://evil.example"}, 403),
        ({"sec-fetch-dest": "iframe"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"}, 403),
        ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"}, 200),
        ({"sec-fetch-site": "none"}, 200),
    ):
        for path in ("/api/searches/lab", "/healthz"):
            assert visitor.get(path, headers=visit | changes).status_code == status, changes


def test_a_browser_signs_in_and_never_sees_the_token_again(stranger: TestClient) -> None:
    page = stranger.get("/", headers={"accept": "text/html"})
    assert page.status_code == 401 and "text/html" in page.headers["content-type"]
    assert stranger.post("/login", data={"token": "guess"}).status_code == 401
    elsewhere = stranger.post("/login", data={"token": READ}, headers={"origin": "http://evil.example"})
    assert elsewhere.status_code == 403
    answer = stranger.post("/login", data={"token": READ})
    cookie = answer.headers["set-cookie"]
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert READ not in cookie and "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
    assert stranger.get("/api/searches").status_code == 200
    assert stranger.post("/api/searches/lab/pause", headers={"x-moevolve": "1"}).status_code == 403


def test_signing_out_ends_the_session_wherever_its_cookie_is(stranger: TestClient) -> None:
    sessions = []
    for _ in range(2):
        stranger.post("/login", data={"token": WRITE})
        sessions.append({"cookie": f"moevolve={stranger.cookies.pop('moevolve')}", "accept": "text/html"})
    first, second = sessions
    assert first != second, "an id of its own"
    assert stranger.get("/logout", headers=first).status_code == 404
    evil = stranger.post("/logout", headers=first | {"origin": "http://evil.example"})
    assert evil.status_code == 403 and stranger.get("/api/searches", headers=first).status_code == 200
    answer = stranger.post("/logout", headers=first | {"origin": "http://localhost:8080"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/login") and "Max-Age=0" in str(answer.headers)
    assert [stranger.get("/api/searches", headers=one).status_code for one in sessions] == [401, 200]
    assert stranger.post("/logout").status_code == 303, "also with nothing to end"


def test_a_session_ends_in_time_and_the_oldest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    now, write, read = 1000.0, Token("write", "anna"), Token("read", "bob")
    sessions = Sessions(lambda: now)
    first = sessions.begin(write)
    now += SESSION_S - 1
    second = sessions.begin(read)
    assert (sessions.token(first), sessions.token(second), sessions.token("guess")) == (write, read, None)
    now += 1
    assert (sessions.token(first), sessions.token(second)) == (None, read)
    monkeypatch.setattr("moevolve.search.server.guard.MAX_SESSIONS", 2)
    few = Sessions(lambda: now)
    begun = [few.begin(token) for token in (read, read, write)]
    assert [few.token(one) for one in begun] == [None, read, write]


LOCAL = {
    "/searches/lab?order=best&after=3": "/searches/lab?order=best&after=3",
    "/searches/a%20b%2Fc": "/searches/a%20b%2Fc",
    "": "/",
    "/logout": "/",
    "//evil.example": "/",
    "/\\evil.example": "/",
    "/\t/evil.example": "/",
    " //evil.example": "/",
    "https://evil.example": "/",
    "javascript:alert(1)": "/",
    "searches/lab": "/",
    "/a\r\nset-cookie: moevolve=x": "/",
}


def test_signing_in_leads_only_to_local_pages(stranger: TestClient) -> None:
    browser = {"accept": "text/html"}
    page = stranger.get("/searches/lab?order=best&after=3", headers=browser)
    assert page.status_code == 401 and 'name="next" value="/searches/lab?order=best&amp;after=3"' in page.text
    part = stranger.get("/searches/lab/now?part=1", headers=browser)
    assert part.status_code == 401 and list(part.json()) == ["detail"], "a part of a page is no form"
    for asked, reached in LOCAL.items():
        wrong = stranger.post("/login", data={"token": "guess", "next": asked})
        assert f'name="next" value="{html.escape(reached)}"' in wrong.text, asked
        assert stranger.post("/login", data={"token": READ, "next": asked}).headers["location"] == reached, asked


def test_long_bodies_are_refused_however_they_come(client: TestClient) -> None:
    body = b"x" * (MAX_BODY_BYTES + 1)
    assert client.post("/api/searches", content=body).status_code == 413
    assert client.post("/api/searches", content=iter([body[:9], body[9:]])).status_code == 413
    assert client.post("/login", content=iter([body])).status_code == 413


def test_strangers_cannot_fill_the_log_with_long_bodies(lab_app: Any, caplog: pytest.LogCaptureFixture) -> None:
    visitor = TestClient(lab_app, "http://localhost:8080", raise_server_exceptions=False)
    for method, path in (("GET", "/healthz"), ("GET", "/static/style.css"), ("GET", "/login"), ("POST", "/login")):
        answer = visitor.request(method, path, headers={"content-length": str(MAX_BODY_BYTES + 1)})
        assert (answer.status_code, list(answer.json())) == (413, ["detail"]), path
    assert not caplog.records


def test_every_response_has_the_security_headers(client: TestClient) -> None:
    for path in ("/api/searches", "/healthz", "/nothing"):
        headers = client.get(path).headers
        assert "script-src 'self'" in headers["content-security-policy"] and "unsafe" not in str(headers)
        assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")


def test_a_token_file_readable_by_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    given = {"tokens": str(path)}
    with pytest.raises(UserError, match="can't be read: No such file"):
        read_settings(None, given).read_tokens()
    path.write_text(f"read {READ}\n")
    path.chmod(0o640)
    with pytest.raises(UserError, match="chmod 600"):
        read_settings(None, given).read_tokens()
    path.chmod(0o600)
    assert read_settings(None, given).read_tokens() == {READ: Token("read", "the read token of line 1")}
    path.write_text(f"# of people\nwrite {WRITE} Anna B. \n")
    assert read_settings(None, given).read_tokens() == {WRITE: Token("write", "Anna B.")}
    for text, said in {
        "# none yet\n": "tokens has none: write lines",
        f"read {READ}\nadmin {WRITE}\n": "line 2: expected `read TOKEN`",
        "write short\n": "5 characters can be guessed",
    }.items():
        path.write_text(text)
        with pytest.raises(UserError, match=said):
            read_settings(None, given).read_tokens()


def test_settings_come_from_a_file_and_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    (tmp_path / "runs").mkdir()
    file.write_text("port: 9000\nlogs: logs\nconfigurations: [runs]\nhosts: [search.example.org]\n")
    found = read_settings(file, {"port": 9001, "host": None})
    assert (found.port, found.logs, found.configurations) == (9001, tmp_path / "logs", (tmp_path / "runs",))
    assert "search.example.org" in found.allowed_hosts
    for text, reason in {
        "prot: 1": "prot: unknown key",
        "configurations: [none]": "configurations: .*none is no folder",
    }.items():
        file.write_text(text)
        with pytest.raises(UserError, match=reason):
            read_settings(file, {})
