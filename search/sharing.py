"""Which waiting candidates go to a worker together, to share its passes (`moevolve.workers.population`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

from moevolve.workers.config import PopulationSize
from moevolve.workers.edits.eep import EepEdit
from moevolve.workers.edits.population import company_of
from moevolve.workers.messages import EvaluationRequest, PopulationChoice


class Choices(Protocol):
    """Where a choice is kept from one run of a search to the next."""

    def find(self, hardware: str) -> PopulationChoice | None:
        """The one that was made on such hardware."""
        ...

    def keep(self, choice: PopulationChoice) -> None:
        """Keep one."""
        ...


class Sharing:
    """How many candidates share the passes of a pool's workers, all of them alike.

    Args:
        setting: `engine.population`; `auto` is chosen once, by one of the workers.

    Attributes:
        choice: what was chosen; None before, and where the setting is a number.
        choices: where it is kept; None keeps it as long as the pool lives.
    """

    def __init__(self, setting: PopulationSize) -> None:
        self._setting = setting
        self.choice: PopulationChoice | None = None
        self.choices: Choices | None = None

    @property
    def size(self) -> int:
        """The number; 1 as long as it isn't chosen."""
        if self._setting != "auto":
            return self._setting
        return 1 if self.choice is None else self.choice.size

    @property
    def chosen(self) -> int | None:
        """What workers must be told, because their engine's settings don't say it."""
        return None if self.choice is None else self.choice.size

    @property
    def is_open(self) -> bool:
        """Whether it is yet to be chosen."""
        return self._setting == "auto" and self.choice is None

    def settle(self, hardware: str, measure: Callable[[], PopulationChoice]) -> None:
        """Choose, if that is yet to be done.

        Args:
            hardware: what a worker runs on (`WorkerInfo.hardware`); on a CPU it is 1, and nothing is measured.
            measure: lets that worker measure it; called where no choice is kept for such hardware.
        """
        if not self.is_open:
            return
        if not hardware:
            self.choice = PopulationChoice()
            return
        choice = None if self.choices is None else self.choices.find(hardware)
        if choice is None:
            choice = measure()
            if self.choices is not None:
                self.choices.keep(choice)
        self.choice = choice

    def give_up(self, hardware: str, reason: str) -> None:
        """Let it be 1, since it couldn't be measured; not kept."""
        self.choice = PopulationChoice(1, hardware, ended=reason)


@runtime_checkable
class SharingPool(Protocol):
    """A pool whose workers can let candidates share passes."""

    sharing: Sharing


def can_share(request: EvaluationRequest) -> bool:
    """Whether its candidate is of a kind that shares passes."""
    return isinstance(request.edit, EepEdit)


def fellows(first: EvaluationRequest, waiting: Iterable[EvaluationRequest], most: int) -> list[int]:
    """Places of waiting requests that go along with another: the first ones for the same splits that can share with it.

    Args:
        first: the other, not among them.
        waiting: in order.
        most: no more than this many.
    """
    if most < 1 or not isinstance(first.edit, EepEdit):
        return []
    company = company_of(first.edit)
    places: list[int] = []
    for place, request in enumerate(waiting):
        edit = request.edit
        if request.splits == first.splits and isinstance(edit, EepEdit) and company_of(edit) == company:
            places.append(place)
            if len(places) == most:
                break
    return places
