"""The log lines about handlers that a drain cancelled at its limit, and whose messages run again.

The lines count separately the handlers that end within the grace after their cancellation, and the handlers that still
run. Partitions that drain together share one line of each kind. ``named`` lists positions for these and other lines.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final, Literal

from lanes.core.lane import ABANDONED, RUNNING
from lanes.core.types import Message, Partition
from lanes.dead_letter import printable

log = logging.getLogger("lanes")

_NAMED_LIMIT: Final = 10
"""Maximum number of positions in one log line."""

_RAISE: Final = "Raise drain_timeout"
_RAISE_SOURCE: Final = "Raise the limit of the source, such as drain_within of a cohort"

Reaction = Literal["was cancelled", "failed"]
"""The end of a handler after the limit of its drain. A handler in a thread cannot be cancelled."""


def running(partition: Partition) -> list[Message]:
    """Return the messages of a partition whose handlers run."""
    return [message for message in partition.ledger.unfinished() if message.state == RUNNING]


def named(messages: Sequence[Message]) -> str:
    """Return the partitions and positions of messages for a log line, such as ``orders/0: 3, 5; orders/1: 8``.

    Args:
        messages: The messages. The text lists at most 10 positions, and gives the number of further positions.

    Returns:
        The text.
    """
    positions: dict[str, list[str]] = {}
    for message in sorted(messages, key=_place)[:_NAMED_LIMIT]:
        positions.setdefault(str(message.partition.id), []).append(str(message.position))
    text = "; ".join(f"{partition}: {', '.join(some)}" for partition, some in positions.items())
    more = len(messages) - _NAMED_LIMIT
    return f"{text} and {more} more" if more > 0 else text


class CutOffLog:
    """The log lines of one consumer about handlers that a drain has cancelled. No method blocks.

    Args:
        name: Name of the source.
        handler: Name of the handler.
        drain_timeout: The setting, in seconds.
        reaction: Words that say how a handler ended after the limit: by cancellation or by failure.
    """

    def __init__(self, name: str, handler: str, drain_timeout: float, reaction: Reaction) -> None:
        self._name = name
        self._handler = printable(handler)
        self._drain_timeout = drain_timeout
        self._reaction = reaction
        # The noted handlers, by the limit of their drain in seconds.
        self._ended: dict[float, list[Message]] = {}
        self._unended: dict[float, list[Message]] = {}

    def note(self, late: Iterable[Message], unended: Iterable[Message], timeout: float) -> None:
        """Record the cancelled handlers of a drain for ``tell``, after their grace.

        Args:
            late: The messages whose handlers ran at the limit of the drain.
            unended: The messages whose handlers still ran at the fence.
            timeout: The limit of the drain in seconds.
        """
        self._ended.setdefault(timeout, []).extend(message for message in late if message.state == ABANDONED)
        self._unended.setdefault(timeout, []).extend(unended)

    def tell(self) -> None:
        """Log the recorded handlers, with one line for each limit and kind of end."""
        ended, self._ended = self._ended, {}
        unended, self._unended = self._unended, {}
        for timeout, messages in ended.items():
            if not messages:
                continue
            source_limit = timeout < self._drain_timeout
            log.warning(
                "%s: %s did not end within %s and %s for %d message(s), which run again. %s, or let the handler end "
                "sooner. Positions: %s",
                self._name,
                self._handler,
                f"the {timeout:g} s of the source" if source_limit else f"drain_timeout={timeout:g} s",
                self._reaction,
                len(messages),
                _RAISE_SOURCE if source_limit else _RAISE,
                named(messages),
            )
        for timeout, messages in unended.items():
            if not messages:
                continue
            source_limit = timeout < self._drain_timeout
            log.warning(
                "%s: %s did not end within %s and grace and still runs for %d message(s). Its results do not count, "
                "and the messages run again. %s, or let the handler end sooner. Positions: %s",
                self._name,
                self._handler,
                f"the {timeout:g} s of the source" if source_limit else "drain_timeout",
                len(messages),
                _RAISE_SOURCE if source_limit else _RAISE,
                named(messages),
            )


def _place(message: Message) -> tuple[str, int, int]:
    return message.partition.id.source, message.partition.id.number, message.position
