"""Checks the number of partitions of each topic. A larger number moves keys to other partitions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Literal

from lanes.errors import SourceError
from lanes_kafka.client.topics import Topic

log = logging.getLogger("lanes.kafka")

OnGrowth = Literal["stop", "alarm"]
"""Reaction to an increase of a topic's partitions: end the source, or log a warning."""


class GrowthWatch:
    """Checks the numbers of partitions of the topics of one source.

    Only the thread that owns the client uses the object, except for ``grown``.

    Args:
        name: Name of the source, for errors and log lines.
        on_growth: Reaction to an increase of a topic's partitions.
        fail: Function that ends the source with an error.

    Attributes:
        grown: A text for each topic that has more partitions than at the start. Any thread may read this attribute,
            because each change replaces the dict.
    """

    def __init__(self, name: str, on_growth: OnGrowth, fail: Callable[[SourceError], None]) -> None:
        self.grown: Mapping[str, str] = {}
        self._name = name
        self._on_growth = on_growth
        self._fail = fail
        self._first: dict[str, int] = {}
        self._last: dict[str, int] = {}

    def look(self, known: Mapping[str, Topic]) -> None:
        """Compare the numbers of partitions with the numbers at the start.

        For each increase, the call logs one warning or ends the source. The call does not block.

        Args:
            known: Topics by name. The first call stores the numbers of partitions at the start.
        """
        for name, topic in known.items():
            first = self._first.setdefault(name, topic.partitions)
            if topic.partitions <= self._last.setdefault(name, first):
                continue
            self._last[name] = topic.partitions
            text = (
                f"topic {name!r} has {topic.partitions} partitions now, and had {first} at the start; keys move to "
                "other partitions, so their order may break"
            )
            self.grown = {**self.grown, name: text}
            if self._on_growth == "alarm":
                log.warning("%s: %s. To stop at such a change, set on_growth='stop'", self._name, text)
            else:
                self._fail(
                    SourceError(
                        f"{self._name}: {text}. The source stops because of on_growth='stop'; start again to read all "
                        "partitions"
                    )
                )
