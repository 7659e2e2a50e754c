"""Answers scored by a function of the user's own, whose source text is a part of the task."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType

from moevolve.evaluators.errors import UserError, own_words
from moevolve.evaluators.matching.base import Matcher
from moevolve.evaluators.types import Example, Matching


class FunctionMatcher(Matcher):
    """What a function gives for the answer and a reference, a number in [0, 1]; the largest of several references."""

    stop = ()

    def __init__(self, matching: Matching) -> None:
        super().__init__(matching)
        self._name = matching.function
        self._function = _load(matching.function, matching.source)

    def problem(self, example: Example) -> str | None:
        try:
            self._score(example.references[0], example)
        except UserError as error:
            return str(error)
        return None

    def _score(self, answer: str, example: Example) -> float:
        return max(self._scored(answer, reference) for reference in example.references)

    def _scored(self, answer: str, reference: str) -> float:
        where = f"metric {self._name} of the answer {answer!r:.60}"
        try:
            score = float(self._function(answer, reference))
        except Exception as error:
            raise UserError(f"{where}: {own_words(error)}; let it return 0 for an answer that is no good") from error
        if not 0 <= score <= 1:
            raise UserError(f"{where}: it must be in [0, 1], got {score}")
        return score


@lru_cache(maxsize=16)
def _load(name: str, source: str) -> Callable[[str, str], float]:
    """Return the function of a name that a source text defines.

    Raises:
        UserError: The text isn't Python, fails when it is run, or has no such function.
    """
    module = ModuleType(f"moevolve_metric_{hashlib.sha256(source.encode()).hexdigest()[:12]}")
    sys.modules[module.__name__] = module  # dataclasses and others look their module up there
    try:
        exec(compile(source, f"<metric {name}>", "exec"), module.__dict__)
    except Exception as error:
        raise UserError(f"metric {name}: its file can't be run: {own_words(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"metric {name}: its file has no function of this name")
    return function
