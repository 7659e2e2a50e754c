"""What a logger is: the adapter to one program that keeps experiments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LoggedSearch:
    """The search that a logger is told of.

    Attributes:
        config: Its configuration as plain JSON data, without the store's password.
    """

    name: str
    id: str
    config: Mapping[str, object]

    def flat_config(self) -> dict[str, str]:
        """The configuration as texts by dotted path."""
        return dict(_flat("", self.config))


class Logger(Protocol):
    """Sends numbers to one program. It is made and called in a thread of its own, where it may raise anything.

    After a resume it gets the whole history again, with the same steps.
    """

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take values of one step: of a candidate by its index, or of the search by its number of candidates."""
        ...

    def close(self, values: Mapping[str, float] | None) -> None:
        """Finish with the final values; None if the search was interrupted or has failed."""
        ...


def _flat(path: str, value: object) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        items: list[tuple[object, object]] = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return [(path, str(value))]
    return [pair for key, item in items for pair in _flat(f"{path}.{key}" if path else str(key), item)]
