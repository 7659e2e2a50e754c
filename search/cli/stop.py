"""`stop`."""

from __future__ import annotations

import moevolve
from moevolve.search.cli._steering import asking

stop = asking(moevolve.stop, "Ask a running search to end, as Ctrl-C does; `resume` continues it.", "stop")
