"""Launching by names: checks, started processes, and the launch page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import store_samples as samples
import yaml
from page_checks import Page, check, page_of
from safetensors import safe_open
from server_tokens import READ, WRITE
from starlette.testclient import TestClient

import moevolve
from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import load_run_config, parse_run_config
from moevolve.search.config.run import RunConfig
from moevolve.search.server.app import make_app
from moevolve.search.server.processes import Job, ProcessRunner
from moevolve.search.server.settings import ServerSettings
from moevolve.store.records import ExportRecord
from moevolve.store.repository import Store
from moevolve.workers.children.process import ChildProcess

EVIL = "<b>'\"&"
HEADERS = {"authorization": f"Bearer {WRITE}", "x-moevolve": "1", "accept": "text/html"}


@pytest.fixture(scope="module")
def runs(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of run files: three to launch, one whose model is on a hub, and one with a wrong key."""
    folder = tmp_path_factory.mktemp("runs")
    tiny.write_run(folder / "small.yaml", "calm")
    tiny.write_run(folder / "other.yaml", "other", engine={"threads": 2}, genome={"kind": "eep", "experts": 3})
    searched = {"experts": None, "neuron_share": 0.5}
    phases = [{"kind": "prune", "evaluations": 4, "initial": 2, "repair": {"neurons": True}}]
    tiny.write_run(folder / "share.yaml", "share", genome=searched, phases=phases)
    tiny.write_run(folder / "far.yaml", "far", model={"path": "nobody/nothing"})
    tiny.write_run(folder / "wrong.yaml", "wrong", **{EVIL: 1})
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path_factory.mktemp('store') / 'lab.db'}") as opened:
        yield opened


@pytest.fixture(scope="module")
def client(store: Store, runs: Path, tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client with a write token of a server with all that launches and exports may name."""
    tokens = tmp_path_factory.mktemp("served") / "tokens"
    tokens.write_text(f"read {READ}\nwrite {WRITE}\n")
    tokens.chmod(0o600)
    served = ServerSettings(
        store=store.url,
        tokens=tokens,
        configurations=(runs,),
        models={"tiny": str(tiny.model), "gone": "/nowhere/model"},
        exports=Path("/exports"),
        logs=tokens.with_name("logs"),
    )
    with TestClient(make_app(store, served), "http://localhost:8080", headers=HEADERS) as found:
        yield found


@pytest.fixture(autouse=True)
def check_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks in this process, which has torch; `test_light_server` has a server start its own."""
    monkeypatch.setattr(ChildProcess, "call", lambda _, function, *arguments: function(*arguments))


def stored(store: Store, config: RunConfig, name: str) -> None:
    """Record a search of a configuration."""
    config = config.model_copy(update={"name": name})
    store.create_search(
        replace(samples.search(name), config=config.canonical_json(), config_hash=config.config_hash), [samples.split()]
    )


def launched(command: list[str]) -> RunConfig:
    """The settings that a command launches."""
    changes = [command[place + 1] for place, part in enumerate(command) if part == "--set"]
    return load_run_config(Path(command[1]), tuple(changes))


def test_a_launch_runs_what_its_check_shows(
    client: TestClient, started: list[list[str]], store: Store, tiny: Any, runs: Path
) -> None:
    asked = {"configuration": "small", "name": "mine", "model": "tiny", "overrides": {"phases.0.evaluations": 200}}
    answer = client.post("/api/searches/check", json=asked)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    assert (whole["name"], whole["status"], started) == ("mine", None, [])
    plan = whole["takes"]
    # 2 of 4 experts in each of 2 groups.
    assert plan["phases"] == [
        {"kind": "prune", "individuals": 200},
        {"kind": "merge", "individuals": 12},
    ]
    assert (plan["ranked"], plan["tested"]) == (1 + 3, 2 + 4)
    with safe_open(tiny.model / "model.safetensors", "np") as weights:
        sizes = {name: weights.get_tensor(name).size for name in weights.keys()}  # noqa: SIM118
    full, pruned, _ = plan["sizes"]
    assert (full["title"], full["parameters"], full["experts"]) == ("full model", sum(sizes.values()), 4)
    told = moevolve.estimate(runs / "small.yaml", model=str(tiny.model), overrides=["phases.0.evaluations=200"])
    assert plan == moevolve.as_data(told) | {"name": "mine"}
    in_experts = sum(size for name, size in sizes.items() if "experts" in name)
    assert full["parameters"] - pruned["parameters"] >= in_experts // 2 and pruned["experts"] == 2
    would_run = parse_run_config(yaml.safe_load(whole["settings"]), "plan")
    assert (would_run.name, would_run.store) == ("mine", store.url)

    assert client.post("/api/searches", json=asked).status_code == 202
    (command,) = started
    assert command[:5] == ["launch", str(runs / "small.yaml"), "--name", "mine", "--or-resume"]
    would_launch = launched(command)
    assert would_launch.config_hash == would_run.config_hash


def test_what_a_hub_model_takes_is_unknown(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: Any) -> None:
        raise AssertionError("a check asked the network")

    monkeypatch.setattr("socket.socket.connect", no_network)
    plan = client.post("/api/searches/check", json={"configuration": "far"}).json()
    assert plan["takes"] is None


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"configuration": "big"}, 404, "no configuration 'big': there are far, other, share, small, wrong"),
    ({"configuration": "../small"}, 404, "no configuration"),
    ({"configuration": "wrong"}, 422, "unknown key"),
    ({"overrides": {"seed": -1}}, 422, "seed: "),
    ({"overrides": {"genome.experts": 9}}, 422, "genome.experts: 9 is more than the model's 4 experts"),
    ({"overrides": {"strategy": "nevergrad:Nix"}}, 422, "nevergrad has no such optimiser"),
    ({"overrides": {"model.path": "/etc"}}, 422, "'model.path' can't be set over the network; what can: seed"),
    ({"overrides": {"final.held_out": "x"}}, 422, "can't be set over the network"),
    ({"model": "huge"}, 422, "model: the server knows no 'huge'"),
    ({"model": "gone"}, 422, "model /nowhere/model: no such directory"),
    ({"tasks": ["boolq", "nix"]}, 422, "tasks: the server knows no 'nix'"),
    ({"name": "../up"}, 422, "name: String should match pattern"),
    ({"name": "taken"}, 409, "search taken has other settings; choose another name"),
]


