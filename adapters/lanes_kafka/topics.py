"""The topics that are read, by their ids: one that was deleted and created anew has other messages at its offsets."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from lanes.clock import Clock

LOOK_EVERY: Final = 1.0
"""Seconds between two looks at the ids."""

_TIMEOUT: Final = 5.0


class Topic(NamedTuple):
    """``id`` is "" where the broker is too old to have one; ``partitions`` is their number."""

    id: str
    partitions: int


class Topics:
    """What the broker says of these topics; used by one thread, and asked beside what it does.

    ``known``: the newest answer; a topic that does not exist is not in it. ``first``: how many partitions each had in
    the first answer that had it.
    """

    def __init__(self, names: Sequence[str], admin: AdminClient, clock: Clock) -> None:
        self.known: dict[str, Topic] = {}
        self.first: dict[str, int] = {}
        self._names = tuple(names)
        self._admin = admin
        self._clock = clock
        self._asked: dict[str, concurrent.futures.Future[Any]] = {}
        self._next = 0.0

    def look(self) -> bool:
        """Take in an answer that has come, and ask again when it is time; True when there was an answer.

        Does not block. A question that fails is asked again.
        """
        answered = False
        if self._asked:
            if not all(future.done() for future in self._asked.values()):
                return False
            answered = self._take()
        elif self._clock() >= self._next:
            self.ask()
        return answered

    def ask(self) -> None:
        """Ask now, unless that is under way. Does not block."""
        if not self._asked:
            self._next = self._clock() + LOOK_EVERY
            self._asked = self._admin.describe_topics(TopicCollection(list(self._names)), request_timeout=_TIMEOUT)

    def wait(self, timeout: float) -> bool:
        """``ask``, and block for the answer up to ``timeout`` seconds; False when it did not come."""
        self.ask()
        return self.hear(timeout)

    def hear(self, timeout: float) -> bool:
        """Block for the answer to what was asked, if anything was, up to ``timeout`` seconds; False without one."""
        _, waiting = concurrent.futures.wait(self._asked.values(), timeout)
        return bool(self._asked) and not waiting and self._take()

    def _take(self) -> bool:
        futures, self._asked = self._asked, {}
        known = {}
        for name, future in futures.items():
            try:
                found = future.result(0)
            except KafkaException as failure:
                if failure.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    return False
            else:
                known[name] = Topic(_text(found.topic_id), len(found.partitions))
                self.first.setdefault(name, len(found.partitions))
        self.known = known
        return True


def _text(topic_id: Any) -> str:
    text = "" if topic_id is None else str(topic_id)
    # A broker without ids says zero.
    return "" if not text.strip("A=-0") else text
