"""`retry`."""

from __future__ import annotations

import moevolve
from moevolve.search.cli._following import on_stored_search

retry = on_stored_search(
    moevolve.retry,
    "Evaluate individuals again that failed by fault of workers or of time, and all that was made in their sight.",
)
