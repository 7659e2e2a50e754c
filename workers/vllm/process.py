"""vLLM in a child process, with the Python of another environment."""

from __future__ import annotations

import contextlib
import json
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.contract.messages import WorkerFault

_CHILD = Path(__file__).with_name("child.py")
_FIND = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('vllm') else 3)"


def check_python(python: str) -> None:
    """Raise a `UserError` unless a Python executable finds vLLM."""
    try:
        code = subprocess.run([python, "-c", _FIND], check=False, capture_output=True).returncode
    except OSError as error:
        raise UserError(f"engine.vllm.python: {python} can't be run: {error}") from None
    if code:
        raise UserError(f"engine.vllm.python: {python} has no vLLM; give the Python of an environment that has it")


class VllmProcess:
    """A process that holds one model in vLLM. It ends with the last reference to this object, or with the worker.

    Args:
        python: Python executable of the environment that vLLM is installed in.
        folder: Checkpoint to load.
        options: Further arguments of `vllm.LLM`.

    Raises:
        WorkerFault: vLLM can't load the checkpoint, as all methods raise it if vLLM fails.
    """

    def __init__(self, python: str, folder: Path, options: Mapping[str, Any]) -> None:
        # A session of its own keeps Ctrl-C, which stops a search after the evaluations that run, from the process.
        self._child = subprocess.Popen(
            [python, str(_CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._stop = weakref.finalize(self, _stop, self._child)
        self._ask("start", str(folder), dict(options))

    def close(self) -> None:
        """End the process, which frees the memory that vLLM takes."""
        self._stop()

    def reload(self, folder: Path) -> None:
        """Load other weights of the same shapes in place."""
        self._ask("reload", str(folder))

    def forget(self) -> None:
        """Drop cached keys and values."""
        self._ask("forget")

    def generate(
        self, prompts: Sequence[Tokens], limits: Sequence[int], stop: Sequence[str], ends: Sequence[int]
    ) -> list[list[int]]:
        """Decode greedy answers up to an end token, a stop string or as many tokens as `limits` say.

        End tokens are part of an answer, as is the token that completes a stop string.
        """
        answers: list[list[int]] = self._ask("generate", prompts, limits, stop, ends)
        return answers

    def logprobs(self, texts: Sequence[Tokens], counts: Sequence[int]) -> NDArray[np.float64]:
        """Return the mean log-probability, in nats, of the last `counts` tokens of texts, float64 [texts].

        Counts are at least 1, and less than the number of a text's tokens.
        """
        found: list[list[float]] = self._ask("logprobs", texts, counts)
        return np.array([np.mean(each) for each in found])

    def _ask(self, name: str, *arguments: Any) -> Any:
        assert self._child.stdin is not None and self._child.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps([name, arguments]) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        if not line:
            self.close()
            raise WorkerFault(f"vLLM's process ended with exit code {self._child.returncode}; see the worker's log")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerFault(f"vLLM: {reply['error']}")
        return reply["result"]


def _stop(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
