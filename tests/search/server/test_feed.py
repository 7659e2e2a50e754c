"""News: one query serves all watchers, and there is none without watchers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient
from store_samples import search, split
from waiting import PATIENT_S

from moevolve.search.running.lease_heartbeat import this_process
from moevolve.search.server import feed as feed_module
from moevolve.search.server.app import make_routes
from moevolve.search.server.feed import Feed
from moevolve.search.server.settings import ServerSettings
from moevolve.store.repository import Store


@pytest.fixture
def store(store: Store) -> Store:
    store.create_search(search("alpha"), [split()])
    return store


def pollers() -> list[asyncio.Task[Any]]:
    """Tasks that query a store."""
    return [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") == "_run"]


def test_watchers_share_one_query(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = counted(store, monkeypatch)

    async def watch() -> None:
        feed = Feed(store, interval=3600)
        for _ in range(2):
            watchers = [feed.watch() for _ in range(10)]
            told = await asyncio.gather(*map(anext, watchers))
            assert all(list(news) == ["id-alpha"] for news in told)
            assert len(pollers()) == 1 and len(looks) == 1
            for watcher in watchers:
                await watcher.aclose()
        await feed.close()

    asyncio.run(watch())


def test_a_watcher_may_leave_during_the_first_query(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        may_end.wait(PATIENT_S)

    counted(store, monkeypatch, slow)

    async def leave() -> None:
        feed = Feed(store, interval=0.01)
        watching = asyncio.ensure_future(anext(feed.watch()))
        await asyncio.to_thread(begun.wait, 60)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
        may_end.set()
        other = feed.watch()
        assert "id-alpha" in await anext(other)
        await other.aclose()
        await asyncio.wait_for(asyncio.gather(*pollers()), PATIENT_S)  # nobody watches, so nobody looks

    asyncio.run(leave())


def test_the_number_of_watchers_is_limited(client: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_WATCHERS", 2)

    async def watch() -> list[bool]:
        feed, found, watchers = Feed(store), [], []
        for _ in range(2):
            found.append(feed.is_full)
            watchers.append(feed.watch())
            await anext(watchers[-1])
        found.append(feed.is_full)
        await watchers[0].aclose()
        found.append(feed.is_full)
        await feed.close()
        return found

    assert asyncio.run(watch()) == [False, False, True, False]
    monkeypatch.setattr(Feed, "is_full", True)
    refused = client.get("/api/news")
    assert refused.status_code == 503 and "watch already" in refused.json()["detail"]


def test_a_stream_can_be_limited_to_one_search_and_reports_drivers(
    lab_store: Store, settings: Callable[..., ServerSettings]
) -> None:
    lab_store.create_search(search("beta"), [split()])
    app = make_routes(lab_store, settings())

    async def listen() -> list[str]:
        told: asyncio.Queue[str] = asyncio.Queue()
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message.get("body"):
                told.put_nowait(message["body"].decode())

        scope = {"type": "http", "method": "GET", "path": "/api/news", "headers": []}
        scope |= {"query_string": b"search=id-alpha", "http_version": "1.1", "scheme": "http", "server": ("test", 80)}
        stream = asyncio.create_task(app(scope, receive, send))
        heard = [await asyncio.wait_for(told.get(), PATIENT_S)]
        await asyncio.to_thread(lab_store.set_status, "id-beta", "running")
        await asyncio.to_thread(lab_store.acquire, "id-alpha", this_process(), 600)
        heard += [await asyncio.wait_for(told.get(), PATIENT_S) for _ in range(2)]
        gone.set()
        await asyncio.wait_for(stream, PATIENT_S)
        await app.state.server.feed.close()
        return heard

    first, then, turned = asyncio.run(listen())
    assert first.startswith("event: cursors\n") and "id-beta" not in first + then
    assert json.loads(first.partition("data: ")[2])["id-alpha"]["alive"] is False
    assert json.loads(then.partition("data: ")[2])["id-alpha"]["alive"] is True
    assert turned == 'event: drivers\ndata: ["id-alpha"]\n\n'


def counted(store: Store, monkeypatch: pytest.MonkeyPatch, before: Callable[[], object] = lambda: None) -> list[int]:
    """Gets an entry for each query of the store."""
    looks: list[int] = []
    read = store.controls

    def look(*given: Any) -> Any:
        looks.append(1)
        before()
        return read(*given)

    monkeypatch.setattr(store, "controls", look)
    return looks
