"""Logs of the node's process: one line each on standard error, as text or as JSON."""

from __future__ import annotations

import logging
import sys
from typing import final

import msgspec

__all__ = ["set_up_logs"]


@final
class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One JSON object, without line ends in it."""
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def set_up_logs(*, json: bool) -> None:
    """Have the library and the node log what they do, and everybody else what worries them."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if json else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("pdhandoff").setLevel(logging.INFO)
