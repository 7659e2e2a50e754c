"""What a search's winner gains over its best one-shot choice."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moevolve.evaluators.scales import SCALES, ScaleName
from moevolve.search.config.files import parse_stored_config
from moevolve.search.loop.final_table import BEFORE_LABEL, EQUAL_P, FinalTable, auxiliary_entries
from moevolve.search.loop.scores import SearchScores, compare, mean_score
from moevolve.search.strategies.base import rank_key
from moevolve.store.reader import StoreReader


@dataclass(frozen=True, slots=True)
class Gain:
    """The winner's score on `test` beside that of a simpler candidate.

    Attributes:
        what: What is asked for its gain: the search, or the repair of its last phase.
        over: The simpler candidate, as the end of a phrase.
        found, before: Scores of the winner and of the simpler candidate, in [0, 1], weighted means over tasks; None if
            the winner is the latter.
        p: Two-sided p-value of a paired test of them; None if there are no scores.
        scale: Scale that the scores are shown on.
    """

    what: str
    over: str
    found: float | None = None
    before: float | None = None
    p: float | None = None
    scale: ScaleName = "percent"

    def __str__(self) -> str:
        if self.found is None or self.before is None or self.p is None:
            return f"{self.what} gained nothing: the winner is {self.over}."
        scale = SCALES[self.scale]
        verb = "gained nothing that a paired test can tell over"
        if self.p <= EQUAL_P:
            verb = "gained over" if self.found > self.before else "lost against"
        change = scale.change(scale.additive(self.found) - scale.additive(self.before))
        return (
            f"{self.what} {verb} {self.over}: {scale.phrase(self.found)} against {scale.phrase(self.before)} on "
            f"`test` ({change}, p = {self.p:.2g})."
        )


def search_gain(store: StoreReader, table: FinalTable) -> Gain | None:
    """Compare a search's winner with its best one-shot choice by fitness; None without both, or without their scores.

    Both are compared on `test`. A winner that the last phase repaired anew gains by that as well, and by that alone if
    it is a one-shot choice.
    """
    search = store.search(table.search)
    history = store.history(search.id)
    others = auxiliary_entries(parse_stored_config(search.config, search.name), history, None)
    choices = [(label, row) for label, row in others if label != BEFORE_LABEL]
    if table.best is None or table.best.phenotype is None or not choices:
        return None
    label, choice = min(choices, key=lambda each: rank_key(each[1]))
    winner = next(row for row in history if row.phenotype_hash == table.best.phenotype)
    what = "The search"
    if winner.operator == "repair":
        # What the last phase's repair gains isn't the search's.
        chosen = winner.parents[0] in {row.index for _, row in choices}
        what = f"{'Repairing a one-shot choice' if chosen else 'The search and a repair of its best'} at more length"
    gain = Gain(what, f"the best one-shot choice ({label})")
    if choice.phenotype_hash == winner.phenotype_hash:
        return gain
    found, simpler = SearchScores(store, search).of((winner.phenotype_hash, choice.phenotype_hash))
    test = compare([found], [simpler], "test")
    after, before = (mean_score([each], "test") for each in (found, simpler))
    if test is None or after is None or before is None:
        return None
    return replace(gain, found=after.score, before=before.score, p=test.p, scale=after.scale)
