"""Client of a Ray cluster's job server, which runs drivers as jobs and keeps their logs.

A job's metadata names its search. The state of a search is in its store: Ray forgets jobs when the head node restarts,
and reports some jobs as failed that are still running.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

# Ray has no public names for the job server's limit and for the token that `ray get-auth-token` makes.
from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE
from ray._raylet import AuthenticationTokenLoader
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from moevolve.evaluators.errors import UserError, first_line

LIMIT_BYTES = int(DASHBOARD_CLIENT_MAX_SIZE)
"""Largest package of files that a job server accepts."""

_TIMEOUT_S = 10
"""Longest wait for a head node's answer; it answers at once or not at all."""
_STOP_S = 60
"""Seconds for a driver to end when Ray stops its job; Ray's default of 3 s is too short for a slow store."""
_METADATA_KEY = "moevolve"

_HOW_TO_SECURE = (
    "start its nodes with RAY_AUTH_MODE=token and a token of `ray get-auth-token --generate`, reach it through a "
    "tunnel (`ssh -L 8265:localhost:8265 HEAD`), or say --insecure"
)


@dataclass(frozen=True, slots=True)
class JobLabel:
    """The metadata of a job, which everybody who can connect to the cluster may read: a search's id, name and hash."""

    search: str
    name: str
    config_hash: str


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A driver that was submitted to a cluster.

    Attributes:
        id: Ray's submission id.
        status: Ray's job status: PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED.
        started_ms: Start time in milliseconds since 1970.
    """

    id: str
    label: JobLabel
    status: str
    started_ms: int

    @property
    def ended(self) -> bool:
        return self.status in ("STOPPED", "SUCCEEDED", "FAILED")


class JobServer:
    """The job server of a cluster.

    Args:
        url: URL of the head node's dashboard, `http://HEAD:8265`.
        insecure: Accept a cluster on which everybody who can connect may run programs.

    Raises:
        UserError: the server doesn't answer, requires a token that isn't here, or requires none without `insecure`.
    """

    def __init__(self, url: str, insecure: bool = False) -> None:
        self.url = url = (url if "://" in url else f"http://{url}").rstrip("/")
        if urlsplit(url).scheme not in ("http", "https"):
            raise UserError(f"{url}: this is no URL of a cluster's dashboard; give http://HEAD:8265")
        for name in ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
            logging.getLogger(name).setLevel(logging.WARNING)
        with self._asking("accepts no client"):
            self._client = JobSubmissionClient(url, headers=_headers(url, insecure))
        if self._client.get_address() != url:
            raise UserError(
                f"{url}: Ray takes {self._client.get_address()} instead, as RAY_API_SERVER_ADDRESS or RAY_ADDRESS say; "
                "unset them"
            )

    @contextmanager
    def _asking(self, refusal: str) -> Iterator[None]:
        """Say in one line what Ray refused, and why."""
        try:
            yield
        except (AuthenticationError, OSError, RuntimeError, ValueError) as error:
            raise UserError(f"{self.url} {refusal}: {first_line(error)}") from None

    def submit(self, job: str, label: JobLabel, entrypoint: str, environment: dict[str, Any]) -> bool:
        """Run a command on the head node, by a shell; return False if there is a job with this id already.

        Args:
            job: Submission id.
            label: Metadata of the job.
            entrypoint: The command.
            environment: Ray's runtime environment of the job and its workers.

        Raises:
            UserError: the server refuses the job.
        """
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_S), **environment["env_vars"]}
        with self._asking("takes no job"):
            try:
                self._client.submit_job(
                    entrypoint=entrypoint,
                    submission_id=job,
                    runtime_env=environment | {"env_vars": variables},
                    metadata={_METADATA_KEY: json.dumps(asdict(label))},
                )
            except RuntimeError as error:
                if f"{job} already exists" in str(error):
                    return False
                raise
        return True

    def jobs(self, search: str) -> list[ClusterJob]:
        """The jobs of a search, given by name or id, oldest first, without other programs' jobs."""
        with self._asking("doesn't list its jobs"):
            listed = self._client.list_jobs()
        found = []
        for each in listed:
            if each.submission_id is not None and _METADATA_KEY in (each.metadata or {}):
                label = JobLabel(**json.loads(each.metadata[_METADATA_KEY]))
                status = str(getattr(each.status, "value", each.status))
                found.append(ClusterJob(each.submission_id, label, status, each.start_time))
        return sorted(
            (job for job in found if search in (job.label.search, job.label.name)),
            key=lambda job: (job.started_ms, job.id),
        )

    def logs(self, job: str) -> str:
        """The output of a job so far."""
        with self._asking(f"has no log of job {job}"):
            return str(self._client.get_job_logs(job))

    def follow(self, job: str) -> Iterator[str]:
        """Yield the output of a job in pieces, until the job ends."""
        loop = asyncio.new_event_loop()
        pieces = self._client.tail_job_logs(job)
        try:
            with self._asking(f"sends no more of the log of job {job}"):
                while (piece := loop.run_until_complete(anext(pieces, None))) is not None:
                    yield piece
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


def is_loopback(url: str) -> bool:
    """Whether a URL has a loopback address, which no other machine can connect to."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _headers(url: str, insecure: bool) -> dict[str, str]:
    """Headers that authenticate requests to a cluster."""
    if _authentication_mode(url) != "token":
        if not insecure and not is_loopback(url):
            raise UserError(f"{url}: whoever reaches this cluster can run programs on it: {_HOW_TO_SECURE}")
        return {}
    found = AuthenticationTokenLoader.instance().get_token_for_http_header(ignore_auth_mode=True)
    if not found:
        raise UserError(
            f"{url}: this cluster asks for a token, and there is none here; copy ~/.ray/auth_token of its head node to "
            "this machine, or set RAY_AUTH_TOKEN"
        )
    return dict(found)


def _authentication_mode(url: str) -> str:
    """A cluster's authentication mode, `token` or `disabled`, which it reports without authentication."""
    try:
        with urlopen(f"{url}/api/authentication_mode", timeout=_TIMEOUT_S) as answer:
            return str(json.load(answer)["authentication_mode"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{url}: no Ray head answers there: {first_line(error)}; its dashboard needs `pip install 'ray[default]'` "
            "on the head, and is reached from other machines with `ray start --head --dashboard-host 0.0.0.0`"
        ) from None
