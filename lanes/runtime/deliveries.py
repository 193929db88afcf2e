"""The division of long runs of messages into pieces, so that other tasks can run between two pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from lanes.source import Delivered, SourceEvent

PIECE: Final = 1_000
"""Maximum number of messages that enter the engine at once, which takes less than a millisecond."""


def pieces(events: Sequence[SourceEvent]) -> deque[SourceEvent]:
    """Return the events in order, with longer runs divided into runs of ``PIECE`` messages."""
    cut: deque[SourceEvent] = deque()
    for event in events:
        if not isinstance(event, Delivered) or len(event.run) <= PIECE:
            cut.append(event)
            continue
        left = event.size
        for start in range(0, len(event.run), PIECE):
            run = event.run[start : start + PIECE]
            # The last piece gets the remaining size, so that the sum stays what the source has counted.
            size = left if start + PIECE >= len(event.run) else sum(message.size for message in run)
            left -= size
            cut.append(Delivered(event.partition, run, size))
    return cut
