"""What a search gained over the best of the one-shot choices that it began with."""

from __future__ import annotations

from dataclasses import dataclass

from moevolve.evaluators.scales import SCALES, ScaleName
from moevolve.search.config.files import parse_stored_config
from moevolve.search.loop.final_table import BEFORE_LABEL, EQUAL_P, FinalTable, auxiliary_entries
from moevolve.search.loop.significance import paired_test
from moevolve.search.results.outcomes import mean_scores, model_scores, task_outcomes
from moevolve.search.strategies.base import rank_key
from moevolve.store.reader import StoreReader


@dataclass(frozen=True, slots=True)
class Gain:
    """The winner's score beside that of the best one-shot choice by fitness.

    Attributes:
        one_shot: Label of the choice in the final table.
        found, before: Scores of the winner and of the choice on `test`, in [0, 1], weighted means over tasks; None if
            the winner is the choice.
        p: Two-sided p-value of a paired test of them; None if the winner is the choice.
        scale: Scale that the scores are shown on.
    """

    one_shot: str
    found: float | None = None
    before: float | None = None
    p: float | None = None
    scale: ScaleName = "percent"

    def __str__(self) -> str:
        if self.found is None or self.before is None or self.p is None:
            return f"The search gained nothing: the best is a one-shot choice ({self.one_shot})."
        scale = SCALES[self.scale]
        verb = "gained nothing that a paired test can tell over"
        if self.p <= EQUAL_P:
            verb = "gained over" if self.found > self.before else "lost against"
        change = scale.change(scale.additive(self.found) - scale.additive(self.before))
        return (
            f"The search {verb} the best one-shot choice ({self.one_shot}): {scale.phrase(self.found)} against "
            f"{scale.phrase(self.before)} on `test` ({change}, p = {self.p:.2g})."
        )


def search_gain(store: StoreReader, table: FinalTable) -> Gain | None:
    """Compare a search's winner with its best one-shot choice; None without both, or without scores on `test`."""
    search = store.search(table.search)
    found = auxiliary_entries(parse_stored_config(search.config), store.history(search.id), None)
    choices = [(label, row) for label, row in found if label != BEFORE_LABEL]
    if table.best is None or table.best.phenotype is None or not choices:
        return None
    label, choice = min(choices, key=lambda each: rank_key(each[1]))
    if choice.phenotype_hash == table.best.phenotype:
        return Gain(label)
    both = [model_scores(store, search, each) for each in (table.best.phenotype, choice.phenotype_hash)]
    one, other = (task_outcomes([each], "test") for each in both)
    test = paired_test(one, other)
    if test is None:
        return None
    after, before = (mean_scores([each], "test")[0] for each in both)
    return Gain(label, after.score, before.score, test.p, after.scale)