def test_wrong_launches_start_nothing(client: TestClient, started: list[list[str]], store: Store, runs: Path) -> None:
    stored(store, load_run_config(runs / "small.yaml", ("seed=9",)), "taken")
    for asked, status, detail in WRONG:
        answer = client.post("/api/searches/check", json={"configuration": "small"} | asked)
        if "nevergrad" not in detail:  # the process says it
            assert client.post("/api/searches", json={"configuration": "small"} | asked).json() == answer.json()
        assert answer.status_code == status and detail in answer.json()["detail"], (asked, answer.text)
    assert started == []


def test_a_search_with_the_same_settings_would_continue(client: TestClient, store: Store, runs: Path) -> None:
    stored(store, load_run_config(runs / "small.yaml"), "again")
    store.set_status("id-again", "interrupted")
    asked = {"configuration": "small", "name": "again", "overrides": {"workers.count": 9}}
    plan = client.post("/api/searches/check", json=asked).json()
    assert (plan["name"], plan["status"]) == ("again", "interrupted")


def test_run_files_and_their_faults_are_listed(client: TestClient) -> None:
    page = page_of(client, "/launch")
    assert {f"/launch?configuration={name}" for name in ("small", "other", "far")} < set(page.links)
    assert "1 other file can't be launched" in page.text and f"{EVIL}: unknown key" in page.text
    assert "Nothing was started yet" in page.text
    assert "/launch" in page_of(client, "/").links


def test_no_password_of_a_store_is_shown(store: Store, tiny: Any, tmp_path: Path) -> None:
    url = "postgresql://me:secret@host/db"
    tiny.write_run(tmp_path / "kept.yaml", "kept", store=url)
    app = make_app(store, ServerSettings(configurations=(tmp_path,), store=url, logs=tmp_path))
    writer = TestClient(app, "http://localhost", headers=HEADERS)
    for answer in (
        writer.post("/api/searches/check", json={"configuration": "kept"}),
        writer.get("/launch?configuration=kept"),
    ):
        assert answer.status_code == 200 and "***@host/db" in answer.text and "secret" not in answer.text


