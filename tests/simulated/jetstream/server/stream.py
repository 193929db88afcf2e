"""A stream with its consumers, and the pull requests that wait at a consumer.

The rules are those of nats-server, confirmed by ``tests/simulated/jetstream/test_server.py``:

- Requests of a consumer take turns: each delivery uses the request that has waited longest since its last delivery.
- A request ends after its number of messages, or with the status 408 at the end of its time. If the request also limits
  the bytes, the status 409 "Batch Completed" reports that the request received its number of messages.
- While a request waits, the server sends a heartbeat after each ``idle_heartbeat`` without a message.
- A request whose reply subject has no subscription ends without a message.
- A deleted consumer ends its requests by the status 409 "Consumer Deleted".
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from memsource.jetstream.pull_consumer import ConsumerSettings, PullConsumer
from memsource.memory.broker import Delivery
from memsource.memory.topic import Log, Record
from tests.simulated.jetstream.server.protocol import matches

_SECOND: Final = 1_000_000_000

_UNBOUNDED: Final = 1 << 62

_DUPLICATE_WINDOW: Final = 120.0
"""Seconds for which a stream remembers the ids of messages, the server's default."""


class Refused(Exception):
    """The answer of the API to a request that it refuses.

    Args:
        code: HTTP status of the answer.
        err_code: Error code of the API.
        text: Description.
    """

    def __init__(self, code: int, err_code: int, text: str) -> None:
        super().__init__(text)
        self.fields = {"code": code, "err_code": err_code, "description": text}


class Status(NamedTuple):
    """A status of a pull request, with its further headers."""

    reply: str
    status: int
    text: str
    fields: Mapping[str, int]


class Sent(NamedTuple):
    """A message for a pull request.

    Attributes:
        reply: Reply subject of the request.
        record: The message.
        answer: Subject for the answer to the message.
        delivery: Number of the delivery.
    """

    reply: str
    record: Record
    answer: str
    delivery: int


@dataclass(eq=False, slots=True)
class PullRequest:
    """A pull request that waits at a consumer.

    Attributes:
        reply: Subject to which the server sends messages and statuses.
        left: Number of messages that the server may still deliver to the request.
        bytes: Number of bytes that the server may still deliver to the request; None = no limit.
        ends: Time of the end, in seconds.
        heartbeat: Seconds between two heartbeats; infinity = no heartbeats.
        beat_at: Time of the next heartbeat.
    """

    reply: str
    left: int
    bytes: int | None
    ends: float
    heartbeat: float
    beat_at: float

    @property
    def pending(self) -> dict[str, int]:
        """The headers that report the undelivered part of the request."""
        return {"Nats_Pending_Messages": self.left, "Nats_Pending_Bytes": self.bytes or 0}


