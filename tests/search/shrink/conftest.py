"""Checkpoints aren't timed after a shrink, which takes two more processes: a test of its own does that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moevolve.evaluators.errors import UserError
from moevolve.search.shrink.page import Speed


def _untimed(*_: object) -> Speed:
    raise UserError("tests don't time")


@pytest.fixture(scope="session", autouse=True)
def untimed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moevolve.search.shrink.shrink.measured_speed", _untimed)
        yield
