"""Which waiting candidate suits a worker: the one that has most of its first layers in common with earlier ones there.

A worker starts candidates from hidden states that others left (`moevolve.workers.reuse`). Who evaluates what changes no
result, so it may be chosen for speed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from moevolve.workers.edits.base import Edit, LayeredEdit

_CANDIDATES = 64
"""Candidates of a worker that are taken into account; what older ones left is mostly gone."""

_LOOK_AHEAD = 32
"""Waiting candidates among which is chosen."""


class Recent:
    """What one worker evaluated lately."""

    def __init__(self) -> None:
        self._layers: list[tuple[str, ...]] = []

    def add(self, edit: Edit) -> None:
        """Note a candidate that the worker gets."""
        if isinstance(edit, LayeredEdit):
            self._layers = [*self._layers[1 - _CANDIDATES :], edit.layer_hashes]

    def common(self, edit: Edit) -> int:
        """Leading layers, all but the last, that a candidate has in common with any of them."""
        if not isinstance(edit, LayeredEdit):
            return 0
        own = edit.layer_hashes[:-1]
        return max((_leading(own, other) for other in self._layers), default=0)

    def best(self, waiting: Iterable[Edit]) -> int:
        """Place of the waiting candidate, among the first few, that has most in common; the first of those that tie."""
        shared = [self.common(edit) for edit in islice(waiting, _LOOK_AHEAD)]
        return shared.index(max(shared))


def _leading(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    for count, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return count
    return min(len(one), len(other))
