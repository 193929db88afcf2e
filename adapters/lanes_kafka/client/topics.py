"""The topics that are read, by their ids: one that was deleted and created anew has other messages at its offsets."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from lanes.clock import Clock
from lanes.errors import ConfigError
from lanes_kafka.broker import no_answer, wait

LOOK_EVERY: Final = 1.0
"""Seconds between two looks at the ids."""

_GONE_AFTER: Final = 0.5
"""Seconds for which a topic that was there is unknown before it is gone: a broker that has just started may not know of
it yet."""

_TIMEOUT: Final = 5.0
_GIVEN_UP_AFTER: Final = 2 * _TIMEOUT
"""Seconds after which a question that has not even failed is given up, and another one begins."""

_APPEARS_WITHIN: Final = 1.0
"""Seconds that a topic may stay unknown at the start."""


class Topic(NamedTuple):
    """``id`` is "" where the broker is too old to have one; ``partitions`` is their number."""

    id: str
    partitions: int


class Topics:
    """What the broker says of these topics; used by one thread, and asked beside what it does.

    ``known``: the newest answer; a topic that does not exist is not in it. ``answered``: the number of the question it
    is to. ``admin``: whom it asks; None once closed. ``wake`` is called, from a thread of the client, when there may be
    something to ``look`` at.
    """

    def __init__(
        self, names: Sequence[str], admin: AdminClient, clock: Clock, wake: Callable[[], None] = lambda: None
    ) -> None:
        self.known: dict[str, Topic] = {}
        self.answered = 0
        self.admin: AdminClient | None = admin
        self._names = tuple(names)
        self._clock = clock
        self._wake = wake
        self._asked: dict[str, concurrent.futures.Future[Any]] = {}
        self._missing: dict[str, float] = {}
        self._begun = self._wanted = 0
        self._next = self._given_up_at = 0.0

    def look(self) -> bool:
        """Take in an answer that has come, and ask again when it is time; True when there was an answer.

        Does not block. A question that fails is asked again.
        """
        answered = False
        if self._is_asked():
            if not self._is_done():
                return False
            answered = self._take()
        if (answered and self._wanted > self._begun) or self._clock() >= self._next:
            self._begin()
        return answered

    def question(self) -> int:
        """The number of a question that begins now, or as soon as the one under way has ended. Does not block.

        Its answer, or a later one, says what is so now: one under way may have been answered already.
        """
        if not self._is_asked():
            self._begin()
            return self._begun
        self._wanted = self._begun + 1
        return self._wanted

    def wait(self, timeout: float) -> bool:
        """``question``, and block for its answer up to ``timeout`` seconds; False when it did not come."""
        number, deadline = self.question(), time.monotonic() + timeout
        while self._asked:
            assert self.admin is not None, "once closed it has asked nothing"
            if not wait(self.admin, self._asked.values(), deadline):
                return False
            answered = self._take()
            if self._begun >= number:
                return answered
            self._begin()
        return False

    def appears(self, topic: str, timeout: float) -> bool:
        """Whether it is known, or comes up within a second: not every broker knows of it as soon as it is made. So long
        it is waited for its id, too, where others have one.

        Blocks; each answer may take ``timeout`` seconds.
        """
        deadline = self._clock() + _APPEARS_WITHIN
        while self._lacks(topic) and self._clock() < deadline:
            time.sleep(_APPEARS_WITHIN / 10)
            self.wait(timeout)
        return topic in self.known

    def check(self, timeout: float, settings: Mapping[str, Any], name: str) -> None:
        """Refuse what can be known to fail, as source ``name``. ``settings``: what its clients are made with.

        Blocks; each answer may take ``timeout`` seconds. Raises ``ConfigError`` where there is no such topic, and what
        ``no_answer`` says without a broker or a permission.
        """
        if not self.wait(timeout):
            raise no_answer(settings, self._names, name)
        for topic in self._names:
            if not self.appears(topic, timeout):
                raise ConfigError(
                    f"{name}: there is no topic {topic!r}, or this client may not see it: create it, or correct "
                    "topics=…"
                )

    def change(self, topic: str, incarnation: str) -> str | None:
        """What became of a topic that had this id; None where it is what it was, as far as is known."""
        now = self.known.get(topic)
        if now is None:
            return "deleted"
        if incarnation and now.id and now.id != incarnation:
            return f"deleted and created anew ({incarnation} is {now.id} now)"
        return None

    def id_of(self, topic: str) -> str:
        """As far as is known; "" where it is not."""
        return "" if (found := self.known.get(topic)) is None else found.id

    def close(self) -> None:
        """Let go of the client: nothing is asked any more. Idempotent."""
        self._asked, self.admin = {}, None

    def _lacks(self, topic: str) -> bool:
        return topic not in self.known or (not self.id_of(topic) and any(each.id for each in self.known.values()))

    def _is_asked(self) -> bool:
        """Whether a question is under way. Of one that is given up no answer is heard any more."""
        if self._clock() >= self._given_up_at and not self._is_done():
            self._asked = {}
        return bool(self._asked)

    def _is_done(self) -> bool:
        return all(future.done() for future in self._asked.values())

    def _begin(self) -> None:
        if self.admin is None:
            return
        # What it logs for the user's logger waits in it until somebody takes it.
        self.admin.poll(0)
        now = self._clock()
        self._next, self._given_up_at = now + LOOK_EVERY, now + _GIVEN_UP_AFTER
        self._begun += 1
        self._asked = self.admin.describe_topics(TopicCollection(list(self._names)), request_timeout=_TIMEOUT)
        for future in self._asked.values():
            future.add_done_callback(lambda _: self._wake())

    def _take(self) -> bool:
        futures, self._asked = self._asked, {}
        known, whole = {}, True
        for name, future in futures.items():
            try:
                found = future.result(0)
            except KafkaException as failure:
                code = failure.args[0].code()
                if code == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    if self._may_come_back(name):
                        whole = False
                    continue
                self._missing.pop(name, None)
                if code != KafkaError.TOPIC_AUTHORIZATION_FAILED or not self.answered:
                    whole = False
                elif name in self.known:
                    # This user was allowed to, and is not any more: nobody says whether it is what it was.
                    known[name] = self.known[name]
            else:
                self._missing.pop(name, None)
                known[name] = Topic(_text(found.topic_id), len(found.partitions))
        if whole:
            self.known, self.answered = known, self._begun
        return whole

    def _may_come_back(self, name: str) -> bool:
        """Whether a topic that was there is unknown for so short a time that it says nothing."""
        now = self._clock()
        return name in self.known and now - self._missing.setdefault(name, now) < _GONE_AFTER


def _text(topic_id: Any) -> str:
    text = "" if topic_id is None else str(topic_id)
    # A broker without ids says zero.
    return "" if not text.strip("A=-0") else text
