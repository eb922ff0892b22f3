"""How a line of the log looks: text for people, or a JSON object for what collects logs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def formatter(kind: str) -> logging.Formatter:
    """Returns the formatter of "text" or "json" lines."""
    return _JsonFormatter() if kind == "json" else logging.Formatter(_TEXT)


class _JsonFormatter(logging.Formatter):
    """One object a line: ts, level, logger, message; or a record's own `fields` for a message."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **getattr(record, "fields", {"message": record.getMessage()}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
