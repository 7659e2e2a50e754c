"""Pages and reports in a real browser, headless and offline: charts, live updates, keyboard, printing."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import store_samples as samples
from demo_chats import write_chats
from report_lab import finished
from served_here import served_here
from server_tokens import READ
from waiting import PATIENT_S

from moevolve.search.config.files import load_run_config, parse_stored_config
from moevolve.search.server.settings import ServerSettings, read_settings
from moevolve.store.leases import this_process
from moevolve.store.records import Progress
from moevolve.store.repository import Store

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
FLAGS = (
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
MORE = (
    "/compare?searches=eep",
    "/launch?configuration=small",
    "/shrink",
    "/login",
)
"""Pages that no walk through the others needs."""
PHONE = {"width": 390, "height": 800}
WAIT_MS = 1000 * PATIENT_S
Open = Callable[..., Any]


class Driver:
    """Runs a search as drivers do, individual by individual, from within the test."""

    def __init__(self, store: Store, name: str, pause_s: float = 0.2) -> None:
        self.store, self.id, self.made = store, f"id-{name}", 0
        store.create_search(samples.search(name), [samples.split()])
        self.lease = store.acquire(self.id, this_process(), 600)
        store.set_status(self.lease, "running")
        self._ended, self._pause_s = threading.Event(), pause_s
        self._thread = threading.Thread(target=self._run)

    def step(self, fitness: float) -> None:
        index, self.made = self.made, self.made + 1
        self.store.record(self.lease, [samples.decided(index, fitness)], [samples.evaluation(index, fitness)])
        progress = Progress(self.made, 500, "prune", (index, fitness), 0.9, 0, 0, self.made, 2.0, 250.0 - self.made)
        self.store.renew(self.lease, 600, "evaluating", progress)

    def _run(self) -> None:
        while not self._ended.wait(self._pause_s):
            self.step(min(0.899, 0.5 + 0.01 * self.made))

    def __enter__(self) -> Self:
        self.step(0.5)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.store.set_status(self.lease, "finished")
        self.store.release(self.lease)


@pytest.fixture(scope="module")
def store(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("browser")
    phases = [
        {"kind": "prune", "evaluations": 6, "initial": 4},
        {"kind": "merge", "evaluations": 6, "sigma": 0.2},
    ]
    run = tiny.write_run(folder / "eep.yaml", "eep", phases=phases, final={"rerank": 2, "random_baselines": 2})
    with Store.open(f"sqlite:///{folder / 'store.db'}") as opened:
        finished(opened, load_run_config(run))
        yield opened


@pytest.fixture(scope="module")
def url(store: Store, tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "runs").mkdir()
    tiny.write_run(folder / "runs" / "small.yaml", "small")
    settings = folder / "server.yaml"
    settings.write_text(
        "configurations: [runs]\nlogs: logs\nexports: exports\nmodels: {gone: /nowhere/model}\nuploads: sent\n"
    )
    with served_here(read_settings(settings, {"store": store.url}), "local_pool") as found:
        yield found


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def browse(chromium: Any, url: str) -> Iterator[Open]:
    """Open a path in a context of its own; whatever the browser complains of fails the test at its end.

    `refusals` are statuses that the test provokes.
    """
    complaints: list[str] = []
    contexts = []

    def watch(page: Any, refusals: tuple[int, ...]) -> None:
        def hear(said: Any) -> None:
            # htmx says of a refused event source no more than that there was an event.
            provoked = any(f"status of {status}" in said.text for status in refusals) or said.text == "[object Event]"
            if said.type in ("error", "warning") and not provoked:
                complaints.append(said.text)

        def see(answer: Any) -> None:
            if answer.status >= 400 and answer.status not in refusals:
                complaints.append(answer.url)

        page.set_default_timeout(WAIT_MS)
        page.on("console", hear)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("response", see)
        # News end with the page, and what a page still asked for ends when it is left.
        page.on("requestfailed", lambda asked: complaints.append(asked.url) if "ABORTED" not in asked.failure else None)

    def run(path: str, refusals: tuple[int, ...] = (), **options: Any) -> Any:
        context = chromium.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        watch(page, refusals)
        page.goto(path if path.startswith("http") else url + path)
        return page

    yield run
    for context in contexts:
        context.close()
    assert not complaints


def settled(page: Any) -> None:
    """Wait until all parts that come by themselves are there, and all images are drawn."""
    page.wait_for_function(
        "() => [...document.images].every(each => each.complete)"
        " && !document.querySelector('[aria-busy], .htmx-request')"
        " && !document.querySelector('.part[hx-trigger^=load] > .later')"
    )


def settle(page: Any) -> None:
    """Wait until a page on a phone in the dark is complete; it has its landmarks, fits, and is dark."""
    settled(page)
    seen = page.locator("body").aria_snapshot()
    for landmark in ("banner:", 'navigation "Site":', "main:", "contentinfo:"):
        assert landmark in seen, seen
    assert len(re.findall(r"heading .*\[level=1\]", seen)) == 1
    assert page.evaluate(
        "[...document.querySelectorAll('button, input:not([type=hidden]), select')]"
        ".every(each => each.labels?.length || each.textContent.trim())"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], page.url
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", background))) < 150, background


@pytest.mark.slow
def test_all_pages_are_visited_have_their_landmarks_and_fit_a_phone_in_the_dark(
    browse: Open, store: Store, url: str
) -> None:
    page = browse("/", viewport=PHONE, color_scheme="dark")
    settle(page)
    page.get_by_role("link", name="eep", exact=True).click()
    page.wait_for_selector("figure[data-drawn='12'] canvas")
    settle(page)
    assert page.get_by_role("table").filter(has_text="best found").count() == 1
    chart = page.locator(".u-over")
    chart.hover()
    page.wait_for_function(
        "() => /^individual \\d+: .* %, (prune|merge): .*; click/"
        ".test(document.querySelector('[data-readout]').textContent)"
    )
    chart.click()
    page.wait_for_url(re.compile(r"/individuals/eep:\d+$"))
    page.go_back()
    page.get_by_role("link", name="Report", exact=True).click()
    check_report(page)
    page.go_back()

    child = next(row for row in store.page(store.search("eep").id, "best", limit=100) if row.parents)
    page.locator(f"#individuals a[href='/individuals/eep:{child.index}']").click()
    page.get_by_role("heading", name=f"Individual eep:{child.index}").wait_for()
    settle(page)
    assert page.evaluate("[...document.images].map(each => each.naturalWidth > 100)") == [True]
    page.get_by_role("link", name="Best", exact=True).click()
    page.get_by_label("experts").fill("2")
    page.get_by_label("ranked by").select_option("search")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url(re.compile("experts=2.*split=search"))
    settle(page)
    page.get_by_role("link", name="Pareto").click()
    page.wait_for_selector("figure[data-pareto] canvas")
    settle(page)
    page.get_by_role("link", name="Searches", exact=True).click()
    page.get_by_role("heading", name="What happened last").wait_for()
    for path in MORE:
        page.goto(url + path)
        settle(page)


def check_report(page: Any) -> None:
    """It has its own styles, fits a phone and a desk with all of its figures, and can be printed."""
    page.get_by_role("heading", name="Search eep").wait_for()
    assert page.evaluate("getComputedStyle(document.body).maxWidth") != "none"
    for width in (1280, PHONE["width"]):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        heights = page.locator("figure svg").evaluate_all("all => all.map(each => each.getBoundingClientRect().height)")
        assert len(heights) == page.locator("figure").count() >= 2 and min(heights) > 50
    printed = page.pdf()
    assert printed.startswith(b"%PDF") and len(printed) > 20_000


def test_a_running_search_is_followed_and_controlled(browse: Open, store: Store) -> None:
    with Driver(store, "live"):
        overview = browse("/")
        page = browse("/searches/live")
        overview.wait_for_function(
            "() => [...document.querySelectorAll('progress')].some(each => each.value > 1 && each.max === 500)"
        )
        done = "() => document.querySelector('#now progress').value"
        page.wait_for_function("() => Number(document.querySelector('figure').dataset.drawn) > 1")
        before, drawn = page.evaluate(done), page.evaluate("document.querySelector('figure').dataset.drawn")
        page.wait_for_function(f"() => document.querySelector('#now progress').value > {before}")
        page.wait_for_function(f"() => Number(document.querySelector('figure').dataset.drawn) > {drawn}")
        page.locator("#news").filter(has_text="live").wait_for()

        # A part that changes keeps what has the focus and what is typed.
        page.get_by_role("spinbutton", name="Workers").fill("7")
        before = page.evaluate(done)
        page.wait_for_function(f"() => document.querySelector('#now progress').value > {before}")
        assert page.evaluate("[document.activeElement.id, document.activeElement.value]") == ["workers", "7"]
        page.keyboard.press("Enter")
        page.get_by_text("does so within seconds").wait_for()
        assert store.control("id-live").workers == 7
        page.get_by_role("button", name="Pause").click()
        page.get_by_role("button", name="Resume").wait_for()
        page.locator("#said").filter(has_text="now: running, asked to pause").wait_for()
        assert store.control("id-live").desired_state == "paused"
        page.get_by_role("button", name="Resume").click()
        page.get_by_role("button", name="Pause").wait_for()
        asked: list[str] = []
        page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
        page.get_by_role("button", name="Cancel").click()
        assert "for good" in asked[0] and store.control("id-live").desired_state == "running"
    page.locator("#now").get_by_text("finished").wait_for()
    assert not page.get_by_role("button").all(), "nothing to steer"


def test_a_page_reconnects_after_a_proxy_error(browse: Open, store: Store) -> None:
    page = browse("/login", refusals=(401, 502))
    page.clock.install()
    status = [502]
    page.route("**/api/news*", lambda route: route.fulfill(status=status[0]) if status else route.continue_())
    page.goto(page.url.removesuffix("login"))
    said = page.locator("#news")
    said.filter(has_text="not live: the server doesn't answer").wait_for()
    status[0] = 401
    page.clock.run_for(5000)
    said.filter(has_text="not live: signed out").wait_for()
    status.clear()
    page.clock.run_for(5000)
    said.filter(has_text="- live").wait_for()


def test_everything_is_reached_by_keyboard(browse: Open, store: Store) -> None:
    with Driver(store, "keys", pause_s=PATIENT_S):
        page = browse("/searches/keys")
        page.locator("#do-pause").wait_for()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to content"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        reached = []
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        order = [
            reached.index(name) for name in ("Pareto front", "do-pause", "do-stop", "do-cancel", "workers", "do-scale")
        ]
        assert order == sorted(order)
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is seen"


def test_a_search_is_launched_from_a_form(browse: Open, store: Store) -> None:
    page = browse("/launch?configuration=small", refusals=(422,))
    typed, problem = page.get_by_label("settings", exact=True), page.get_by_role("alert")
    typed.fill("genome.experts = 9\nphases.0.evaluations = 8\nwindow = 2")
    page.get_by_role("button", name="Check").click()
    problem.filter(has_text="genome.experts: 9").wait_for()
    settled(page)
    typed.fill("genome.experts = 3\nphases.0.evaluations = 8\nwindow = 2")
    page.get_by_role("button", name="Check").click()
    page.locator("#plan").filter(has_text="8 in prune, then 12 in merge").wait_for()
    settled(page)
    assert not problem.is_visible()

    page.get_by_label("model", exact=True).select_option("gone")
    page.get_by_label("name", exact=True).fill("lost")
    page.get_by_role("button", name="Launch").click()
    problem.filter(has_text="/nowhere/model: no such directory").wait_for()
    settled(page)
    assert typed.input_value().endswith("window = 2"), "nothing typed is lost"
    page.get_by_label("model", exact=True).select_option("")
    page.get_by_label("name", exact=True).fill("found")
    page.get_by_role("button", name="Launch").click()
    page.get_by_role("heading", name="Search found").wait_for()
    page.locator("#now").get_by_text("finished").wait_for()
    config = parse_stored_config(store.search("found").config, "found")
    assert (config.genome.experts, config.window, config.phases[0].evaluations) == (3, 2, 8)


def test_a_file_is_sent_and_a_model_shrunk_for_it(browse: Open, tmp_path: Path) -> None:
    page = browse("/shrink", refusals=(422,))

    def send(name: str) -> None:
        page.get_by_label("file", exact=True).set_input_files(tmp_path / name)
        with page.expect_response("**/shrink/files?part=1"):  # the list is loaded anew behind each
            page.get_by_role("button", name="Upload").click()
        settled(page)

    for name in ("chats.jsonl", "other.jsonl"):
        write_chats(tmp_path / name, 100)
        send(name)
        page.get_by_role("checkbox", name=name, checked=True).wait_for()
    (tmp_path / "few.csv").write_text("prompt,answer\na,b\nc,d\n")
    send("few.csv")
    page.locator("#said").filter(has_text="refused: --data few.csv").wait_for()
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete other.jsonl").click()
    page.get_by_role("button", name="Delete other.jsonl").wait_for(state="detached")
    settled(page)
    assert page.locator("#files input").count() == 1
    problem = page.get_by_role("alert")
    page.get_by_label("how much").fill("0%")
    page.get_by_role("button", name="Shrink").click()
    problem.filter(has_text="--experts 0%").wait_for()
    assert page.locator("[aria-invalid]").evaluate_all("all => all.map(each => each.id)") == ["amount"]
    page.get_by_label("how much").fill("50%")
    page.get_by_role("button", name="Shrink").click()
    problem.filter(has_text="no such directory").wait_for()


def test_signing_in_leads_to_the_page_that_was_asked_for_and_back_to_it(
    browse: Open, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEVOLVE_READ_TOKEN", READ)
    with served_here(ServerSettings(store=store.url), "local_pool") as guarded:
        page = browse(f"{guarded}/searches/eep?order=newest", refusals=(401,))
        for _ in range(2):
            page.get_by_label("Token").fill(READ)
            page.get_by_role("button", name="Sign in").click()
            page.get_by_role("heading", level=1, name="eep").wait_for()
            assert page.url == f"{guarded}/searches/eep?order=newest"
            settled(page)
            page.context.clear_cookies()
            with page.expect_navigation():
                page.evaluate("void htmx.ajax('GET', '/searches/eep/now?part=1', '#now')")
            page.get_by_role("heading", level=1, name="Sign in").wait_for()
            assert page.get_by_role("heading").count() == 1
