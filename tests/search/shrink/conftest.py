"""Checkpoints aren't timed after a shrink, which takes two more processes, and the guard asks for short answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moevolve.search.shrink.checkpoint.measured_speed", lambda *_: None)
        patch.setattr("moevolve.search.shrink.guard._PROMPTS", 7)
        patch.setattr("moevolve.search.shrink.guard._LONG", 16)
        patch.setattr("moevolve.search.shrink.guard._SHORT", 16)
        yield
