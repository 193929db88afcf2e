"""The last lines of the log of ``lanes``, for the page."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Final

from lanes.dead_letter import printable

KEPT: Final = 30
"""Number of kept lines."""

_LENGTH: Final = 500
"""Maximum number of characters of a line."""


class Lines(logging.Handler):
    """Keeps the last lines of the logger ``lanes``, from ``open`` until ``close``. Any thread may log.

    The levels of the program's loggers decide which lines exist.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._kept: deque[str] = deque(maxlen=KEPT)

    def open(self) -> None:
        """Begin. Idempotent."""
        logging.getLogger("lanes").addHandler(self)

    def close(self) -> None:
        """End. Idempotent."""
        logging.getLogger("lanes").removeHandler(self)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line; see ``logging.Handler``."""
        try:
            text = printable(record.getMessage())[:_LENGTH]
        except Exception:
            self.handleError(record)
            return
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        self._kept.append(f"{at} {record.levelname} {text}")

    def newest(self) -> list[str]:
        """Return the kept lines, the newest first."""
        return list(self._kept)[::-1]
