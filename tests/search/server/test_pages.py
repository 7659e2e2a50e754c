"""Pages without JavaScript: contents, escaping, and links."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest
import store_samples as samples
from page_checks import check, check_policy, page_of
from server_tokens import READ, WRITE
from starlette.testclient import TestClient

from moevolve.search.report.rendering import FOLDER as REPORT
from moevolve.search.server.app import make_app
from moevolve.search.server.caches import Listings
from moevolve.search.server.pages.rendering import FOLDER
from moevolve.search.server.settings import ServerSettings
from moevolve.store.leases import this_process
from moevolve.store.records import Progress
from moevolve.store.repository import Store

KINDS = ("eep", "factorllm", "tomoe", "nanomoe")
EVIL = "<script>alert('x')</script>\"'&"


def fill_evil(store: Store) -> None:
    """A search that nothing was checked of: every text in it is markup, and its settings are of another version."""
    store.create_search(
        samples.search(EVIL, id="evil", status_reason=EVIL, model_path=EVIL, software_version=EVIL),
        [samples.split(EVIL), samples.split(EVIL, "dev")],
    )
    good = samples.individual(0, operator=EVIL, summary=EVIL, phase=EVIL, status="ok", fitness=0.5, tie_break=-1.0)
    child = samples.individual(1, (0,), operator=EVIL, summary=EVIL, status="ok", fitness=0.75, tie_break=-1.0)
    bad = samples.individual(2, (0,), operator=EVIL, status="failed", failure=EVIL, failure_kind="candidate")
    store.record("evil", [good, child, bad])
    store.set_status("evil", "failed", EVIL)


@pytest.fixture(scope="module")
def store(all_kinds: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    path = tmp_path_factory.mktemp("pages") / "store.db"
    shutil.copy(all_kinds.removeprefix("sqlite:///"), path)
    with Store.open(f"sqlite:///{path}") as opened:
        fill_evil(opened)
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def client(store: Store, folder: Path) -> TestClient:
    settings = ServerSettings(store=store.url, logs=folder / "logs", exports=folder / "exports")
    return TestClient(make_app(store, settings), base_url="http://localhost", headers={"accept": "text/html"})


@pytest.fixture(scope="module")
def reader(store: Store, folder: Path) -> TestClient:
    """A browser that was given the read token of a server, and no token to change anything."""
    tokens = folder / "tokens"
    tokens.write_text(f"read {READ}\nwrite {WRITE}\n")
    tokens.chmod(0o600)
    app = make_app(store, ServerSettings(store=store.url, logs=folder / "logs", tokens=tokens))
    browser = TestClient(app, base_url="http://localhost", headers={"accept": "text/html"})
    assert page_of(browser, "/", 401).all("input")[0]["name"] == "token"
    assert browser.get("/static/style.css").status_code == 200, "the page for signing in needs it"
    assert browser.post("/login", data={"token": READ}).url.path == "/"
    return browser


def same(path: str) -> str:
    """What the addresses of pages have in common that show the same of another search or individual."""
    for others, one in ((r"(individuals/[^:]*:)\d+", r"\g<1>N"), ("factorllm|tomoe", "nanomoe"), (r"only=\w+", "only")):
        path = re.sub(others, one, path)
    return path


def test_all_links_work_and_all_pages_are_valid(client: TestClient) -> None:
    seen, left = set[str](), ["/"]
    while left:
        path = left.pop()
        where = urlsplit(path)
        key = same(f"{where.path}?{where.query}")
        # News have no end; reports and drawings are tested by themselves.
        if where.netloc or key in seen or where.path.endswith(("/api/news", "/report", "/genome.svg")):
            continue
        seen.add(key)
        answer = client.get(path)
        assert answer.status_code == 200, (path, answer.text[-300:])
        if where.path.startswith(("/static/", "/api/")) or where.path.endswith(".svg"):
            continue
        page = check(answer.text, whole="part=1" not in path)
        check_policy(page, answer.headers["content-security-policy"])
        left += [urljoin(path, link) for link in page.links]
    report = client.get("/searches/nanomoe/report")
    assert report.status_code == 200 and "nanomoe" in report.text
    assert "sandbox" in report.headers["content-security-policy"]
    assert len(seen) > 80 and {"/searches/eep?", "/individuals/nanomoe:N?", "/searches/nanomoe/costs?"} < seen


def test_searches_are_filtered_and_sorted(client: TestClient, store: Store) -> None:
    def listed(query: str) -> list[str]:
        page = page_of(client, f"/?{query}")
        return [found["value"] for found in page.all("input") if found.get("name") == "searches"]

    tests = {one.search.name: one.test for one in store.searches() if one.test is not None}
    assert listed("text=NANOMOE&sort=name") == listed("task=&text=nanomoe&status=finished") == ["nanomoe"]
    assert listed("status=running") == []
    assert listed("sort=test")[:4] == sorted(tests, key=lambda name: -tests[name]) and len(tests) == 4


@pytest.mark.parametrize("kind", ["eep", "nanomoe"])
def test_genomes_and_lineages_are_shown(client: TestClient, store: Store, kind: str) -> None:
    rows = store.page(store.search(kind).id, "best", limit=100)
    child = next(row for row in rows if row.parents and row.phase != "prune")
    path = f"/individuals/{kind}:{child.index}/genome"
    images, answer = [found["src"] for found in page_of(client, path).all("img")], client.get(f"{path}.svg")
    if kind == "nanomoe":
        assert not images and answer.status_code == 404, "no paper draws its mixing"
    else:
        assert images == [f"{path}.svg"] and answer.headers["content-type"] == "image/svg+xml"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.text.startswith("<svg") and "<script" not in answer.text
    lineage = page_of(client, f"/individuals/{kind}:{child.index}/lineage?part=1")
    assert f"/individuals/{kind}:{child.parents[0]}" in lineage.links
    meaning = {"eep": "|dW|: distance of merging coefficients", "nanomoe": "|dM|: distance of mixing coefficients"}
    assert all(
        meaning[kind] in page_of(client, f"/{path}").text
        for path in (f"individuals/{kind}:{child.index}", f"searches/{kind}")
    )


def test_stored_texts_are_escaped(client: TestClient) -> None:
    where = "/searches/evil"
    paths = ["/", where, *(f"{where}{part}" for part in ("/now", "/events", "?order=failed", "/costs"))]
    paths += ["/individuals/evil:0", "/individuals/evil:2", "/individuals/evil:1/lineage", "/individuals/evil:0/genome"]
    paths += ["/best", f"/compare?searches={EVIL}"]
    for path in (*paths, f"/searches/{EVIL[:20]}nothing"):
        answer = client.get(path)
        assert answer.status_code in (200, 404)
        page = check(answer.text)
        assert "<script>" not in answer.text and "alert('" not in answer.text, path
        assert all("src" in found for found in page.all("script"))
    assert EVIL in page_of(client, where).text


def test_unreadable_settings_hide_nothing_else(client: TestClient) -> None:
    page = page_of(client, "/searches/evil")
    assert "2 individuals" not in page.text and "3 individuals" in page.text
    assert "Another version of moevolve" in page.text and not {link for link in page.links if "standings" in link}
    assert "stored configuration" in page_of(client, "/searches/evil/standings", 422).text
    assert "can't be drawn" in page_of(client, "/individuals/evil:0/genome").text


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/searches/nix", 404, "no search 'nix'"),
        ("/individuals/eep:999", 404, "no individual"),
        ("/best?experts=many", 422, "experts"),
        ("/searches/eep?order=worst", 422, "order"),
        ("/nowhere", 404, ""),
    ],
)
def test_errors_are_pages(client: TestClient, path: str, status: int, said: str) -> None:
    page = page_of(client, path, status)
    assert said in page.text
    assert [found for found in page.all("p") if found.get("role") == "alert"]
    part = client.get(f"{path}{'&' if '?' in path else '?'}part=1")
    assert part.status_code == status and "<h1" not in part.text
    assert "detail" in client.get(path, headers={"accept": "*/*"}).json(), "it is no browser"
    assert client.get(f"/api{path}").headers["content-type"] == "application/json"


def test_a_running_search_is_controlled_with_a_write_token(
    client: TestClient, reader: TestClient, store: Store
) -> None:
    store.create_search(samples.search("live", id="live"), [samples.split()])
    store.set_status("live", "running")
    lease = store.acquire("live", this_process(), 60)
    progress = Progress(7, 20, "merge", (3, 0.625), 0.75, 1, 2, 5, 0.5, 3723.0)
    store.renew(lease, 60, "evaluating", progress)
    page = page_of(client, "/searches/live")
    assert "7 of 20" in page.text and "62 min left" in page.text and "evaluating" in page.text
    assert "62.5" in page_of(client, "/").text
    asked = {found.get("hx-post"): found for found in page.all("button", "form")}
    assert {f"/api/searches/live/{verb}" for verb in ("pause", "stop", "cancel", "scale")} < set(asked)
    assert "moevolve pause live" in page.text, "for who has no JavaScript"
    page = page_of(reader, "/searches/live")
    assert all("disabled" in found for found in page.all("button", "input") if found.get("class") != "link"), "may read"
    assert "Sign out" in page.text
    store.ask("live", "paused")
    now = page_of(client, "/searches/live/now")
    assert "running" in now.texts_of("span") and "asked to pause" in now.text
    store.set_status(lease, "paused")
    store.renew(lease, 60, "evaluating", progress)
    now = page_of(client, "/searches/live/now")
    assert "paused" in now.texts_of("span") and "evaluating" not in now.text, "it waits"
    store.set_status(lease, "failed")
    assert "starting" in page_of(client, "/searches/live/now").texts_of("span"), "it was resumed"
    store.set_status(lease, "running")
    store.release(lease)
    assert "orphaned its driver is gone" in page_of(client, "/searches/live/now").text


def test_the_policy_allows_only_own_files_and_static_files_are_revalidated(client: TestClient) -> None:
    policy = client.get("/").headers["content-security-policy"]
    assert "script-src 'self'" in policy and "unsafe" not in policy
    for name in ("main.js", "style.css", "favicon.svg", "vendor/uPlot.iife.min.js", "vendor/htmx.min.js"):
        answer = client.get(f"/static/{name}")
        assert answer.headers["cache-control"] == "no-cache"
        again = client.get(f"/static/{name}", headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304
    assert client.get("/static/../app.py").status_code == 404


def test_no_template_has_what_the_policy_refuses(client: TestClient) -> None:
    """Also in branches that no test renders: styles, code, and what htmx would evaluate."""
    policy = dict(part.strip().split(" ", 1) for part in client.get("/").headers["content-security-policy"].split(";"))
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    refused = (
        r"<style|\sstyle=|\son\w+=|hx-on|hx-vars|javascript:|js:|hx-trigger=\"[^\"]*\[|<script(?![^>]* src=\"/static/)"
    )
    files = [*(FOLDER / "templates").glob("*.jinja"), *(REPORT / "templates").glob("*_part.jinja")]
    for file in [*files, REPORT / "templates" / "macros.jinja"]:
        found = re.search(refused, file.read_text())
        assert found is None, f"{file.name} has {found and found[0]}"
    (config,) = [found["content"] for found in page_of(client, "/").all("meta") if found.get("name") == "htmx-config"]
    assert {"allowEval": False, "includeIndicatorStyles": False}.items() <= json.loads(config).items()


def test_listings_are_read_again_after_an_event(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'one.db'}") as store:
        app = make_app(store, ServerSettings(store=store.url, logs=tmp_path))
        browser = TestClient(app, base_url="http://localhost", headers={"accept": "text/html"})
        for path in ("/", "/best", "/pareto", "/compare"):
            page_of(browser, path)  # of an empty store
        listings = Listings(store, max_age=3600)
        assert listings.summaries() == []
        store.create_search(samples.search("alpha"), [samples.split()])
        first = listings.summaries()
        assert [one.search.name for one in first] == ["alpha"]
        assert listings.summaries() is first, "nothing happened"
        store.set_status("id-alpha", "running")
        assert listings.summaries()[0].search.status == "running"
        assert Listings(store, max_age=0).tasks() == ["rte"]
