"""Workers without a model, for tests of pools: a process of theirs starts without torch and transformers.

Ray sends them by value, because a worker's process can't import what is the tests' own.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import ray
import replies
from replies import answer
from waiting import PATIENT_S

from moevolve.evaluators.types import PreparedSplit
from moevolve.workers.contract.edits import Measurement
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest, WorkerInfo

for module in (sys.modules[__name__], replies):
    ray.cloudpickle.register_pickle_by_value(module)


class LightWorker:
    """Answers what it is sent, each time the same."""

    def __init__(self, *_: object) -> None: ...

    def info(self, node: str = "") -> WorkerInfo:
        return WorkerInfo(f"{socket.gethostname()}/{os.getpid()}", node, "cpu")

    def calibrate(self, measurement: Measurement, splits: tuple[PreparedSplit, ...]) -> bytes:
        raise NotImplementedError

    def evaluate(self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
        return replace(self.reply(request), worker=self.info().name)

    def reply(self, request: EvaluationRequest) -> EvaluationReply:
        return answer(request)


def await_file(path: Path) -> None:
    """Wait until a file exists, for as long as a test may take: the process may outlive it."""
    deadline = time.monotonic() + PATIENT_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
