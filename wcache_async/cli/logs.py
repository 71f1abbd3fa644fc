"""The package's log on standard error."""

import logging
import sys
from enum import StrEnum
from typing import TextIO

__all__ = ["LogLevel", "log_to_standard_error"]


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class _StandardErrorHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at the moment: a progress bar puts itself in its place."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def log_to_standard_error(level: LogLevel) -> None:
    """Have the whole package log there, from `level` on."""
    handler = _StandardErrorHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("wcache_async")
    logger.addHandler(handler)
    logger.setLevel(level.value.upper())
