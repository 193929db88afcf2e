"""Watches the ids of the source's topics. A recreated topic has other messages at the same offsets."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from lanes.clock import Clock
from lanes.errors import ConfigError
from lanes.source import BrokerContact
from lanes_kafka.broker import id_text, similar_topic, unanswered, wait_for
from lanes_kafka.errors import NO_ANSWER, is_login_refused

ASK_EVERY: Final = 1.0
"""Seconds between two regular requests for the ids; ``ask`` may ask earlier."""

_GONE_AFTER: Final = 0.5
"""Seconds after which a topic that is missing in the answers counts as deleted. A broker that has just started may not
know the topic yet."""

_TIMEOUT: Final = 5.0
_GIVEN_UP_AFTER: Final = 2 * _TIMEOUT
"""Seconds without an answer or error after which the object repeats a request."""

_AGAIN: Final = 0.1
"""Seconds between two requests at the start, while no broker answers."""

_NEITHER: Final = f"neither an answer nor an error for {_GIVEN_UP_AFTER:g} s"

_APPEARS_WITHIN: Final = 1.0
"""Seconds at the start during which a topic may be unknown."""


class Topic(NamedTuple):
    """One topic.

    Attributes:
        id: The topic id; "" if the broker is too old for topic ids.
        partitions: Number of partitions.
    """

    id: str
    partitions: int


@dataclass(eq=False, repr=False)
class Topics:
    """The broker's newest description of some topics.

    Only one thread uses the object. Only ``wait``, ``appears`` and ``check`` block.

    Attributes:
        names: Names of the topics.
        admin: The client to ask; None after ``close``.
        clock: Monotonic clock, in seconds.
        wake: Function that a thread of the client calls when ``poll`` may find an answer.
        known: The existing topics of the newest answer, by name.
        answered: Number of the request that ``known`` answers.
        contact: Record of answers and failures of the requests, which the object sends every second.
    """

    names: Sequence[str]
    admin: AdminClient | None
    clock: Clock
    wake: Callable[[], None] = lambda: None
    known: dict[str, Topic] = field(default_factory=dict, init=False)
    answered: int = field(default=0, init=False)
    _asked: dict[str, concurrent.futures.Future[Any]] = field(default_factory=dict, init=False)
    _missing: dict[str, float] = field(default_factory=dict, init=False)
    _failed: dict[str, KafkaError] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._begun = self._wanted = 0
        self._next = self._given_up_at = self._asked_at = 0.0
        self.contact = BrokerContact(self.clock)

    def poll(self) -> bool:
        """Process an answer that has arrived, and send the next request when it is due. The call does not block.

        Returns whether the call processed an answer. A later call repeats a failed request.
        """
        answered = False
        if self._is_asked():
            if not self._is_done():
                return False
            answered = self._take()
        if (answered and self._wanted > self._begun) or self.clock() >= self._next:
            self._begin()
        return answered

    def ask(self) -> int:
        """Send a request now, or after the answer to the open request.

        Returns the number of the new request. The call does not block.

        The answer to the new request is newer than this call. The answer to the open request may be older.
        """
        if not self._is_asked():
            self._begin()
            return self._begun
        self._wanted = self._begun + 1
        return self._wanted

    def wait(self, timeout: float, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Ask, and block for up to ``timeout`` seconds. Return whether a complete answer arrived in time.

        The call ends early when ``give_up`` returns True.
        """
        number, deadline = self.ask(), time.monotonic() + timeout
        while self._asked:
            assert self.admin is not None, "no question is open after close"
            if not wait_for(self.admin, self._asked.values(), deadline, give_up):
                return False
            answered = self._take()
            if self._begun >= number:
                return answered
            self._begin()
        return False

    def appears(self, topic: str, timeout: float) -> bool:
        """Wait for a topic and its id for about a second, and return whether the topic is known.

        Some brokers learn of a new topic, or of its id, later than other brokers. The call waits for a missing id only
        while another topic has an id. The call blocks for about a second, and up to ``timeout`` seconds for each
        answer.
        """
        deadline = self.clock() + _APPEARS_WITHIN
        while self._lacks(topic) and self.clock() < deadline:
            time.sleep(_APPEARS_WITHIN / 10)
            self.wait(timeout)
        return topic in self.known

    def check(
        self, timeout: float, settings: Mapping[str, Any], name: str, reported: Collection[KafkaError] = ()
    ) -> None:
        """Check that all topics exist. Blocks. The call repeats the request until a broker answers.

        Args:
            timeout: Maximum time for the first answer, and for each later answer, in seconds.
            settings: Configuration of the source's clients, whose secrets no error or log line shows.
            name: Name of the source, for errors.
            reported: The errors that ``admin`` reports, which may grow during the call.

        Raises:
            ConfigError: A topic does not exist or is not visible to this user, or the client refuses its settings.
            SourceError: No broker answers, the broker refuses the login, or a permission is missing.
        """
        deadline = time.monotonic() + timeout

        def is_refused() -> bool:
            return any(map(is_login_refused, reported))

        while not self.wait(deadline - time.monotonic(), is_refused):
            timed_out = {self.names[0]: KafkaError(KafkaError._TIMED_OUT, "no answer in time")}
            topic, error = next(iter((self._failed or timed_out).items()))
            if is_refused() or error.code() not in NO_ANSWER or time.monotonic() + _AGAIN > deadline:
                raise unanswered(settings, topic, error, reported, timeout, name)
            time.sleep(_AGAIN)
        for topic in self.names:
            if not self.appears(topic, timeout):
                raise ConfigError(
                    f"{name}: topic {topic!r} does not exist, or this client may not see it; create the topic, or "
                    f"correct topics=…{self._similar(topic)}"
                )

    def change(self, topic: str, incarnation: str) -> str | None:
        """Return a text about the deletion or the new id of a topic whose id was ``incarnation``; None = no change."""
        now = self.known.get(topic)
        if now is None:
            return "deleted"
        if incarnation and now.id and now.id != incarnation:
            return f"deleted and recreated (its id was {incarnation}, and is {now.id} now)"
        return None

    def id_of(self, topic: str) -> str:
        """Return the id of a topic; "" while the id is unknown."""
        return "" if (found := self.known.get(topic)) is None else found.id

    def close(self) -> None:
        """Release the client and stop asking. Idempotent."""
        self._asked, self.admin = {}, None

    def _similar(self, topic: str) -> str:
        """Return a "did you mean" text about topics with names like a missing topic. Blocks."""
        return "" if self.admin is None else similar_topic(self.admin, topic, timeout=_TIMEOUT)

    def _lacks(self, topic: str) -> bool:
        return topic not in self.known or (not self.id_of(topic) and any(each.id for each in self.known.values()))

    def _is_asked(self) -> bool:
        """Whether a request waits for its answer.

        After 10 s the request has failed, and the object ignores a late answer.
        """
        if self.clock() >= self._given_up_at and not self._is_done():
            self._asked = {}
            self.contact.unanswered(self._asked_at, _NEITHER)
        return bool(self._asked)

    def _is_done(self) -> bool:
        return all(future.done() for future in self._asked.values())

    def _begin(self) -> None:
        if self.admin is None:
            return
        # Log lines for the user's logger wait in the client until the next poll.
        self.admin.poll(0)
        now = self._asked_at = self.clock()
        self._next, self._given_up_at = now + ASK_EVERY, now + _GIVEN_UP_AFTER
        self._begun += 1
        self._asked = self.admin.describe_topics(TopicCollection(list(self.names)), request_timeout=_TIMEOUT)
        asked = self._asked

        def arrived(_: object) -> None:
            # Each topic has its own future, and ``poll`` needs all futures. One wake-up after the last future is
            # therefore enough.
            if all(each.done() for each in asked.values()):
                self.wake()

        for future in asked.values():
            future.add_done_callback(arrived)

    def _take(self) -> bool:
        futures, self._asked = self._asked, {}
        known, whole, silent = {}, True, None
        self._failed = {}
        for name, future in futures.items():
            try:
                found = future.result(0)
            except KafkaException as failure:
                error: KafkaError = failure.args[0]
                code = error.code()
                if code in NO_ANSWER:
                    silent = error
                if code == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    if self._may_come_back(name):
                        whole = False
                    continue
                self._missing.pop(name, None)
                if code != KafkaError.TOPIC_AUTHORIZATION_FAILED or not self.answered:
                    whole = False
                    self._failed[name] = error
                elif name in self.known:
                    # The user has lost the permission, so later changes of the topic stay unknown.
                    known[name] = self.known[name]
            else:
                self._missing.pop(name, None)
                known[name] = Topic(id_text(found.topic_id), len(found.partitions))
        if silent is None:
            self.contact.answered()
        else:
            self.contact.unanswered(self._asked_at, silent.str())
        if whole:
            self.known, self.answered = known, self._begun
        return whole

    def _may_come_back(self, name: str) -> bool:
        """Return whether a missing topic does not count as deleted yet, because a recent answer contained it."""
        now = self.clock()
        return name in self.known and now - self._missing.setdefault(name, now) < _GONE_AFTER