@dataclass(eq=False)
class StreamConsumer:
    """A consumer of a stream.

    Attributes:
        stream: Name of the stream.
        name: Name of the consumer.
        config: Configuration, as the client sent it.
        created: Time of the creation, in seconds.
        log: Messages that the consumer delivers.
        data: State of the messages.
        requests: Requests that wait, in the order of their turns.
        losing: Number of next deliveries to lose.
        sent: Reply subjects of the pull requests by the numbers of their deliveries, without lost deliveries.
    """

    stream: str
    name: str
    config: dict[str, Any]
    created: float
    log: Log
    data: PullConsumer
    requests: list[PullRequest] = field(default_factory=list)
    losing: int = 0
    sent: dict[int, str] = field(default_factory=dict)

    def takes(self, subject: str) -> bool:
        """Return whether the consumer delivers messages of a subject."""
        return any(matches(each, subject) for each in filters_of(self.config))

    @property
    def unfinished(self) -> list[int]:
        """All unacknowledged sequences, delivered or not, rising."""
        return self.data.unfinished

    # --- pull requests

    def ask(self, reply: str, fields: Mapping[str, Any], now: float) -> None:
        """Add a pull request.

        Args:
            reply: Subject to which the server sends messages and statuses.
            fields: Fields of the request.
            now: The time, in seconds.
        """
        beat = fields.get("idle_heartbeat", 0) / _SECOND or math.inf
        self.requests.append(
            PullRequest(
                reply,
                int(fields.get("batch", 1)),
                int(fields["max_bytes"]) if fields.get("max_bytes") else None,
                now + fields.get("expires", 0) / _SECOND,
                beat,
                now + beat,
            )
        )

    def drop(self, heard: Callable[[str], bool]) -> None:
        """Drop the requests whose reply subject has no subscription.

        Args:
            heard: Function that returns whether a subject has a subscription.
        """
        self.requests = [each for each in self.requests if heard(each.reply)]

    def deliver(self, now: float, stamp: Callable[[float], int]) -> Iterator[Sent | Status]:
        """Deliver messages to the requests while both exist.

        Args:
            now: The time, in seconds.
            stamp: Function that returns the server's clock in nanoseconds for a time.

        Yields:
            Messages and statuses, in the order in which the server sends them.
        """
        while self.requests:
            deliveries = self.data.pull(1, _UNBOUNDED, now)
            if not deliveries:
                return
            request = self.requests.pop(0)
            request.left -= 1
            if request.bytes is not None:
                request.bytes = max(1, request.bytes - deliveries[0].record.size)
            answer = self._answer(deliveries[0], stamp(now))
            yield Sent(request.reply, deliveries[0].record, answer, deliveries[0].token)
            if request.left > 0:
                request.beat_at = now + request.heartbeat
                self.requests.append(request)
            elif request.bytes is not None:
                yield Status(request.reply, 409, "Batch Completed", request.pending)

    def _answer(self, delivery: Delivery, stamp: int) -> str:
        place = f"{delivery.count}.{delivery.record.position}.{delivery.token}.{stamp}.{self.data.undelivered}"
        return f"$JS.ACK.{self.stream}.{self.name}.{place}"

    def end(self, status: int, text: str) -> list[Status]:
        """End all requests.

        Args:
            status: Number of the status.
            text: Description of the status.

        Returns:
            The statuses to send.
        """
        ended, self.requests = self.requests, []
        return [Status(each.reply, status, text, {}) for each in ended]

    # --- time

    def next_at(self) -> float:
        """Return the time of the next due action; infinity = no action is due."""
        at = min((min(each.ends, each.beat_at) for each in self.requests), default=math.inf)
        return min(at, self.data.next_at())

    def advance(self, now: float) -> list[Status]:
        """Act on every due timer.

        Args:
            now: The time, in seconds.

        Returns:
            The statuses to send.
        """
        self.data.advance(now)
        told: list[Status] = []
        for request in list(self.requests):
            if request.ends <= now:
                self.requests.remove(request)
                told.append(Status(request.reply, 408, "Request Timeout", request.pending))
            elif request.beat_at <= now:
                request.beat_at = now + request.heartbeat
                last = {"Nats_Last_Consumer": self.data.deliveries, "Nats_Last_Stream": self.data.highest}
                told.append(Status(request.reply, 100, "Idle Heartbeat", last))
        return told

    # --- administration

    def update(self, config: dict[str, Any], now: float) -> None:
        """Change the configuration."""
        self.config = config
        self.data.configure(settings_of(config), now)

    def reset(self, now: float) -> None:
        """Deliver all messages above the acknowledgement floor again."""
        self.data.reset(now)


