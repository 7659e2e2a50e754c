"""`resume`."""

from __future__ import annotations

import moevolve
from moevolve.search.cli._following import on_stored_search

resume = on_stored_search(
    moevolve.resume, "Continue a search from the store: the population comes out as if it had never stopped."
)
