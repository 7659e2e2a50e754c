"""vLLM in a child process, with the Python of another environment."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.workers.children.process import ChildError, ChildProcess, R, Ts
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.contract.messages import WorkerFault
from moevolve.workers.vllm import child

# Importing vLLM itself would take seconds.
_FIND = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('vllm') else 3)"


def check_python(python: str) -> None:
    """Raise a `UserError` unless a Python executable finds vLLM."""
    try:
        code = subprocess.run([python, "-c", _FIND], check=False, capture_output=True).returncode
    except OSError as error:
        raise UserError(f"engine.vllm.python: {python} can't be run: {error}") from None
    if code:
        raise UserError(f"engine.vllm.python: {python} has no vLLM; give the Python of an environment that has it")


class VllmProcess(ChildProcess):
    """A process that holds one model in vLLM, with the Python executable of its environment.

    The options are further arguments of `vllm.LLM`. The constructor and calls raise a `WorkerFault` if vLLM fails.
    """

    def __init__(self, python: str, folder: Path, options: Mapping[str, object]) -> None:
        super().__init__(python)
        self.call(child.start, str(folder), dict(options))

    def call(self, function: Callable[[*Ts], R], *arguments: *Ts) -> R:
        """Call a function of `child.py`."""
        try:
            return super().call(function, *arguments)
        except ChildError as error:
            raise WorkerFault(f"vLLM: {error}; see the worker's log") from None

    def logprobs(self, texts: Sequence[Tokens], counts: Sequence[int]) -> NDArray[np.float64]:
        """Return the mean log-probability, in nats, of the last `counts` tokens of texts, float64 [texts]."""
        return np.array([np.mean(each) for each in self.call(child.logprobs, texts, counts)])
