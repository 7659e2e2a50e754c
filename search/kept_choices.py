"""What a search measured of `engine.population`, kept in its store: it goes on with the same after a restart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict

from moevolve.store.repository import Store
from moevolve.workers.messages import PopulationChoice


class KeptChoices:
    """The choices of one search, one per make of hardware that it ran on.

    Passes over other numbers of rows may have other last digits, and times differ from run to run. So what was chosen
    once stays.

    Args:
        store: where they are kept, among what else was measured once.
        search_id: of the search.
        tell: told of every choice, when it is made or found again.
    """

    def __init__(self, store: Store, search_id: str, tell: Callable[[str], None]) -> None:
        self._store = store
        self._search_id = search_id
        self._tell = tell

    def find(self, hardware: str) -> PopulationChoice | None:
        """See `moevolve.search.sharing.Choices`."""
        content = self._store.calibration(self._key(hardware))
        if content is None:
            return None
        data = json.loads(content)
        seconds = tuple((int(size), float(taken)) for size, taken in data["seconds"])
        choice = PopulationChoice(int(data["size"]), data["hardware"], seconds, data["ended"])
        self._tell(described(choice))
        return choice

    def keep(self, choice: PopulationChoice) -> None:
        """See `moevolve.search.sharing.Choices`."""
        self._store.add_calibration(self._key(choice.hardware), json.dumps(asdict(choice)).encode())
        self._tell(described(choice))

    def _key(self, hardware: str) -> str:
        return hashlib.sha256(f"engine.population of {self._search_id} on {hardware}".encode()).hexdigest()


def described(choice: PopulationChoice) -> str:
    """A choice in a line: `4 candidates share a pass (ms per candidate: 21.0 with 1, 11.2 with 2, 8.1 with 4)`."""
    head = f"{choice.size} candidates share a pass" if choice.size > 1 else "candidates don't share passes"
    times = ", ".join(f"{taken * 1e3:.1f} with {size}" for size, taken in choice.seconds)
    notes = [f"ms per candidate: {times}"] if times else []
    notes += [choice.ended] if choice.ended else []
    return f"{head} ({'; '.join(notes)})" if notes else head
