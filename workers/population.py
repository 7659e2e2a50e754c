"""Population-batched evaluation: several EEP candidates share the passes over a batch of prompts.

Every candidate's evaluation is the ordinary one, in a lane of its own (`moevolve.workers.lanes`). Passes that all of
them ask for, over the same prompts, run once over as many copies of their rows; each copy is routed by its candidate's
plan, and its experts are the candidate's: pruning ones point into the resident originals, merged ones are stacked.
Passes that go on from a candidate's own answers (decoding) run for it alone.

What a candidate gets must not depend on who shares its passes. So a shared pass always has the same number of copies,
whoever is there, and what feed-forward blocks compute has the shapes that it has for the candidate alone
(`moevolve.workers.edits.population`). What else there is (attention, norms, output embeddings) treats rows alike, but
products over more rows may have other last digits than over one candidate's: the number of copies is a setting,
`engine.population`, or one for a whole search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moevolve.workers.edits.base import Edit
from moevolve.workers.edits.eep import EepEdit
from moevolve.workers.edits.population import Company, Turn, company_of, merges
from moevolve.workers.forward import PassRequest
from moevolve.workers.generation import GenerationEngine
from moevolve.workers.lanes import Lane, LaneForward
from moevolve.workers.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import DynamicCache


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, the host's or a device's."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


class SharedPassError(Exception):
    """A pass failed that several candidates share; which of them is at fault is unknown."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A candidate and its evaluation, on an engine that it is given."""

    edit: EepEdit
    work: Callable[[GenerationEngine], None]


