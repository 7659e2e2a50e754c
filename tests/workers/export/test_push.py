"""Uploads to the hub, by its real client, to a small hub on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import TOKEN, FakeHub, fake_hub

PROGRAM = """
import sys
from pathlib import Path
from moevolve.evaluators.errors import UserError
from moevolve.workers.export.push import check_login, push
try:
    check_login(sys.argv[2])
    print(push(Path(sys.argv[1]), sys.argv[2]))
except UserError as error:
    sys.exit(f"error: {error}")
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with fake_hub() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export")
    (path / "README.md").write_text("---\nlicense: mit\n---\n# demo:4\n")
    (path / "config.json").write_text("{}")
    (path / "model-00001-of-00002.safetensors").write_bytes(os.urandom(100_000))
    (path / "model-00002-of-00002.safetensors").write_bytes(b"second")
    return path


def pushed(folder: Path, endpoint: str, *arguments: str, token: str | None = TOKEN) -> subprocess.CompletedProcess[str]:
    """A process that reads the client's settings from its environment, as users have them."""
    given = {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder.parent)}
    given |= {} if token is None else {"HF_TOKEN": token}
    command = [sys.executable, "-c", PROGRAM, str(folder), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    return subprocess.run(command, env=environment | given, capture_output=True, text=True, check=False)


def test_all_files_arrive_in_a_private_repository(hub: FakeHub, folder: Path) -> None:
    done = pushed(folder, hub.url, "me/small")
    assert (done.returncode, done.stdout) == (0, f"{hub.url}/me/small\n"), done.stderr
    found = {path: content for (repository, path), content in hub.files.items() if repository == "me/small"}
    assert found == {file.name: file.read_bytes() for file in folder.iterdir()}
    assert hub.by_lfs == {name for name in found if name.endswith(".safetensors")}
    assert hub.visibility["me/small"] == "private"
    again = pushed(folder, hub.url, "me/small")
    assert again.returncode == 1 and "already created this model repo" in again.stderr, again.stderr


@pytest.mark.parametrize("reason", ["wrong token", "no rights", "no network"])
def test_a_failure_is_one_line_that_names_the_export(hub: FakeHub, folder: Path, reason: str) -> None:
    endpoint, before = hub.url, sorted(folder.iterdir())
    if reason == "no network":
        with socket.create_server(("127.0.0.1", 0)) as closed:
            endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    hub.failing = "/objects/batch" if reason == "no rights" else None
    done = pushed(folder, endpoint, f"me/{reason[-5:].strip()}", token="hf_wrong" if reason == "wrong token" else TOKEN)
    hub.failing = None
    message = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and message.startswith(
        f"error: the checkpoint is complete in {folder}, but wasn't pushed to"
    )
    assert {"wrong token": "401", "no rights": "403", "no network": "refused"}[reason] in message, message
    assert len(message) < 1000 and "`hf upload me/" in message and sorted(folder.iterdir()) == before


def test_without_a_token_nothing_begins(hub: FakeHub, folder: Path) -> None:
    done = pushed(folder, hub.url, "me/none", token=None)
    assert done.stderr.strip() == (
        "error: --push me/none requires a token of the hub; log in with `hf auth login`, or set HF_TOKEN"
    )
    assert "me/none" not in hub.visibility
