"""Logs for machines: a line of JSON per log record, with its search and its individual."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime

from moevolve.search.running.observer import SEARCH

VARIABLE = "MOEVOLVE_LOG"


class JsonFormatter(logging.Formatter):
    """Formats a record as a line of JSON: time, level, logger and message; search, individual and exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "search": getattr(record, "search", None) or SEARCH.get(),
            "individual": getattr(record, "individual", None),
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps({key: value for key, value in fields.items() if value is not None})


def set_up_logging() -> None:
    """Set up logging: MOEVOLVE_LOG=json writes records from level `info` on to stderr."""
    if os.environ.get(VARIABLE) == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
        logging.getLogger("moevolve").setLevel(logging.INFO)