class Population:
    """Evaluates candidates that share passes.

    Args:
        resident: the model.
        engine: the worker's own; each lane has one like it.
        size: copies of every prompt per shared pass.
        memory: most bytes of stacked experts.

    Attributes:
        size: copies of every prompt per shared pass.
    """

    def __init__(self, resident: ResidentModel, engine: GenerationEngine, size: int, memory: int) -> None:
        self._resident = resident
        self._forward = engine.forward
        self.size = size
        self._memory = memory
        self._forwards = [LaneForward(self._forward) for _ in range(size)]
        self._engines = [engine.on(forward) for forward in self._forwards]

    def width(self, edit: Edit) -> int:
        """How many copies the passes have that a candidate shares; 1 if it runs as ever. It is the edit's own.

        Edits that merge, and all edits where originals stay on the host, are bounded by their stacked experts.
        """
        if not isinstance(edit, EepEdit) or not self._resident.layers:
            return 1
        if not merges(edit) and self._resident.config.originals == "device":
            return self.size
        return max(1, min(self.size, self._memory // (edit.retained * self._resident.expert_bytes)))

    def parties(self, edits: Sequence[Edit]) -> list[list[int]]:
        """Places of edits that share passes, each party in order; those that don't share are alone."""
        parties: list[list[int]] = []
        open_ones: dict[Company, list[int]] = {}
        for place, edit in enumerate(edits):
            width = self.width(edit)
            if width == 1:
                parties.append([place])
                continue
            assert isinstance(edit, EepEdit)
            company = company_of(edit)
            party = open_ones.get(company)
            if party is None or len(party) == width:
                party = open_ones[company] = []
                parties.append(party)
            party.append(place)
        return parties

    def run(self, seats: Sequence[Seat]) -> None:
        """Evaluate one party.

        Args:
            seats: of one company, no more than their width; each edit passes `ResidentModel.check`.

        Raises:
            Exception: whatever a seat's work raises.
            SharedPassError: a pass failed that several share.
            UserError: the device has no room for their experts.
        """
        width = self.width(seats[0].edit)
        # Empty seats are taken by copies of the first candidate: the shapes don't depend on who is there.
        edits = [seat.edit for seat in seats] + [seats[0].edit] * (width - len(seats))
        lanes: list[Lane] = []
        with self._resident.edited_together(edits) as turn:
            try:
                for place, seat in enumerate(seats):
                    lanes.append(Lane(place, self._on_lane(place, seat)))
                self._lead(lanes, turn)
            finally:
                for lane in lanes:
                    lane.leave()
        for lane in lanes:
            lane.finish()

    def _on_lane(self, place: int, seat: Seat) -> Callable[[Lane], None]:
        def work(lane: Lane) -> None:
            self._forwards[place].lane = lane
            seat.work(self._engines[place])

        return work

    @torch.inference_mode()
    def _lead(self, lanes: Sequence[Lane], turn: Turn) -> None:
        """Run passes until all lanes are over: first those that are a lane's own, so that all come to the shared."""
        while waiting := [lane for lane in lanes if lane.request is not None]:
            own = next((lane for lane in waiting if not self._shared(lane.request)), None)
            if own is not None:
                turn.place = own.place
                self._run_own(own)
                continue
            first = waiting[0].request
            assert first is not None
            together = [lane for lane in waiting if lane.request is not None and _same(first, lane.request)]
            turn.place = None
            self._run_shared(together, first, turn.count, alone=len(lanes) == 1)

    def _shared(self, request: PassRequest | None) -> bool:
        """Whether other lanes ask for the same pass, and its cache can be taken apart or put together."""
        return request is not None and request.recurs and (request.cache is None or self._forward.rewinds)

    def _run_own(self, lane: Lane) -> None:
        assert lane.request is not None
        outcome: Tensor | BaseException
        try:
            # Hidden states that others left are of candidates that had the model to themselves.
            outcome = self._forward.run(replace(lane.request, recurs=False))
        except Exception as error:
            outcome = error
        lane.give(outcome)

    def _run_shared(self, lanes: Sequence[Lane], like: PassRequest, copies: int, alone: bool) -> None:
        owned = {lane.place: lane.request.cache for lane in lanes if lane.request and lane.request.cache is not None}
        cache = self._forward.new_cache() if owned else None
        request = replace(
            like,
            ids=like.ids.repeat(copies, 1),
            mask=None if like.mask is None else like.mask.repeat(copies, 1),
            positions=like.positions.repeat(copies, 1),
            cache=cache,
            recurs=False,
            places=_in_copies(like.places, like.ids.numel(), copies),
        )
        try:
            parts = self._forward.run(request).chunk(copies)
        except Exception as error:
            if alone:
                lanes[0].give(error)
                return
            if out_of_memory(error):
                raise
            raise SharedPassError(f"{type(error).__name__}: {error}") from error
        if cache is not None:
            _deal(cache, owned, copies)
        for lane in lanes:
            lane.give(parts[lane.place])


def _same(one: PassRequest, other: PassRequest) -> bool:
    """Whether two lanes ask for the same of the same columns."""
    if (one.hidden, one.cache is None, one.mask is None) != (other.hidden, other.cache is None, other.mask is None):
        return False
    pairs = [(one.ids, other.ids), (one.positions, other.positions), (one.places, other.places)]
    return all(a is b or torch.equal(a, b) for a, b in pairs)


def _in_copies(places: Tensor, stride: int, copies: int) -> Tensor:
    """The same places in each of the copies, which begin `stride` after each other."""
    starts = torch.arange(copies, device=places.device).unsqueeze(1) * stride
    return (starts + places).flatten()


def _deal(cache: DynamicCache, owned: Mapping[int, DynamicCache], copies: int) -> None:
    """Give every lane its rows of a cache, by place, layer by layer."""
    for index, layer in enumerate(cache.layers):
        if getattr(layer, "is_initialized", False):
            keys, values = (_part(cache, index, name).chunk(copies) for name in ("keys", "values"))
            for place, own in owned.items():
                own.layers[index].update(keys[place], values[place])  # type: ignore[union-attr]
            layer.reset()  # its rows are copied: give the memory back


def _part(cache: DynamicCache, index: int, name: str) -> Tensor:
    part = getattr(cache.layers[index], name)
    assert isinstance(part, Tensor)
    return part
