"""What a winner gains over simpler candidates of its search: one-shot choices, and what servers load."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moevolve.evaluators.scales import SCALES, ScaleName
from moevolve.evaluators.types import Split
from moevolve.search.config.files import parse_stored_config
from moevolve.search.loop.final_table import BEFORE_LABEL, EQUAL_P, FinalTable, auxiliary_entries
from moevolve.search.loop.scores import SearchScores, compare, mean_score
from moevolve.search.strategies.base import rank_key
from moevolve.store.reader import StoreReader
from moevolve.store.records import SearchRecord


@dataclass(frozen=True, slots=True)
class Gain:
    """The winner's score beside that of a simpler candidate.

    Attributes:
        what: What is asked for its gain: the search, the repair of its last phase, or custom code.
        over: The simpler candidate, as the end of a phrase.
        split: Split of the scores.
        found, before: Scores of the winner and of the simpler candidate, in [0, 1], weighted means over tasks; None if
            the winner is the latter.
        p: Two-sided p-value of a paired test of them; None if there are no scores.
        scale: Scale that the scores are shown on.
    """

    what: str
    over: str
    split: Split
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
            f"`{self.split}` ({change}, p = {self.p:.2g})."
        )


def search_gain(store: StoreReader, table: FinalTable) -> Gain | None:
    """Compare a search's winner with its best one-shot choice by fitness; None without both, or without their scores.

    Both are compared on `test`. A winner that the last phase repaired anew gains by that as well, and by that alone if
    it is a one-shot choice.
    """
    search = store.search(table.search)
    history = store.history(search.id)
    found = auxiliary_entries(parse_stored_config(search.config, search.name), history, None)
    choices = [(label, row) for label, row in found if label != BEFORE_LABEL]
    if table.best is None or table.best.phenotype is None or not choices:
        return None
    label, choice = min(choices, key=lambda each: rank_key(each[1]))
    winner = next(row for row in history if row.phenotype_hash == table.best.phenotype)
    what = "The search"
    if winner.operator == "repair":
        # What the last phase's repair gains isn't the search's.
        chosen = winner.parents[0] in {row.index for _, row in choices}
        what = f"{'Repairing a one-shot choice' if chosen else 'The search and a repair of its best'} at more length"
    gain = Gain(what, f"the best one-shot choice ({label})", "test")
    if choice.phenotype_hash == winner.phenotype_hash:
        return gain
    return _compared(store, search, (winner.phenotype_hash, choice.phenotype_hash), gain)


def code_gain(store: StoreReader, table: FinalTable) -> Gain | None:
    """Compare a winner that needs its own code with the best by fitness of those that don't; None without both.

    Both are compared on `dev`, which has scores of the best few candidates.
    """
    search = store.search(table.search)
    leaders = store.best_of_search(search.id, max(1, parse_stored_config(search.config, search.name).final.rerank))
    winner = next((row for row in leaders if f"{search.name}:{row.index}" == table.winner), None)
    stock = next((row for row in leaders if row.stock), None)
    if winner is None or stock is None or winner.stock:
        return None
    gain = Gain("Custom code", f"the best candidate that needs none ({search.name}:{stock.index})", "dev")
    return _compared(store, search, (winner.phenotype_hash, stock.phenotype_hash), gain)


def _compared(store: StoreReader, search: SearchRecord, phenotypes: tuple[str, str], gain: Gain) -> Gain | None:
    """Return the gain with the scores of two models and their test; None if these aren't stored."""
    found, simpler = SearchScores(store, search).of(phenotypes)
    test = compare([found], [simpler], gain.split)
    after, before = (mean_score([each], gain.split) for each in (found, simpler))
    if test is None or after is None or before is None:
        return None
    return replace(gain, found=after.score, before=before.score, p=test.p, scale=after.scale)
