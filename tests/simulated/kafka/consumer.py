"""A ``confluent_kafka.Consumer`` over a broker as data: the calls that ``lanes_kafka`` makes, with their callbacks.

The calls run in a stepped thread. A call that waits for the broker pauses the thread. Callbacks run inside ``consume``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from lanes.core.types import PartitionId
from lanes.source import Lost, SourceEvent
from lanes_kafka.client.group import OF_POLL_INTERVAL, Assignment, Group
from memsource.adapters.choices import Phase
from memsource.adapters.threads import SteppedThread, pause, stepped
from memsource.kafka.client import Callback, Client, ClientPartition, Commit, KafkaFailure
from memsource.memory.topic import Record
from tests.simulated.kafka.link import Link, error_of

if TYPE_CHECKING:
    from tests.simulated.kafka.broker import SimulatedKafka

SOCKET_TIMEOUT: Final = 60.0
"""Seconds after which the client gives up a request, the default of ``socket.timeout.ms``."""

_BEFORE: Final = 0.1
"""Probability that other tasks take steps before a call for one message."""

_BETWEEN: Final = 0.5
"""Probability that other tasks take steps before a call for several messages, which follows a call for one."""

_QUIET_STEPS: Final = 10
"""Of this number of calls of ``consume`` without any news, one is a boundary, so that faults do not gather there."""

LONGEST_REVOKE: Final = 36.0
"""Seconds that the longest drain of a consumer takes, with commits that the broker does not answer."""

_ALL: Final = 1 << 62


class SimulatedConsumer:
    """One client of a member.

    Args:
        broker: The broker.
        client: The client as data.
        settings: The final dictionary of the client.
    """

    def __init__(self, broker: SimulatedKafka, client: Client, settings: dict[str, Any]) -> None:
        self.client = client
        self._broker = broker
        self._link = Link(broker, client, own=True)
        self._settings = settings
        self._on_commit: Callable[..., object] = settings["on_commit"]
        self._on_error: Callable[[KafkaError], object] = settings["error_cb"]
        self._ops: deque[Callable[[], object]] = deque()
        self._errors: deque[Message] = deque()
        self._thread: SteppedThread | None = None
        # The partitions that the application has assigned, each with its first position.
        self._assigned: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        # The partitions whose position the log does not contain, of which ``consume`` has returned an error.
        self._strays: set[int] = set()
        # The partitions of which ``consume`` has returned that reading is refused.
        self._refused: set[int] = set()
        # The positions before the running call, of partitions with messages that it will return.
        self._dequeued: dict[int, int] = {}
        # The last committed position of each partition, with the assignment in the adapter's view.
        self._highest: dict[int, tuple[Assignment | None, int]] = {}
        self._turn = 0
        self._quiet = 0
        self._unanswered = 0
        self._callbacks: dict[str, Callable[..., object]] = {}
        self._callback = ""
        self._unbounded = 0.0  # seconds of the present callback in synchronous commits
        self._leaving = self._closed = self._gives_up = False
        # The time at which each partition has delivered its messages, by position, since its last assignment.
        self._delivered: dict[int, list[tuple[int, float]]] = {}
        client.rejoining = True

    def __repr__(self) -> str:
        return f"<SimulatedConsumer {self.client.name}>"

    @property
    def phase(self) -> Phase:
        """The present activity of the member."""
        if self._leaving:
            return "close"
        if self._callback:
            return "takeover" if self._callback == "assign" else "drain"
        if not self.client.id:
            return "open"
        return "commit" if self._unanswered else "steady"

    # --- the group

    def subscribe(self, topics: list[str], *, on_assign: Any, on_revoke: Any, on_lost: Any) -> None:
        """Join the group at the next ``consume``."""
        self._callbacks = {"assign": on_assign, "revoke": on_revoke, "lost": on_lost}
        self._broker.watch(self._wake)

    def unsubscribe(self) -> None:
        """Leave the group after a last callback, which the next ``consume`` serves. A static member leaves too."""
        if not self._leaving and self.client.instance is not None and self._adapter is not None:
            what = f"{self.client.name} gives up its static membership, so the group moves its partitions"
            self._broker.world.find("StaticStays", what)
        self._gives_up = True
        self._end()

    def _end(self) -> None:
        if self._leaving:
            return
        self._leaving = True
        self._broker.begin_close(self.client, self._now())
        self._ops.append(self._leave)

    def close(self) -> None:
        """Leave the group."""
        if self._closed:
            return
        pause()
        # A static member keeps its partitions until its session ends.
        self._end()
        while self._ops:
            self._ops.popleft()()
        self._closed = True
        self._broker.unwatch(self._wake)

    def memberid(self) -> str:
        return "" if self.client.rejoining else self.client.id

    def assignment(self) -> list[TopicPartition]:
        return [self._place(number) for number in self._assigned]

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        self._assigned.clear()
        self._ends.clear()
        self.incremental_assign(partitions)

    def incremental_assign(self, partitions: Sequence[TopicPartition]) -> None:
        for each in partitions:
            number, offset = each.partition, each.offset
            owned = self.client.partitions.get(number)
            if owned is None:
                owned = self.client.partitions[number] = ClientPartition()
            if offset >= 0:
                owned.position = owned.fetched = offset
            owned.queue.clear()
            owned.silent = False
            self._strays.discard(number)
            self._assigned[number] = owned.position
            self._delivered[number] = []

    def incremental_unassign(self, partitions: Sequence[TopicPartition]) -> None:
        for each in partitions:
            self._assigned.pop(each.partition, None)
            self._ends.pop(each.partition, None)

    # --- reading

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        """Serve callbacks, and return at most this number of messages, possibly fewer than available."""
        thread = self._thread = stepped()
        assert thread is not None, "only the thread of the adapter reads"
        self._check_read()
        if self._quiet % _QUIET_STEPS == 0:
            self._broker.world.step(self.client.name, "consume", self.phase)
            thread.pause()
        elif self._broker.rng.random() < (_BETWEEN if num_messages > 1 else _BEFORE):
            # The loop of the process may take steps meanwhile.
            thread.pause()
        self._quiet += 1
        until = self._now() + timeout
        self._broker.polling(self.client, self._now(), on=True)
        try:
            while True:
                messages = self._serve(num_messages)
                if messages or self._now() >= until:
                    return messages
                thread.pause(until)
                if self._now() < until:
                    # A command or a change: the next call is due soon, as after the short wait of the real adapter.
                    return self._serve(num_messages)
        finally:
            self._broker.polling(self.client, self._now(), on=False)
            if self._quiet > 1 and (self._ops or self._unanswered):
                self._quiet = 0

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        for each in partitions:
            self.client.pause(each.partition)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        for each in partitions:
            self.client.resume(each.partition)

    def seek(self, partition: TopicPartition) -> None:
        pause()
        owned = self.client.partitions.get(partition.partition)
        if owned is None or partition.partition not in self._assigned:
            raise KafkaException(KafkaError(KafkaError._STATE, "Local: Erroneous state"))
        owned.queue.clear()
        owned.position = owned.fetched = self._assigned[partition.partition] = partition.offset

    def position(self, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        found = []
        for each in partitions:
            owned = self.client.partitions.get(each.partition)
            begun = self._assigned.get(each.partition)
            # In a callback, the client does not count the messages that the running call will return.
            at = 0 if owned is None else self._dequeued.get(each.partition, owned.position)
            known = begun is not None and at > begun
            found.append(self._place(each.partition, at if known else OFFSET_INVALID))
        return found

    def get_watermark_offsets(self, partition: TopicPartition, *, cached: bool) -> tuple[int, int]:
        assert cached, "the adapter asks another client for the ends of logs"
        return OFFSET_INVALID, self._ends.get(partition.partition, OFFSET_INVALID)

    # --- questions

    def committed(self, partitions: Sequence[TopicPartition], timeout: float = SOCKET_TIMEOUT) -> list[TopicPartition]:
        numbers = [each.partition for each in partitions]

        def act() -> list[TopicPartition]:
            # A real client reports the refusal of a topic for each partition, and does not raise it.
            self._broker.check_allowed(self.client.name, "GROUP_AUTHORIZATION_FAILED", "TOPIC_AUTHORIZATION_FAILED")
            found = []
            for number in numbers:
                commit = self._broker.committed(number)
                found.append(
                    self._place(number, OFFSET_INVALID)
                    if commit is None
                    else TopicPartition(self._broker.topic, number, commit.offset, commit.metadata)
                )
            return found

        found = self._link.call("committed", act, timeout)
        if self._callback == "revoke":
            # The release of the partition follows, perhaps with the commit of a gap.
            self._broker.events.on_drain(self.client)
        return found

    def offsets_for_times(
        self, partitions: Sequence[TopicPartition], timeout: float = SOCKET_TIMEOUT
    ) -> list[TopicPartition]:
        asked = [(each.partition, each.offset) for each in partitions]

        def act() -> list[TopicPartition]:
            if self._now() < self._broker.events.leaderless_until:
                raise KafkaFailure("LEADER_NOT_AVAILABLE", "simulated")
            self._broker.check_allowed(self.client.name, "TOPIC_AUTHORIZATION_FAILED")
            return [self._place(number, self._broker.bound(number, time == OFFSET_END)) for number, time in asked]

        assert all(time in (OFFSET_BEGINNING, OFFSET_END) for _, time in asked)
        return self._link.call("offsets", act, timeout)

    def list_topics(self, timeout: float = SOCKET_TIMEOUT) -> None:
        self._link.call("metadata", lambda: None, timeout)

    # --- commits

    def commit(self, *, offsets: Sequence[TopicPartition], asynchronous: bool) -> list[TopicPartition] | None:
        """Commit positions; without ``asynchronous`` wait for the reply."""
        sent = [(each.partition, Commit(each.offset, each.metadata or "")) for each in offsets]
        topic = self._broker.topic
        copies = [TopicPartition(topic, number, each.offset, each.metadata) for number, each in sent]
        assignments = {one.number: assignment for one, assignment in (self._adapter or {}).items()}
        owned = {number for number, _ in sent if self._broker.owner(number) == self.client.name}
        known = self._broker.coordinator.knows(self.client)

        def act() -> None:
            broker = self._broker
            if not known and broker.coordinator.knows(self.client):
                # The request names the member that the group had removed, and the client has joined again meanwhile.
                raise KafkaFailure("UNKNOWN_MEMBER_ID", "the group has removed this member")
            gone = any(number in owned and broker.owner(number) != self.client.name for number, _ in sent)
            if gone and broker.coordinator.knows(self.client):
                # The request names the generation in which it was sent.
                raise KafkaFailure("ILLEGAL_GENERATION", "the group has rebalanced meanwhile")
            broker.commit(self.client, dict(sent), self._now())
            for number, each in sent:
                self._check_rises(assignments.get(number), number, each.offset)
                broker.on_committed(assignments.get(number))

        phase: Phase = "drain" if self._callback == "revoke" else "commit"
        if asynchronous:
            # The only commits that wait are those of start positions, also of partitions of other members, and those
            # that the broker has refused.
            self._check_owned([number for number, _ in sent])
        for number, each in sent:
            self._check_asked(assignments.get(number), number, each.offset)
        if not asynchronous:
            begun = self._now()
            try:
                self._link.call("commit", act, SOCKET_TIMEOUT, phase)
            finally:
                self._unbounded += self._now() - begun
            return copies
        self._unanswered += 1

        def answered(_: object, error: KafkaError | None) -> None:
            self._unanswered -= 1
            self._ops.append(lambda: self._on_commit(error, copies))
            self._wake()

        fate = None if self._callback else self._broker.events.commit_fate(self.client)
        self._link.send("commit", act, answered, SOCKET_TIMEOUT, phase, fate)
        return None

    # --- events from outside

    @property
    def running(self) -> bool:
        """Whether the client has joined, and neither failed nor left."""
        return bool(self.client.id) and self.client.fatal is None and not self._leaving and not self.client.crashed

    def on_error(self, code: int) -> None:
        """Return an error among the messages of a later ``consume``."""
        error = KafkaError(code, "simulated")
        self._errors.append(Message(error=error, topic=self._broker.topic, partition=0, offset=0))
        self._wake()

    def on_fatal(self) -> None:
        """Let the client fail permanently, as after another member took its ``group.instance.id``."""
        self.client.fail(KafkaFailure("_FATAL", "simulated"))
        self._wake()

    def on_broken_connection(self) -> None:
        """Report at the next ``consume`` that no broker is reachable."""
        error = KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down")
        self._ops.append(lambda: self._on_error(error))
        self._wake()

    # --- inside

    def _now(self) -> float:
        return self._broker.world.now

    def _wake(self) -> None:
        self._quiet = 0
        if self._thread is not None:
            self._thread.wake()

    def _place(self, number: int, offset: int = OFFSET_INVALID) -> TopicPartition:
        return TopicPartition(self._broker.topic, number, offset)

    def _serve(self, most: int) -> list[Message]:
        rng, found = self._broker.rng, list[Message]()
        if rng.random() < 0.3:
            # The client may dequeue messages before a callback that the same call serves, or the next call.
            before = {number: owned.position for number, owned in self.client.partitions.items()}
            found += self._fetch(rng.randint(1, most))
            if len(found) == most:
                return found
            taken = {message.partition() for message in found}
            self._dequeued = {number: at for number, at in before.items() if number in taken}
        try:
            while self._ops:
                self._ops.popleft()()
            while self._errors and len(found) < most:
                found.append(self._errors.popleft())
            while not self._leaving and (events := self._broker.poll(self.client, self._now())):
                for event in events:
                    if isinstance(event, Callback):
                        self._call(event)
                    else:
                        found.append(Message(error=error_of(event), topic=self._broker.topic, partition=0, offset=0))
        finally:
            self._dequeued = {}
        return found + self._fetch(most - len(found))

    def _call(self, callback: Callback) -> None:
        lost = {notice.partition for notice in self.client.notices if notice.kind == "lost"}
        if callback.kind == "revoke" and lost.intersection(callback.partitions):
            # The group has given up waiting. The client hears of the loss, and does not release the partition, which it
            # may own again.
            for number in lost.intersection(callback.partitions):
                self.client.partitions.pop(number, None)
            self._call(Callback("lost", tuple(number for number in callback.partitions if number in lost)))
            callback = Callback("revoke", tuple(number for number in callback.partitions if number not in lost))
            if not callback.partitions:
                return
        places = [self._place(number) for number in callback.partitions]
        if callback.kind == "revoke":
            self._broker.events.on_drain(self.client)
        elif callback.kind == "assign":
            self._broker.events.on_assign(self.client)
        before = set(self._assigned)
        begun, self._unbounded = self._now(), 0.0
        self._callback = callback.kind
        try:
            with self._judged_losses():
                self._callbacks[callback.kind](self, places)
        finally:
            self._callback = ""
        limit = self._broker.settings.max_poll_interval
        if callback.kind == "revoke":
            # The adapter's own limit, and what an answer may be late; or the longest drain and its last commits.
            # A synchronous commit has only the deadline of the client, and follows an answer of the broker.
            limit = min(0.8 * limit + 0.5, LONGEST_REVOKE) + self._unbounded
        took = self._now() - begun
        if took >= limit and self.client.name not in self._broker.frozen:
            self._broker.world.find(
                "RevokesEnd", f"a callback of {self.client.name} took {took:g} s, and {limit:g} s are allowed"
            )
        if callback.kind == "assign":
            if not before.symmetric_difference(self._assigned) and places:
                # A callback that assigns nothing leaves that to the client.
                self.incremental_assign(places)
        else:
            self.incremental_unassign(places)
            for number in callback.partitions:
                self._broker.release(self.client, number, self._now())
        self._learn()

    @contextmanager
    def _judged_losses(self) -> Iterator[None]:
        """Judge that a revoke gives up no unreleased partition before its time."""
        group = getattr(self._callbacks.get("revoke"), "__self__", None)
        if self._callback != "revoke" or not isinstance(group, Group):
            yield
            return
        deliver, until = group.deliver, self._now() + OF_POLL_INTERVAL * group.config.max_poll_interval

        def judged(events: Sequence[SourceEvent]) -> None:
            for event in events:
                if (
                    isinstance(event, Lost)
                    and event.reason.startswith("it was not released")
                    and self._now() < until
                    and not group.closing
                ):
                    what = f"{self.client.name} gives up {event.partition.id} {until - self._now():g} s too early"
                    self._broker.world.find("RevokesWait", what)
            deliver(events)

        group.deliver = judged
        try:
            yield
        finally:
            group.deliver = deliver

    def _leave(self) -> None:
        """Give up all partitions, and leave the group."""
        places = self.assignment()
        if places:
            self._callback = "revoke"
            try:
                self._callbacks["revoke"](self, places)
            finally:
                self._callback = ""
            self._assigned.clear()
        if self._gives_up:
            self.client.instance = None
        if self.client.isolated_since is None and self._broker.up:
            self._broker.end_close(self.client, self._now())

    @property
    def assignments(self) -> list[Assignment]:
        """The assignments in the adapter's view."""
        return list((self._adapter or {}).values())

    @property
    def _adapter(self) -> Mapping[PartitionId, Assignment] | None:
        """The assignments in the adapter's view; None if the callbacks are not those of ``lanes_kafka``."""
        group = getattr(self._callbacks.get("assign"), "__self__", None)
        return group.owned if isinstance(group, Group) else None

    def _check_read(self) -> None:
        """Check that the client reads, or has paused, every partition that the adapter owns and has not released."""
        group = getattr(self._callbacks.get("assign"), "__self__", None)
        if not isinstance(group, Group) or group.closing:
            # The last calls of a client that closes only serve its callbacks.
            return
        owned = [each for each in group.owned.values() if not each.released]
        unread = [str(each.partition.id) for each in owned if each.partition.id.number not in self._assigned]
        if unread:
            self._broker.world.find("OwnedAreRead", f"{self.client.name} owns {unread}, which its client does not read")

    def _check_owned(self, numbers: Sequence[int]) -> None:
        """Check that the adapter owns the partitions that it commits."""
        owned = self._adapter
        if owned is None:
            return
        kept = {one.number for one, assignment in owned.items() if not assignment.released}
        strange = [number for number in numbers if number not in self._assigned or number not in kept]
        if strange:
            self._broker.world.find(
                "OwnersCommit", f"{self.client.name} commits partitions {strange}, which it has given up or lost"
            )

    def _check_rises(self, assignment: Assignment | None, number: int, offset: int) -> None:
        """Check that the positions of one assignment rise."""
        former, highest = self._highest.get(number, (None, 0))
        if assignment is not None and assignment is former and offset < highest:
            self._broker.world.find(
                "PositionsRise", f"{self.client.name} commits {offset} of partition {number} after {highest}"
            )
        self._highest[number] = assignment, offset

    def _check_asked(self, assignment: Assignment | None, number: int, offset: int) -> None:
        """Check that the broker reported the topic's id after the client read the last message of a commit."""
        read = max((at for position, at in self._delivered.get(number, ()) if position < offset), default=None)
        if assignment is None or read is None:
            return
        if not self._broker.was_asked(self.client.name, read, assignment.partition.incarnation):
            self._broker.world.find(
                "CommitsAreChecked",
                f"{self.client.name} commits {offset} of partition {number}, which was read at {read:g} s, and no "
                f"later answer names the topic id {assignment.partition.incarnation}",
            )

    def _learn(self) -> None:
        """Tell the broker as data which assignment of the adapter belongs to each partition of the client."""
        for one, assignment in (self._adapter or {}).items():
            owned = self.client.partitions.get(one.number)
            if owned is not None:
                owned.partition = None if assignment.released else assignment.partition

    def _fetch(self, most: int) -> list[Message]:
        """Return messages of one partition after the other, in the order of the client's queue."""
        broker, found = self._broker, list[Message]()
        numbers = [number for number in self._assigned if number in self.client.partitions]
        self._turn += 1
        for number in numbers[self._turn % len(numbers) :] + numbers[: self._turn % len(numbers)] if numbers else ():
            left = most - len(found)
            if left <= 0:
                break
            if left > 1 and broker.rng.random() < 0.2:
                left = broker.rng.randint(1, left)
            records = broker.fetch(self.client, number, left, _ALL)
            if broker.reachable(self.client, own=True) and number not in self.client.paused:
                self._ends[number] = broker.bound(number, True)
            found += [self._message(record) for record in records]
            self._delivered[number] += [(record.position, self._now()) for record in records]
            owned = self.client.partitions[number]
            if broker.forbidden != "TOPIC_AUTHORIZATION_FAILED":
                self._refused.discard(number)
            elif self._reads(number) and not owned.queue and number not in self._refused and len(found) < most:
                self._refused.add(number)
                broker.on_refused(self.client.name)
                error = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "Fetch failed")
                found.append(Message(error=error, topic=broker.topic, partition=number, offset=owned.fetched))
            if owned.silent and number not in self._strays and len(found) < most:
                self._strays.add(number)
                broker.events.on_stray()
                error = KafkaError(KafkaError._AUTO_OFFSET_RESET, "fetch failed due to requested offset not available")
                found.append(Message(error=error, topic=broker.topic, partition=number, offset=owned.fetched))
        return found

    def _reads(self, number: int) -> bool:
        """Whether the client now sends fetches for a partition."""
        broker, owned = self._broker, self.client.partitions[number]
        return (
            broker.reachable(self.client, own=True)
            and self.client.running
            and number not in self.client.paused
            and not owned.revoking
        )

    def _message(self, record: Record) -> Message:
        return Message(
            topic=self._broker.topic,
            partition=record.partition,
            offset=record.position,
            key=record.key,
            value=record.value,
            headers=list(record.headers) or None,
            timestamp=(0, 0),
        )
