"""`cancel`."""

from __future__ import annotations

import moevolve
from moevolve.search.cli._steering import asking

cancel = asking(moevolve.cancel, "End a search for good; what it evaluated stays in the store.", "end for good")
