"""A ``confluent_kafka.Producer`` over a broker as data, and the real writer of dead letters over it.

``produce`` is a call of the event loop. All other calls run in a stepped thread, which sends the records too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import KafkaError, KafkaException, Message

from lanes.dead_letter import DeadLetter
from lanes_kafka import KafkaDeadLetters
from memsource.adapters.threads import SteppedThread, stepped
from memsource.kafka.client import Client
from tests.simulated.kafka.link import RETRY, Link

if TYPE_CHECKING:
    from tests.simulated.kafka.broker import SimulatedKafka

LETTERS: Final = "letters"
"""Topic of the dead letters, with one partition."""

SOCKET_TIMEOUT: Final = 60.0
"""Seconds after which the client gives up a request, the default of ``socket.timeout.ms``."""

_QUEUE: Final = 100_000
"""The default of ``queue.buffering.max.messages``."""

Headers = Sequence[tuple[str, bytes | None]]


@dataclass(frozen=True)
class Letter:
    """A record of the topic.

    Attributes:
        key: Key of the record.
        value: Value of the record.
        headers: Headers of the record.
    """

    key: bytes | None
    value: bytes | None
    headers: Headers


@dataclass(eq=False)
class _Queued:
    """A record that the client has not reported yet."""

    topic: str
    letter: Letter
    on_delivery: Callable[[KafkaError | None, Message], object]
    number: int
    expires: float
    due: float = 0.0
    asked: bool = False
    over: bool = False


class SimulatedProducer:
    """One idempotent producer of a member, which sends one record after the other.

    Args:
        broker: The broker.
        member: Name of the member.
        settings: The final dictionary of the producer.
    """

    def __init__(self, broker: SimulatedKafka, member: str, settings: dict[str, Any]) -> None:
        self.member = member
        self._broker = broker
        self._timeout = settings["message.timeout.ms"] / 1000
        self._limit = settings.get("queue.buffering.max.messages", _QUEUE)
        self._on_error: Callable[[KafkaError], object] = settings["error_cb"]
        self._link: tuple[Client, Link] | None = None
        self._thread: SteppedThread | None = None
        self._queue: deque[_Queued] = deque()
        self._reports: deque[Callable[[], object]] = deque()
        self._numbers = 0
        self._fatal: KafkaError | None = None

    def __repr__(self) -> str:
        return f"<SimulatedProducer {self.member}>"

    def __len__(self) -> int:
        return len(self._queue) + len(self._reports)

    @property
    def loaded(self) -> bool:
        """Whether the client has records that wait or that are under way."""
        return bool(self._queue)

    # --- on the event loop

    def produce(
        self,
        topic: str,
        *,
        value: bytes | None,
        key: bytes | None,
        headers: Headers,
        partition: int,
        on_delivery: Callable[[KafkaError | None, Message], object],
    ) -> None:
        """Queue a record."""
        if self._fatal is not None:
            raise KafkaException(self._fatal)
        if len(self) >= self._limit:
            raise BufferError("Local: Queue full")
        self._numbers += 1
        expires = self._now() + self._timeout
        self._queue.append(_Queued(topic, Letter(key, value, headers), on_delivery, self._numbers, expires))
        self._broker.events.on_letter(self)

    # --- in the thread

    def poll(self, timeout: float) -> int:
        """Send records, and call the callbacks that are due. Blocks until a callback is due."""
        self._thread = stepped()
        until = self._now() + timeout
        while True:
            self._send()
            if self._reports or self._now() >= until:
                break
            assert self._thread is not None, "only the thread of the writer waits"
            self._thread.pause(min(until, self._queue[0].due if self._waits() else until))
        served = len(self._reports)
        for _ in range(served):
            self._reports.popleft()()
        return served

    def flush(self, timeout: float) -> int:
        """Poll until all records are reported or the time is over, and return the number of unreported records."""
        until = self._now() + timeout
        while self and self._now() < until:
            self.poll(until - self._now())
        return len(self)

    def purge(self) -> None:
        """Let all records fail."""
        for one in [*self._queue]:
            self._end(one, KafkaError(KafkaError._PURGE_INFLIGHT if one.asked else KafkaError._PURGE_QUEUE))

    # --- events from outside

    def on_fatal(self) -> None:
        """Let the client fail permanently, as after a gap in the numbers of its records."""
        self._fatal = KafkaError(KafkaError._FATAL, "simulated", fatal=True)
        fatal = self._fatal
        self._reports.append(lambda: self._on_error(fatal))
        self.purge()
        self._wake()

    def drop(self) -> None:
        """Forget all records and reports, because the run is over."""
        self._queue.clear()
        self._reports.clear()

    # --- inside

    def _now(self) -> float:
        return self._broker.world.now

    def _wake(self) -> None:
        if self._thread is not None:
            self._thread.wake()

    def _waits(self) -> bool:
        return bool(self._queue) and not self._queue[0].asked

    def _send(self) -> None:
        now = self._now()
        for one in [*self._queue]:
            if one.expires <= now:
                self._end(one, KafkaError(KafkaError._MSG_TIMED_OUT, "Local: Message timed out"))
        if not self._waits() or self._queue[0].due > now:
            return
        one = self._queue[0]
        one.asked = True

        def act() -> int:
            return self._broker.store_letter(self, one.topic, one.number, one.letter)

        def answered(offset: int | None, error: KafkaError | None) -> None:
            one.asked, one.due = False, self._now() + RETRY
            if error is None and offset is not None:
                self._end(one, None, offset)
            elif error is not None and not error.retriable() and error.code() != KafkaError._TIMED_OUT:
                self._end(one, error)
            self._wake()

        self._connection().send("letter", act, answered, SOCKET_TIMEOUT)

    def _connection(self) -> Link:
        # The consumer of the process may have a new client, which then shows whether the process reaches the broker.
        client = self._broker.client_of(self.member)
        if self._link is None or self._link[0] is not client:
            self._link = client, Link(self._broker, client)
        return self._link[1]

    def _end(self, one: _Queued, error: KafkaError | None, offset: int = -1001) -> None:
        if not one.over:
            one.over = True
            self._queue.remove(one)
            message = Message(topic=one.topic, partition=0, offset=offset, error=error)
            self._reports.append(lambda: one.on_delivery(error, message))


class SimulatedWriter(KafkaDeadLetters):
    """The real writer of the dead letters of one member, whose confirmations the simulated broker judges.

    Args:
        broker: The broker.
        member: Name of the member.
        config: Configuration of the writer.
    """

    def __init__(self, broker: SimulatedKafka, member: str, config: dict[str, Any]) -> None:
        super().__init__(config, LETTERS)
        self._broker = broker
        self._member = member

    def end(self) -> None:
        """End the thread of the writer.

        The writer catches the exception that ends other threads at their pause. Idempotent.
        """
        thread: Any = self._producer._thread
        producer: Any = self._producer._producer
        if producer is not None:
            producer.drop()
        if thread is not None:
            self._producer._jobs.put(None)
            thread.end()

    async def put(self, dead_letter: DeadLetter) -> None:
        await super().put(dead_letter)
        self._broker.confirmed(self._member, dead_letter)
