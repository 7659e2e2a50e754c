"""Submitting searches to clusters; that a job runs is tested with the command."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store_samples import search

import moevolve
from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import load_run_config
from moevolve.search.config.run import RunConfig
from moevolve.search.pools import ray_jobs
from moevolve.search.pools import submit as service
from moevolve.search.pools.ray_jobs import ClusterJob, JobLabel, JobServer
from moevolve.search.running.launch import register, set_up_new
from moevolve.store.repository import Store


@pytest.fixture
def config(tiny: Any, tmp_path: Path) -> RunConfig:
    return load_run_config(tiny.write_run(tmp_path / "run.yaml", "calm", store=f"sqlite:///{tmp_path}/moevolve.db"))


class Jobs:
    """A job server that records its jobs."""

    def __init__(self) -> None:
        self.url = "http://localhost:8265"
        self.known: list[ClusterJob] = []
        self.commands: list[str] = []

    def __call__(self, url: str, insecure: bool) -> Jobs:
        return self

    def submit(self, job: str, label: JobLabel, entrypoint: str, *_: Any) -> bool:
        assert all(each.id != job for each in self.known)
        self.known.append(ClusterJob(job, label, "PENDING", len(self.known)))
        self.commands.append(entrypoint)
        return True

    def jobs(self, search: str) -> list[ClusterJob]:
        return [job for job in self.known if search in (job.label.search, job.label.name)]

    def end(self) -> None:
        self.known = [replace(job, status="FAILED") for job in self.known]


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    jobs = Jobs()
    monkeypatch.setattr(service, "JobServer", jobs)
    return jobs


def test_a_request_may_be_repeated_and_its_id_is_no_others(config: RunConfig, jobs: Jobs) -> None:
    first = service.submit(config, jobs.url, None)
    assert first.new and first.job == first.id == jobs.known[0].id and first.status is None
    assert service.submit(config, jobs.url, None) == replace(first, new=False)
    named = service.submit(config.model_copy(update={"name": "other"}), jobs.url, "my-id")
    assert named.new and named.id == "my-id"
    jobs.end()
    assert service.submit(config, jobs.url, None) == replace(first, job=f"{first.id}-2")
    assert all(command.startswith("exec ") and "sqlite" not in command for command in jobs.commands)
    for changes in ({"seed": 4, "name": "other"}, {"name": "another"}):
        with pytest.raises(UserError, match="my-id is that of another search on this cluster: other"):
            service.submit(config.model_copy(update=changes), jobs.url, "my-id")


def test_the_store_is_the_truth(config: RunConfig, jobs: Jobs) -> None:
    sent = service.submit(config, jobs.url, None)
    jobs.end()
    record = search(id=sent.id, name="calm", config=config.canonical_json(), config_hash=config.config_hash)
    with Store.open(config.store) as store:
        store.create_search(record, [])
        lease = store.acquire(sent.id, "a driver", 60)
        for status in ("running", "finished"):
            store.set_status(lease, status)
            again = service.submit(config, jobs.url, None)
            assert (again.new, again.job, again.status) == (False, None, status)
        store.set_status(lease, "interrupted")
        store.release(lease)
    assert service.submit(config, jobs.url, None).job == f"{sent.id}-2"
    with pytest.raises(UserError, match=f"calm is in .* already, with id {sent.id}"):
        service.submit(config.model_copy(update={"seed": 4}), jobs.url, None)
    with pytest.raises(UserError, match=f"the id {sent.id} is that of search calm in .* other settings"):
        service.submit(config.model_copy(update={"name": "other"}), jobs.url, sent.id)


def test_an_unreachable_store_is_left_to_the_driver(config: RunConfig, jobs: Jobs) -> None:
    """Nothing listens at the store's address, as if only the cluster could reach its database."""
    pytest.importorskip("psycopg")
    far = config.model_copy(update={"store": "postgresql+psycopg://me:secret@127.0.0.1:1/searches?sslmode=disable"})
    sent = service.submit(far, jobs.url, None)
    assert sent.new and sent.status is None and "secret" not in str((sent, jobs.known, jobs.commands))


@contextmanager
def head(answer: bytes) -> Iterator[int]:
    """A server that says one thing, on all addresses of this machine; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("0.0.0.0", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_clusters_without_authentication_or_with_another_token_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[Any]()

    def client(url: str, headers: dict[str, str]) -> Any:
        found.append(headers)
        return SimpleNamespace(get_address=lambda: url)

    monkeypatch.setattr(ray_jobs, "JobSubmissionClient", client)
    with head(json.dumps({"authentication_mode": "disabled"}).encode()) as port:
        # 0.0.0.0 is no loopback address, and reaches this machine.
        with pytest.raises(UserError, match=r"whoever reaches .* RAY_AUTH_MODE=token .* --insecure"):
            JobServer(f"http://0.0.0.0:{port}")
        JobServer(f"http://0.0.0.0:{port}", insecure=True)
        JobServer(f"127.0.0.1:{port}")
        monkeypatch.setattr(ray_jobs, "JobSubmissionClient", lambda *_, **__: SimpleNamespace(get_address=lambda: "x"))
        with pytest.raises(UserError, match="unset them"):
            JobServer(f"http://localhost:{port}")
    with head(b"<html>") as port, pytest.raises(UserError, match="no Ray head answers there"):
        JobServer(f"http://localhost:{port}")
    with pytest.raises(UserError, match="no Ray head answers there"):
        JobServer(f"http://localhost:{port}")
    with pytest.raises(UserError, match="is no URL"):
        JobServer("ray://localhost:10001")
    assert found == [{}, {}]
    loader = SimpleNamespace(instance=lambda: SimpleNamespace(get_token_for_http_header=lambda **_: {}))
    monkeypatch.setattr(ray_jobs, "AuthenticationTokenLoader", loader)
    refused = pytest.raises(UserError, match="asks for a token, and there is none here")
    with head(json.dumps({"authentication_mode": "token"}).encode()) as port, refused:
        JobServer(f"http://0.0.0.0:{port}")


def test_loopback_addresses() -> None:
    assert all(map(ray_jobs.is_loopback, ("http://localhost:1", "http://127.1.2.3", "https://[::1]:8265")))
    others = ("http://head:8265", "http://10.0.0.1", "http://localhost.example.org")
    assert not any(map(ray_jobs.is_loopback, others))


def test_a_server_or_a_file_here_is_no_store_for_a_driver_on_another_machine(config: RunConfig, jobs: Jobs) -> None:
    with pytest.raises(UserError, match="http://host:8080 is a server: this needs the store itself"):
        moevolve.submit(config, jobs.url, store="http://host:8080")
    jobs.url = "http://head:8265"
    with pytest.raises(UserError, match=r"moevolve\.db: a SQLite file can't be used from http://head:8265"):
        service.submit(config, jobs.url, None)


def test_a_drivers_id_is_that_of_the_search_it_continues(config: RunConfig) -> None:
    with Store.open(config.store) as store:
        register(set_up_new(config, "first"), store)
        with pytest.raises(UserError, match="--id second: there is a search calm with id first"):
            moevolve.launch(config, store=store, search_id="second")
        assert store.control("first").epoch == 0, "nobody drove it"