class MessageStream:
    """A stream of messages.

    Args:
        config: Configuration, as the client sent it.
        created: Time of the creation, in seconds.

    Attributes:
        name: Name of the stream.
        config: The configuration.
        created: Time of the creation.
        log: All published messages, acknowledged or not.
        gone: Sequences that the stream no longer stores.
        consumers: The consumers by name, in the order of their creation.
    """

    def __init__(self, config: dict[str, Any], created: float) -> None:
        self.name = str(config["name"])
        self.config = config
        self.created = created
        self.log = Log()
        self.log.end = int(config.get("first_seq") or 1)
        self.gone: set[int] = set()
        self.consumers: dict[str, StreamConsumer] = {}
        self._ids: dict[str, tuple[int, float]] = {}  # sequences and times of the messages with an id
        self._retention = config.get("retention", "limits")

    # --- messages

    def append(self, record: Record) -> None:
        """Store a message."""
        self.log.append(record)
        takers = [each for each in self.consumers.values() if each.takes(record.subject)]
        for consumer in takers:
            consumer.log.append(record)
        if self._retention == "interest" and not takers:
            self.gone.add(record.position)

    def copied(self, message_id: str, now: float) -> int | None:
        """Return the sequence of the stored message that the next message repeats.

        Args:
            message_id: Id of the next message; empty = no id.
            now: The time, in seconds.

        Returns:
            The sequence; None = the message is no copy, and the stream remembers its id for the duplicate window.
        """
        sequence, at = self._ids.get(message_id, (0, -math.inf))
        if now - at < _DUPLICATE_WINDOW:
            return sequence
        if message_id:
            self._ids[message_id] = self.log.end, now
        return None

    @property
    def stored(self) -> list[int]:
        """The sequences of the stored messages, rising."""
        return [each for each in self.log.positions if each not in self.gone]

    def state(self) -> dict[str, int]:
        """Return the fields of the stream's state."""
        stored = self.stored
        last = self.log.end - 1
        size = sum(self.log.records[each].size for each in stored)
        first = stored[0] if stored else last + 1
        return {
            "messages": len(stored),
            "bytes": size,
            "first_seq": first,
            "last_seq": last,
            "consumer_count": len(self.consumers),
        }

    def subjects(self, pattern: str) -> dict[str, int]:
        """Count the stored messages of each subject that a pattern matches."""
        found: dict[str, int] = {}
        for each in self.stored:
            subject = self.log.records[each].subject
            if matches(pattern, subject):
                found[subject] = found.get(subject, 0) + 1
        return found

    def next(self, sequence: int, pattern: str = ">") -> Record | None:
        """Return the first stored message from a sequence on whose subject a pattern matches; None = no message."""
        at = bisect_left(self.log.positions, sequence)
        later = (self.log.records[each] for each in self.log.positions[at:] if each not in self.gone)
        return next((each for each in later if matches(pattern, each.subject)), None)

    # --- consumers

    def create(self, name: str, config: dict[str, Any], now: float) -> StreamConsumer:
        """Create a consumer. The creation of an existing consumer with the same configuration has no effect.

        Args:
            name: Name of the consumer.
            config: Its configuration.
            now: The time, in seconds.

        Returns:
            The consumer.

        Raises:
            Refused: A consumer with this name and another configuration exists, or on a work queue a consumer delivers
                some of the same messages.
        """
        there = self.consumers.get(name)
        if there is not None:
            if there.config == config:
                return there
            raise Refused(400, 10148, "consumer already exists")
        if self._retention == "workqueue":
            wanted = filters_of(config)
            for other in self.consumers.values():
                if any(overlap(one, each) for one in wanted for each in filters_of(other.config)):
                    raise Refused(400, 10100, "filtered consumer not unique on workqueue stream")
        log = Log()
        log.end = self.log.end
        consumer = StreamConsumer(self.name, name, config, now, log, PullConsumer(log, settings_of(config)))
        begin = self._begin(config)
        for sequence in self.log.positions[bisect_left(self.log.positions, begin) :]:
            record = self.log.records[sequence]
            if sequence not in self.gone and consumer.takes(record.subject):
                log.append(record)
        self.consumers[name] = consumer
        return consumer

    def _begin(self, config: Mapping[str, Any]) -> int:
        policy = config.get("deliver_policy", "all")
        if policy == "by_start_sequence":
            return int(config["opt_start_seq"])
        return self.log.end if policy == "new" else 1

    def delete(self, name: str) -> list[Status] | None:
        """Delete a consumer. Returns the statuses of its requests; None = the consumer does not exist."""
        consumer = self.consumers.pop(name, None)
        if consumer is None:
            return None
        if self._retention == "interest":
            for sequence in consumer.log.positions:
                self._settle(sequence)
        return consumer.end(409, "Consumer Deleted")

    def ack(self, consumer: StreamConsumer, sequence: int, now: float) -> None:
        """Acknowledge a message of a consumer."""
        consumer.data.ack(sequence, now)
        if sequence not in consumer.unfinished:
            self._settle(sequence)

    def _settle(self, sequence: int) -> None:
        """Remove an acknowledged message, unless the retention or another consumer keeps the message."""
        if self._retention == "limits" or sequence in self.gone:
            return
        subject = self.log.records[sequence].subject
        if not any(each.takes(subject) and sequence in each.unfinished for each in self.consumers.values()):
            self.gone.add(sequence)

    def remove(self, sequence: int, now: float) -> bool:
        """Remove a message, as a limit of the stream does. Returns False if the stream does not store the message."""
        if sequence in self.gone or sequence not in self.log.records:
            return False
        self.gone.add(sequence)
        for consumer in self.consumers.values():
            consumer.data.remove(sequence, now)
        return True

    def kill(self, now: float) -> None:
        """Kill and restart the server. The consumers forget their changes of the last 0.1 s, and their requests."""
        for consumer in self.consumers.values():
            consumer.requests.clear()
            consumer.data.kill(now)


def settings_of(config: Mapping[str, Any]) -> ConsumerSettings:
    """Return the settings of a consumer's configuration."""
    pending = int(config.get("max_ack_pending") or 1000)
    most = int(config.get("max_deliver") or -1)
    return ConsumerSettings(
        ack_wait=int(config.get("ack_wait") or 30 * _SECOND) / _SECOND,
        backoff=tuple(each / _SECOND for each in config.get("backoff") or ()),
        max_deliver=most if most > 0 else None,
        max_ack_pending=pending if pending > 0 else None,
    )


def filters_of(config: Mapping[str, Any]) -> Sequence[str]:
    """Return the patterns of the subjects that a consumer delivers."""
    return config.get("filter_subjects") or [config.get("filter_subject") or ">"]


def overlap(one: str, other: str) -> bool:
    """Return whether a subject exists that both patterns match."""
    these, those = one.split("."), other.split(".")
    for this, that in zip(these, those, strict=False):
        if ">" in (this, that):
            return True
        if this != that and "*" not in (this, that):
            return False
    return len(these) == len(those)
