"""The log lines of librdkafka, written to the logger ``lanes.kafka.client``."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from confluent_kafka import KafkaError

from lanes.clock import Clock
from lanes.dead_letter import printable
from lanes.line_limit import FoldedLog
from lanes_kafka.config import redacted
from lanes_kafka.errors import closed_at_first_request

log = logging.getLogger("lanes.kafka.client")

_VARYING: Final = re.compile(r"\(after [^()]*\)|\d+ ?ms\b")
"""Parts of a line, such as times, that differ between repetitions of the line."""


def _line(template: str, values: tuple[object, ...]) -> str:
    """Return a line without the name of its client.

    Each log line of the client already names the owner. Two clients of one owner, for example the source's consumer and
    its admin client, often write the same lines.
    """
    if len(values) != 3:
        return template % values
    facility, _, text = values
    return f"{facility} {text}"


class ClientLog:
    """The ``logger`` of the clients of one owner, unless the user's configuration has a ``logger``.

    Without a ``logger`` librdkafka prints its lines to stderr. A client calls ``log`` in the thread that polls the
    client. One thread polls all clients of one ``ClientLog``.

    Args:
        name: Name of the owner, which begins each line.
        clock: Monotonic clock, in seconds.
        settings: Configuration of the clients, whose secrets no error or log line shows.

    Attributes:
        reported: Errors that the client reports only by log lines. The owner may replace the list before it makes a
            client.
    """

    def __init__(self, name: str, clock: Clock, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._clock = clock
        self._folded = FoldedLog(log, name, clock)
        self.reported: deque[KafkaError] = deque(maxlen=1)
        # The last warning, and its time.
        self._last: tuple[str, tuple[object, ...], float] | None = None

    def added_to(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a configuration with this ``logger``. The copy keeps a user's ``logger``."""
        return {"logger": self, **settings}

    def log(self, level: int, template: str, *values: object) -> None:
        """Write a line. The client calls this method of its ``logger``.

        Args:
            level: Level of the line. The method logs an error as a warning, because the client retries.
            template: Format of the line.
            *values: Facility, name of the client, and text.
        """
        if values and (error := closed_at_first_request(str(values[-1]))) is not None:
            self.reported.append(error)
        level = min(level, logging.WARNING)
        if level == logging.WARNING:
            self._last = template, values, self._clock()
        if log.isEnabledFor(level):
            line = _line(template, values)
            self._folded.write(level, _VARYING.sub("", line), printable(redacted(line, self._settings)))

    def last(self) -> tuple[str, float] | None:
        """The text of the last warning and its age in seconds; None before a warning.

        Any thread may call this method.
        """
        last = self._last
        if last is None:
            return None
        template, values, at = last
        return printable(redacted(_line(template, values), self._settings)), self._clock() - at

    def due(self) -> None:
        """Log the number of suppressed repetitions of each line, if the interval has passed."""
        self._folded.due()

    def end(self) -> None:
        """Log the number of suppressed repetitions of each line, when the clients end."""
        self._folded.end()
