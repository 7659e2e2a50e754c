"""Who gets which candidate: the worker that has most in common with it, and nobody waits for ever."""

from __future__ import annotations

import numpy as np

from moevolve.search.pools.ray_pool import RecentEdits
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.methods.eep.edit import EepEdit

EYE = np.eye(6, dtype=np.float32)


def edit(*kept: int) -> EepEdit:
    """Every layer keeps three experts, beginning with the given one."""
    matrices = np.stack([EYE[[first, first + 1, first + 2]] for first in kept])
    return EepEdit(matrices, matrices, 2)


def test_the_longest_common_beginning_counts() -> None:
    recent = RecentEdits()
    assert recent.common(edit(0, 0, 0, 0)) == 0
    recent.add(edit(0, 1, 2, 3))
    recent.add(edit(0, 1, 0, 0))
    recent.add(IdentityEdit())
    assert recent.common(edit(0, 1, 2, 0)) == 3
    assert recent.common(edit(0, 1, 3, 0)) == 2
    assert recent.common(edit(1, 1, 2, 3)) == 0
    assert recent.common(edit(0, 1, 2, 3)) == 3, "the last layer always runs"
    assert recent.common(IdentityEdit()) == 0


def test_the_best_of_the_first_few_is_taken_and_the_first_of_equals() -> None:
    recent = RecentEdits()
    recent.add(edit(0, 1, 2, 3))
    assert recent.best([edit(1, 1, 1, 1), edit(0, 1, 0, 0), edit(0, 1, 1, 1), edit(0, 0, 0, 0)]) == 1
    assert recent.best([edit(1, 1, 1, 1), edit(2, 1, 1, 1)]) == 0
    far = [edit(1, 1, 1, 1)] * 40 + [edit(0, 1, 2, 0)]
    assert recent.best(far) == 0


def test_what_is_long_ago_does_not_count() -> None:
    recent = RecentEdits()
    recent.add(edit(0, 1, 2, 3))
    for _ in range(63):
        recent.add(edit(3, 3, 3, 3))
    assert recent.common(edit(0, 1, 2, 0)) == 3
    recent.add(edit(3, 3, 3, 3))
    assert recent.common(edit(0, 1, 2, 0)) == 0
