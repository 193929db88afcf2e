"""The warning that the messages of a source with ``order="key"`` have no key, and therefore no order."""

from __future__ import annotations

import logging
from typing import Final

from lanes.source import Delivered

log = logging.getLogger("lanes")

_MESSAGES: Final = 100
"""Number of first messages of a run that must all lack a key before the consumer logs the warning."""

_NAMED: Final = 5
"""Maximum number of topics or streams that the warning names."""


class KeylessWatch:
    """The check of the first messages of a run, until a message has a key. The call does not block.

    Args:
        name: Name of the source, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0
        self._sources: set[str] = set()

    def delivered(self, event: Delivered) -> bool:
        """Count received messages, and log the warning when it is due.

        The check treats a message with an unreadable key as a message with a key.

        Args:
            event: The run.

        Returns:
            Whether the check has ended, after a message with a key or after the warning.
        """
        if any(message.key is not None for message in event.run):
            return True
        self._count += sum(message.broken is None for message in event.run)
        self._sources.add(event.partition.id.source)
        if self._count < _MESSAGES:
            return False
        named = sorted(self._sources)
        log.warning(
            "%s: the first %d messages of %s have no key, so lanes handles them in any order. Set a key at the "
            'producer, or with key=… of the source; or choose keyless="one_lane" for the order of each partition, or '
            'order="none"',
            self._name,
            self._count,
            ", ".join(named[:_NAMED]) + (", …" if len(named) > _NAMED else ""),
        )
        return True
