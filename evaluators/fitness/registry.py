"""The kinds of fitness there are. A new one is a file beside this one, and a line here."""

from __future__ import annotations

from moevolve.evaluators.fitness.agreement import Agreement
from moevolve.evaluators.fitness.base import Fitness
from moevolve.evaluators.fitness.generate import Generate
from moevolve.evaluators.fitness.kl import Kl
from moevolve.evaluators.fitness.lm_eval import LmEval
from moevolve.evaluators.fitness.perplexity import Perplexity
from moevolve.evaluators.fitness.rank import Rank

FITNESSES: dict[str, Fitness] = {
    fitness.name: fitness
    for fitness in (
        Generate(),
        Rank(),
        Perplexity(),
        Kl(),
        Agreement(),
        LmEval(),
    )
}
"""Name -> fitness, in the order in which users are told of them."""

DEFAULT_FITNESS = Generate.name
"""That of a task that names none."""


def known_fitness(name: object) -> str:
    """Returns `name`.

    Raises:
        ValueError: no such fitness; the message lists those there are.
    """
    if not isinstance(name, str) or name not in FITNESSES:
        *others, last = (f"'{known}'" for known in FITNESSES)
        raise ValueError(f"input should be {', '.join(others)} or {last}")
    return name


def task_fitnesses() -> tuple[str, ...]:
    """Names of the kinds that any task can be given; the others belong to tasks of lm-evaluation-harness."""
    return tuple(name for name, fitness in FITNESSES.items() if fitness.reads != "harness")
