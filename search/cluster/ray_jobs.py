"""A Ray cluster's job server: where drivers are sent to run as jobs, and their logs are read.

It knows little of the searches: which jobs belong to which stands in the jobs' metadata. What became of a search is in
its store; Ray loses jobs when a head restarts, and calls some of them failed that live on.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from moevolve.evaluators.errors import UserError, first_line

LIMIT_BYTES = int(DASHBOARD_CLIENT_MAX_SIZE)
"""What a job server takes in one package of files."""

_ANSWER_S = 10
_STOP_S = 60
"""Seconds that a driver gets to end when Ray stops its job; Ray's own 3 s are less than a slow store needs."""
_OURS = "moevolve"

_HOW_TO_SECURE = (
    "start its nodes with RAY_AUTH_MODE=token and a token of `ray get-auth-token --generate`, reach it through a "
    "tunnel (`ssh -L 8265:localhost:8265 HEAD`), or say --insecure"
)


@dataclass(frozen=True, slots=True)
class Label:
    """What a job's metadata says of it; everybody who reaches the cluster can read that.

    Attributes:
        search: id.
        name: of the search.
        config_hash: of its configuration.
    """

    search: str
    name: str
    config_hash: str


@dataclass(frozen=True, slots=True)
class Job:
    """A driver that was sent to a cluster.

    Attributes:
        id: of the submission.
        label: which search it is for.
        status: as Ray has it: PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED.
        started_ms: when, in milliseconds since 1970.
    """

    id: str
    label: Label
    status: str
    started_ms: int

    @property
    def ended(self) -> bool:
        """Whether it runs no more, by what Ray knows."""
        return self.status in ("STOPPED", "SUCCEEDED", "FAILED")


class JobServer:
    """The job server of a cluster.

    Args:
        url: of the head's dashboard, `http://HEAD:8265`.
        insecure: go on although whoever reaches the cluster can run programs on it.

    Raises:
        UserError: it doesn't answer, doesn't let us in, or lets everybody in.
    """

    def __init__(self, url: str, insecure: bool = False) -> None:
        self.url = url = (url if "://" in url else f"http://{url}").rstrip("/")
        if urlsplit(url).scheme not in ("http", "https"):
            raise UserError(f"{url}: this is no URL of a cluster's dashboard; give http://HEAD:8265")
        headers = _headers(url, insecure)
        for name in ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
            logging.getLogger(name).setLevel(logging.WARNING)
        try:
            self._client = JobSubmissionClient(url, headers=headers)
        except (AuthenticationError, ConnectionError, RuntimeError) as error:
            raise UserError(f"{url}: {first_line(error)}") from None
        if self._client.get_address() != url:
            raise UserError(
                f"{url}: Ray takes {self._client.get_address()} instead, as RAY_API_SERVER_ADDRESS or RAY_ADDRESS say; "
                "unset them"
            )

    def submit(
        self, job: str, label: Label, entrypoint: str, files: Path, modules: Sequence[Path], env: Mapping[str, str]
    ) -> bool:
        """Have a command run on the head. Of two jobs of one id only the first becomes one.

        Args:
            job: id of the submission.
            label: what everybody may know of it.
            entrypoint: the command; it is run by a shell.
            files: a folder: a copy is the working directory of the job, and of its workers on every node.
            modules: folders of packages and metadata that job and workers import from.
            env: of the job and its workers; Ray writes it to its logs.

        Returns:
            Whether it is a new job.

        Raises:
            UserError: the server refuses it.
        """
        runtime_env = {
            "working_dir": str(files),
            "py_modules": [str(module) for module in modules],
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_S), **env},
        }
        try:
            self._client.submit_job(
                entrypoint=entrypoint,
                submission_id=job,
                runtime_env=runtime_env,
                metadata={_OURS: json.dumps(asdict(label))},
            )
        except (AuthenticationError, ConnectionError, RuntimeError, ValueError) as error:
            if f"{job} already exists" in str(error):
                return False
            raise UserError(f"{self.url} takes no job: {first_line(error)}") from None
        return True

    def jobs(self, search: str) -> list[Job]:
        """The jobs for a search, by its name or id, oldest first."""
        try:
            found = [job for each in self._client.list_jobs() if (job := _job(each)) is not None]
        except (AuthenticationError, ConnectionError, RuntimeError) as error:
            raise UserError(f"{self.url} doesn't list its jobs: {first_line(error)}") from None
        return sorted(
            (job for job in found if search in (job.label.search, job.label.name)),
            key=lambda job: (job.started_ms, job.id),
        )

    def logs(self, job: str) -> str:
        """What a job has written until now."""
        try:
            return str(self._client.get_job_logs(job))
        except (AuthenticationError, ConnectionError, RuntimeError) as error:
            raise UserError(f"{self.url} has no log of job {job}: {first_line(error)}") from None

    def follow(self, job: str) -> Iterator[str]:
        """What a job has written and writes, in pieces, until it ends."""
        loop = asyncio.new_event_loop()
        pieces = self._client.tail_job_logs(job)
        try:
            while True:
                yield loop.run_until_complete(anext(pieces))
        except StopAsyncIteration:
            return
        except (OSError, RuntimeError) as error:
            raise UserError(f"{self.url} sends no more of the log of job {job}: {first_line(error)}") from None
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


def is_loopback(url: str) -> bool:
    """Whether a URL is of this machine, by an address that no other one reaches."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _headers(url: str, insecure: bool) -> dict[str, str]:
    """What lets us in at a cluster."""
    if _authentication(url) != "token":
        if not insecure and not is_loopback(url):
            raise UserError(f"{url}: whoever reaches this cluster can run programs on it: {_HOW_TO_SECURE}")
        return {}
    try:
        found = AuthenticationTokenLoader.instance().get_token_for_http_header(ignore_auth_mode=True)
    except AuthenticationError:  # RAY_AUTH_TOKEN_PATH names no file
        found = {}
    if not found:
        raise UserError(
            f"{url}: this cluster asks for a token, and there is none here; copy ~/.ray/auth_token of its head node to "
            "this machine, or set RAY_AUTH_TOKEN"
        )
    return dict(found)


def _authentication(url: str) -> str:
    """How a cluster lets users in: `token` or `disabled`; it tells anybody."""
    try:
        with urlopen(f"{url}/api/authentication_mode", timeout=_ANSWER_S) as answer:
            return str(json.load(answer)["authentication_mode"])
    except HTTPError as error:
        if error.code == 404:
            return "disabled"  # Ray before 2.52
        raise UserError(f"{url}: no Ray head answers there: {error}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{url}: no Ray head answers there: {first_line(error)}; its dashboard needs `pip install 'ray[default]'` "
            "on the head, and is reached from other machines with `ray start --head --dashboard-host 0.0.0.0`"
        ) from None


def _job(details: Any) -> Job | None:
    """A job as Ray describes it; None if it isn't ours."""
    if details.submission_id is None or _OURS not in (details.metadata or {}):
        return None
    label = Label(**json.loads(details.metadata[_OURS]))
    return Job(details.submission_id, label, str(getattr(details.status, "value", details.status)), details.start_time)
