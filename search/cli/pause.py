"""`pause`."""

from __future__ import annotations

import moevolve
from moevolve.search.cli._steering import asking

pause = asking(
    moevolve.pause, "Ask a running search to give its workers back and wait; `resume` lets it go on.", "pause"
)