FORM = {"configuration": "small", "name": "mine", "model": "tiny", "settings": "genome.experts=3", "launch": ""}


def test_a_form_is_checked_and_launched(client: TestClient, started: list[list[str]], tiny: Any) -> None:
    lines = "phases.0.evaluations = 8\n\n# by half\nworkers.count=auto\nstrategy = evolution\ngenome.experts=3"
    typed = FORM | {"settings": lines, "tasks": "boolq"}
    checked = client.post("/launch?part=1", json=typed | {"check": ""})
    page = check(checked.text, whole=False)
    assert "8 in prune, then 12 in merge" in page.text and "experts: 3" in page.text and not started
    assert client.post("/launch?part=1", json=typed).status_code == 200
    (command,) = started
    config = launched(command)
    assert command[3] == "mine"
    assert (config.genome.experts, config.phases[0].evaluations, config.workers.count) == (3, 8, "auto")  # type: ignore[union-attr]
    assert (config.model.path, [task.name for task in config.tasks]) == (str(tiny.model), ["boolq"])
    assert client.post("/launch?part=1", json=FORM | {"tasks": ["boolq", "rte"]}).status_code == 200
    assert [task.name for task in launched(started[1]).tasks] == ["boolq", "rte"]
    for changes, said in (
        ({"settings": "seed = 1\nwindow"}, "window: expected KEY=VALUE"),
        ({"settings": "model.path = /etc"}, "'model.path' can't be set over the network"),
        ({"settings": "genome.experts=9"}, "genome.experts: 9 is more than the model's 4 experts"),
    ):
        answer = client.post("/launch?part=1", json=FORM | {"check": ""} | changes)
        page = check(answer.text, whole=False)
        assert answer.status_code == 422 and said in page.text and len(started) == 2, changes
        assert page.all("p")[0]["role"] == "alert"


