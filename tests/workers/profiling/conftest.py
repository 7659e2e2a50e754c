"""The profiler collects garbage before it measures."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quick_collections() -> Iterator[None]:
    """Leaves out what was there before the test: going through all of it takes longer than the test."""
    gc.freeze()
    yield
    gc.unfreeze()
