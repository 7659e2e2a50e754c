"""What individuals have to come to, from the history that each may see."""

from __future__ import annotations

from bisect import insort

from moevolve.evaluators.early_stopping import Floor, most_of
from moevolve.search.plan import Plan
from moevolve.search.population import Member
from moevolve.search.strategies.base import Strategy


class Floors:
    """The floors of a search.

    An individual whose fitness is below its floor can neither become a parent or the start of a later phase (the
    strategy's floor), nor be among the best that the end of the search re-ranks (at least one is best). Both only rise
    while the history grows, so nothing that comes later makes it one.

    Args:
        plan: the search.
        strategy: told the same history.
    """

    def __init__(self, plan: Plan, strategy: Strategy) -> None:
        self._plan = plan
        self._strategy = strategy
        self._leaders = Leaders(max(1, plan.config.final.rerank))
        mode = plan.config.early_stopping
        self._off = mode == "off"
        self._alpha = plan.config.racing.alpha if mode == "racing" else None

    def tell(self, member: Member) -> None:
        """Take in one evaluated individual, in order of index."""
        self._leaders.add(member)

    def of(self, index: int) -> Floor | None:
        """The floor of individual `index`, its penalty left out; None if it is to be evaluated whatever comes out."""
        leaders = self._leaders.floor
        least = None if self._off or leaders is None else self._strategy.floor(index)
        if least is None or leaders is None:
            return None
        splits = self._plan.prepared["search"]
        return Floor(
            least=min(least, leaders),
            splits=tuple(split.fingerprint for split in splits),
            weights=self._plan.weights,
            most=tuple(most_of(split) for split in splits),
            examples=tuple(len(split.examples) for split in splits),
            alpha=self._alpha,
        )


class Leaders:
    """Fitness of the best few different phenotypes.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._best: list[tuple[float, str]] = []

    def add(self, member: Member) -> None:
        """Take in one individual; failed and stopped ones, and repeats, change nothing."""
        if member.fitness is None or any(phenotype == member.phenotype_hash for _, phenotype in self._best):
            return
        insort(self._best, (-member.fitness, member.phenotype_hash))
        del self._best[self._count :]

    @property
    def floor(self) -> float | None:
        """The least fitness among them; None while there are fewer."""
        return -self._best[-1][0] if len(self._best) == self._count else None