def test_a_launch_leads_to_its_search_or_shows_its_failure(
    client: TestClient, store: Store, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/launch/arrival?name=arrived&part=1"
    assert client.get(path).status_code == 404
    job = Job("arrived", "launch", datetime.now(UTC), 7, True, None, "")
    monkeypatch.setattr(ProcessRunner, "knows", lambda *_: True)
    monkeypatch.setattr(ProcessRunner, "job", lambda *_: job)
    waiting = client.get(path)
    assert "process 7" in waiting.text and polls(check(waiting.text, whole=False), path)
    stored(store, load_run_config(runs / "small.yaml"), "arrived")
    assert client.get(path).headers["hx-redirect"] == "/searches/arrived"
    job = Job("lost", "launch", datetime.now(UTC), 7, False, 2, f"error: {EVIL}")
    failed = page_of(client, "/launch/arrival?name=lost&part=1")
    assert f"lost failed with code 2: error: {EVIL}" in failed.text and not failed.links


def test_a_form_is_disabled_for_a_read_token(client: TestClient) -> None:
    headers = {"accept": "text/html", "authorization": f"Bearer {READ}"}
    reader = TestClient(client.app, "http://localhost", headers=headers)
    page = page_of(reader, "/launch?configuration=small")
    assert all("disabled" in found for found in page.all("button", "input", "textarea", "select"))
    assert "needs a token of scope write" in page.text
    refused = reader.post("/api/searches/check", json={"configuration": "small"}, headers={"x-moevolve": "1"})
    assert refused.status_code == 403


def polls(page: Page, path: str) -> bool:
    """Whether a page polls one of its parts."""
    (part,) = [found for found in page.all("div") if found.get("hx-get") == path]
    return part["hx-trigger"].startswith("every ")


def test_an_export_is_started_with_its_options_and_its_state_is_shown(
    client: TestClient, store: Store, runs: Path, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(store, load_run_config(runs / "small.yaml"), "exported")
    store.record("id-exported", [samples.decided(0, 0.5)])
    part = "/individuals/exported:0/exports?part=1"
    assert "There is no export yet." in page_of(client, part).text
    path = "/api/individuals/exported:0/export"
    assert client.post(path, json={}).status_code == 202
    assert client.post(path, json={"form": "stock", "device": "cpu", "dtype": "float32"}).status_code == 202
    assert client.post(path, json={"requantise": True, "mtp": "keep"}).status_code == 202
    assert client.post(path, json={"device": "tpu"}).status_code == 422
    plain = ["export", "exported:0", "/exports/exported-0"]
    assert started == [
        plain,
        [*plain, "--form", "stock", "--device", "cpu", "--dtype", "float32"],
        [*plain, "--mtp", "keep", "--requantise"],
    ]
    for code, said in {None: "being exported", 0: "exported", 2: "the export failed with code 2"}.items():
        job = Job("exported:0", "export", datetime.now(UTC), 7, code is None, code, f"error: {EVIL}")
        monkeypatch.setattr(ProcessRunner, "job", lambda _, name, job=job: {"exported:0": job}[name])
        for path in ("/individuals/exported:0", part):
            page = page_of(client, path)
            assert said in page.texts_of("span") and f"error: {EVIL}" in page.text
            assert polls(page, part) == (code is None)

    def ends_now(_: ProcessRunner, name: str) -> Job:
        store.add_export(name, ExportRecord("/just/written", "stock"))
        return Job(name, "export", datetime.now(UTC), 7, False, 0, "written")

    monkeypatch.setattr(ProcessRunner, "job", ends_now)
    page = page_of(client, part)
    assert "/just/written" in page.text and not polls(page, part)


@pytest.mark.parametrize("name", ["../../outside", "a/b", "/etc/outside", "--store", "..", "a\nb"])
def test_nothing_is_started_for_a_search_of_a_name_that_no_launch_gives(
    name: str, client: TestClient, store: Store, runs: Path, started: list[list[str]]
) -> None:
    config = load_run_config(runs / "small.yaml")
    foreign = replace(samples.search(name), id=samples.digest(name), config=config.canonical_json())
    store.create_search(foreign, [samples.split()])
    store.record(foreign.id, [samples.decided(0, 0.5)])
    for path in (f"individuals/{foreign.id}:0/export", f"searches/{foreign.id}/resume"):
        answer = client.post(f"/api/{path}", json={})
        assert answer.status_code == 422 and "that no launch calls so" in answer.json()["detail"], answer.text
    assert not started


@pytest.mark.parametrize("control", ["\n", "\r", "\x1b[2J", "\x85", "\u2028"])
def test_no_argument_writes_a_line_of_its_own_into_a_log(control: str, tmp_path: Path) -> None:
    runner = ProcessRunner("sqlite:///lab.db", tmp_path)
    with pytest.raises(UserError, match="has a line break or another control character; leave it out"):
        runner.start("small", ["shrink", "--columns", f"prompt=a{control}asked by nobody"])
    assert not runner.knows("small") and runner.log("small") == ""


def test_processes_get_the_servers_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "environment"
    script.write_text("#!/bin/sh\nenv\n")
    script.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(script))
    monkeypatch.setenv("MOEVOLVE_WRITE_TOKEN", WRITE)
    runner = ProcessRunner("sqlite:///lab.db", tmp_path)
    for name in ("one", "two", "one"):
        runner.start(name, ["launch"])
        while runner.job(name).running:
            sleep(0.01)
    assert [(one.name, one.exit_code) for one in runner.jobs()] == [("two", 0), ("one", 0)], "the latest comes last"
    given = dict(line.partition("=")[::2] for line in runner.log("one").splitlines())
    assert given["MOEVOLVE_STORE"] == "sqlite:///lab.db" and "MOEVOLVE_WRITE_TOKEN" not in given


def test_a_name_with_slashes_reads_no_log_elsewhere(tmp_path: Path) -> None:
    """As a store that was made elsewhere may have one."""
    (tmp_path / "secret.log").write_text("secret")
    (tmp_path / "logs").mkdir()
    assert ProcessRunner("sqlite://", tmp_path / "logs").log("../secret") == ""
