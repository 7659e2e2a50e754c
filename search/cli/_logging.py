"""Logs for machines: a line of JSON for each record, with the search, and the individual, that it is about."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime

from moevolve.search.running.observer import SEARCH

VARIABLE = "MOEVOLVE_LOG"


class JsonFormatter(logging.Formatter):
    """One line of JSON: time, level, logger, message; search, individual and exception where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "search": getattr(record, "search", None) or SEARCH.get(),
            "individual": getattr(record, "individual", None),
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps({key: value for key, value in said.items() if value is not None})


def set_up_logging() -> None:
    """As the environment variable MOEVOLVE_LOG says: `json` writes all there is from level `info` on to stderr."""
    if os.environ.get(VARIABLE) == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
        logging.getLogger("moevolve").setLevel(logging.INFO)
