"""The contract between ``lanes`` and a backend.

A source delivers messages, settles messages and releases partitions. The engine, not the source, decides order, retries
and bounds. The engine and the runtime use a backend only through values and Protocols.
This file is longer than most, because it contains most of these values and Protocols.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, runtime_checkable

from lanes.clock import Clock, monotonic
from lanes.core.types import Message, Part, Partition, Room, Settlement, SettlementError
from lanes.dead_letter import DeadLetter
from lanes.queues.partitioned import PartitionedQueue
from lanes.queues.stranded import Stranded

__all__ = [
    "CONTRACT_VERSION",
    "Addressed",
    "Assigned",
    "Backlog",
    "Backlogged",
    "BrokerContact",
    "Checkpointing",
    "Confirming",
    "Connected",
    "DeadLetters",
    "Declaring",
    "Delivered",
    "Destination",
    "Dividing",
    "Exhausted",
    "Generation",
    "Keeping",
    "KeptLog",
    "Lagging",
    "Lost",
    "Outage",
    "Progressed",
    "Ranged",
    "Reading",
    "Rejoining",
    "Reporting",
    "Retaining",
    "Retention",
    "Revoking",
    "RevokingPart",
    "SettlementError",
    "Source",
    "SourceEvent",
    "SourceTraits",
    "Stranded",
    "Stranding",
]

CONTRACT_VERSION: Final = 1
"""The version of the contract that this file states.

The version rises when a source that kept the former contract may break the new contract: by a new duty, a new meaning,
a further method, or a further check of ``memsource.contract``. An addition that is optional, or has a default, leaves
the version unchanged.
"""


@dataclass(frozen=True, kw_only=True)
class SourceTraits:
    """The properties of an open source.

    Attributes:
        name: Name of the source in logs and errors.
        system: Name of the broker's kind in OpenTelemetry, such as ``kafka``.
        settles: ``"individual"`` = one acknowledgement for each message. ``"cumulative"`` = one committed position for
            each partition, which settles every message below it. A partition of such a source has a ``floor``.
        hands_over: Whether a commit also stores, for the next owner, which messages above the floor are completed.
        extend_interval: Seconds after which the runtime must call ``extend``, so that the broker does not redeliver an
            unsettled message. ``None`` = the broker has no such timer.
        max_in_flight: Number of unsettled messages that the broker allows. ``None`` = any number.
        remembers: Whether the source, within one assignment, never redelivers a position after its ``settle``. If True,
            the engine does not track settled positions. True requires ``settles="individual"``.
        revoke_limit: Seconds after which the broker removes a revoked partition without a release, at least
            ``Settings.longest_drain``. ``None`` = the broker waits for the release.
        revoke_limit_from: Setting of the broker or client that determines ``revoke_limit``; errors name the setting.
            Empty = no setting is known.
        partitions: Number of partitions, including the partitions of other processes. ``None`` = unknown.
        plans: Whether the source sends a ``Generation`` for each plan of the group. The source sends the first of these
            events when the source knows its assignment.
        ordered: False if several processes receive from one consumer of the broker at once, so no order is possible.
        exclusive: False if several processes own one partition at once, each for separate keys.
        consumer_target: Largest number of partitions that this process prefers to own. ``None`` = no preference.
        divides: Whether the source owns pieces of partitions, and may send ``RevokingPart``. If so, the order must be
            ``"key"`` or ``"none"``, and each key must have its own lane.
        queues: Partitioned queues that the source reads. ``Partition.source`` is then the name of a physical queue.
    """

    name: str
    system: str = "other"
    settles: Literal["individual", "cumulative"] = "individual"
    hands_over: bool = True
    extend_interval: float | None = None
    max_in_flight: int | None = None
    remembers: bool = False
    revoke_limit: float | None = None
    revoke_limit_from: str = ""
    partitions: int | None = None
    plans: bool = False
    ordered: bool = True
    exclusive: bool = True
    consumer_target: int | None = None
    divides: bool = False
    queues: tuple[PartitionedQueue, ...] = ()


@dataclass(frozen=True, slots=True)
class Assigned:
    """This process has acquired the partition.

    Attributes:
        partition: The assignment, a new object each time. The ownership ends at its ``deadline`` at the latest. At the
            deadline, the runtime stops starting handlers and settling messages. A source without leases must be
            ``Confirming`` if its broker can assign the partitions of a silent process to another process.
    """

    partition: Partition


@dataclass(frozen=True, slots=True)
class Delivered:
    """A run: consecutive messages of one partition, in the order of the source.

    A message with an unreadable key has no key, and its ``broken`` is the ``MessageError`` with the reason. Only this
    message fails. The runtime does not call the handler, and applies the poison policy to the message. The runtime
    raises ``ContractError`` for any other exception in ``broken``.

    Attributes:
        partition: The assignment that the messages belong to.
        run: The messages.
        size: Sum of the sizes of the messages, in bytes.
    """

    partition: Partition
    run: list[Message]
    size: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """The source has read up to ``position``, and has delivered every message below ``position``.

    Only a source that commits sends this event. After the event, the committed position can move past markers at the
    end of a log.

    Attributes:
        partition: The assignment that was read.
        position: The position that the source reads next.
    """

    partition: Partition
    position: int


@dataclass(frozen=True, slots=True)
class Revoking:
    """The process must release the partition: the runtime waits for running handlers, and then calls ``release``.

    Attributes:
        partition: The assignment to release.
        timeout: Maximum number of seconds for running handlers, at most ``Settings.drain_timeout``. The cancellation of
            handlers, the last settlement and ``release`` follow after this time, within ``Settings.longest_drain``.
            ``SourceTraits.revoke_limit`` states the broker's limit on the whole drain. Infinity = the next owner waits
            for the release, so the runtime never cancels the handlers.
    """

    partition: Partition
    timeout: float


@dataclass(frozen=True, slots=True)
class RevokingPart:
    """The process must hand over a part of the partition, and keeps the other messages.

    The runtime abandons the waiting messages of the part, and waits for the running handlers of the part. After the
    part's last handler, the runtime settles the partition and calls ``Dividing.hand_over``. The source delivers no
    further message of the part.

    Attributes:
        partition: The assignment, which keeps its other messages.
        part: Function that returns whether a message belongs to the part. A part contains either all messages of a key
            or no message of the key.
    """

    partition: Partition
    part: Part


@dataclass(frozen=True, slots=True)
class Lost:
    """This process no longer owns the partition.

    The runtime neither settles its messages nor releases the partition.

    Attributes:
        partition: The assignment that was lost.
        reason: Text for the log and for ``GroupEvent.reason``.
    """

    partition: Partition
    reason: str


@dataclass(frozen=True, slots=True)
class Generation:
    """The group has a new plan, or another fact about its plan has changed.

    Attributes:
        number: Number of the plan.
        standby: Whether this process owns no partition under the plan.
        under_provisioned: Whether a process of the group owns more partitions than its target under the plan.
        target_honoured: Whether the rules of the plan use the targets of the processes.
    """

    number: int
    standby: bool
    under_provisioned: bool = False
    target_honoured: bool = False


@dataclass(frozen=True, slots=True)
class Exhausted:
    """A finite source has delivered every message. No event follows; a further ``receive`` waits."""


SourceEvent = Assigned | Delivered | Progressed | Revoking | RevokingPart | Lost | Generation | Exhausted
"""The events that ``Source.receive`` returns."""


class Source(Protocol):
    """The access to a broker or store.

    The runtime makes all calls on one event loop, and calls ``receive`` concurrently with the other methods. The first
    call is ``open``, unless the open of the dead-letter target fails. The last call is ``aclose``, even if ``open``
    failed or was never called. No method may block the event loop; a blocking call belongs in a thread. An anyio cancel
    scope may cancel any call.
    """

    async def open(self) -> SourceTraits:
        """Connect, and check every setting that depends on the broker.

        The runtime makes this call once, before the first message.

        Returns:
            Properties of the source.

        Raises:
            ConfigError: A setting contradicts the broker; the text names setting, value and remedy.
            SourceError: The broker does not answer, or refuses the login or a request.
        """

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Wait for the next events. Cancel-safe: a cancelled call loses no event.

        With room for messages and bytes, the call returns when a message is available. Without room for messages or for
        bytes, the call returns only events of ownership. If the source settles each message individually, it may
        deliver a message for the first time after later positions of the partition. While the connection is lost, the
        call waits for a new connection, because any exception stops the consumer after a drain.

        Args:
            room: Bounds of this call. The call returns at most ``room.messages`` new messages. Only the batch that
                crosses ``room.bytes``, or a single message, may exceed ``room.bytes``. Partitions in ``room.paused``
                deliver no message. A client that prefetches must pause exactly these partitions, even immediately after
                an assignment.

        Returns:
            Events in the order of the source.

        Raises:
            SourceError: The source cannot restore the connection.
        """

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Tell the broker that these messages are finished. Idempotent.

        Before the call returns, the source has sent every settlement to the broker. If the source commits, the broker
        has also confirmed each ``floor``, and each ``completed`` set that the source hands over.

        If the source commits, the runtime cancels the call when a partition of the settlements is lost, or is released
        before the commit is confirmed. After the cancellation the source must not send a commit of the call, because
        that commit could replace a commit of the next owner. An event loop cannot cancel a call whose wait has just
        ended. After a wait, a source must therefore check whether it has reported the partition lost.

        Args:
            settlements: At most one settlement for each partition. The runtime passes the next settlement of a
                partition only after this call has ended. Concurrent calls may pass settlements of different partitions.

        Raises:
            SourceError: With ``retryable=True``, the broker may lack a settlement. The caller repeats it, or passes a
                later settlement of the partition. With ``retryable=False``, the consumer stops after a drain.
            SettlementError: Only the settlements of the error's partitions have failed.
        """

    async def extend(self, messages: Sequence[Message]) -> None:
        """Restart the broker's timers of these unsettled messages, so that the broker does not redeliver them.

        The call is idempotent. The call may have no effect while the source is disconnected.

        The runtime calls ``extend`` only if ``SourceTraits.extend_interval`` is set. The source skips messages that the
        broker has already delivered to another process. ``extend`` must not raise an exception for a transient failure,
        because any exception stops the consumer after a drain.

        Args:
            messages: The messages whose timers the source restarts.
        """

    async def release(self, partition: Partition) -> None:
        """Release a drained partition. Before the call returns, all earlier settlements have reached the broker.

        The call is idempotent, even while another call for the same partition runs, because the source may revoke a
        partition during the release. The broker may deliver the unsettled messages to the next owner at once. A handler
        that did not end within ``drain_timeout`` and ``grace`` may still run. Any exception but ``SourceError`` stops
        the consumer after a drain.

        Args:
            partition: The assignment to release.

        Raises:
            SourceError: The release failed. The runtime logs the error, and the run continues without the partition.
        """

    async def aclose(self) -> None:
        """Close everything that ``open`` opened.

        Idempotent. The user's own connection stays open. A cancelled call releases no partition, so the broker
        redelivers the unsettled messages after its own timeout. The runtime logs an exception of the call.
        """


@runtime_checkable
class Lagging(Protocol):
    """An optional interface of a source that can report its lag."""

    def lag(self, partition: Partition) -> int | None:
        """Return the lag of a partition.

        Any thread may call the method. The call does no I/O and raises no exception.

        Args:
            partition: An assignment of this source.

        Returns:
            The last known lag, in messages, or in positions if the source commits positions. The tools of the broker
            show the lag in the same unit. ``None`` = unknown.
        """


class Backlog(NamedTuple):
    """The messages of a partition that wait for their delivery, and the last error of the client.

    Attributes:
        messages: Number of messages at the broker that the source has not delivered to this assignment, or of positions
            if the source commits positions. ``None`` = unknown.
        error: Text of the last error that the client reported, without secrets; "" = no error.
        age: Seconds since that error. ``None`` = unknown.
        cause: Reason why the broker currently delivers no message, such as a reached limit; "" = unknown. The health
            shows a known cause instead of the error.
    """

    messages: int | None
    error: str = ""
    age: float | None = None
    cause: str = ""


@runtime_checkable
class Backlogged(Protocol):
    """An optional interface of a source that knows the number of messages that wait at the broker for delivery.

    If such messages exist and the bounds leave room, but the source delivers none for ``Settings.unhealthy_after``, the
    consumer is unhealthy.
    """

    def backlog(self, partition: Partition) -> Backlog:
        """Return the backlog of a partition. The call does no I/O, and raises no exception.

        Messages that the broker must not deliver yet are not included, for example while an operator pauses the
        broker's consumer. The runtime calls the method once a second, or more often if ``Settings.unhealthy_after`` is
        below 4 s. The shortest interval is 0.75 s.

        Args:
            partition: An assignment of this source.

        Returns:
            The last known backlog, at most 3 s old.
        """


class Outage(NamedTuple):
    """An outage: no broker has answered the last requests of a source.

    Attributes:
        seconds: Seconds since the last answer.
        error: Text of the last error, without secrets; "" = no error is known.
    """

    seconds: float
    error: str = ""


@runtime_checkable
class Connected(Protocol):
    """An optional interface of a source that detects when no broker answers, even while no message waits.

    An outage of 30 s, or of a shorter ``Settings.unhealthy_after``, makes the consumer unhealthy.
    """

    def outage(self) -> Outage | None:
        """Return the current outage.

        Any thread may call the method. The call does no I/O and raises no exception.

        The source sends its broker a request at least every 10 s. Neither a single request without an answer nor the
        end of an idle connection is an outage.

        Returns:
            The outage. ``None`` = a broker answers.
        """


@runtime_checkable
class Rejoining(Protocol):
    """An optional interface of a source whose group may take long to answer a new member, or a member after an outage.

    A consumer becomes ready only after the first answer since its start. An answer may assign no partition.
    """

    def rejoining(self) -> bool:
        """Return whether the source waits for its group's first answer after the start, or after an outage.

        Any thread may call the method. The call does no I/O and raises no exception.

        Returns:
            Whether the source waits for its group, at its start or after it lost partitions in an outage. After the
            start, the result is False during the outage.
        """


@runtime_checkable
class Stranding(Protocol):
    """An optional interface of a source of partitioned queues that finds messages which no consumer of its group reads.

    Producers write such messages if they use another number of partitions than the consumers.
    """

    def stranded(self) -> Sequence[Stranded]:
        """Return the physical queues with such messages.

        Any thread may call the method. The call does no I/O and raises no exception.

        Returns:
            The physical queues at the last check, which is at most 10 s old. Empty = no such physical queue is known.
        """


@runtime_checkable
class Reporting(Protocol):
    """An optional interface of a source that reports findings that need an operator instead of a restart."""

    def findings(self) -> Sequence[str]:
        """Return the findings for ``Health.findings``.

        Any thread may call the method. The call does no I/O.

        Returns:
            A text for each finding, with the remedy and without secrets.
        """


class KeptLog(NamedTuple):
    """The messages that a log keeps, because its slowest subscription has not finished them.

    Attributes:
        log: Name of the log.
        subscription: Name of the slowest subscription, which has the most unfinished messages.
        messages: Number of messages that this subscription has not finished.
        bytes: Estimated size of these messages at the broker.
        limit: Size in bytes above which the source raises an alarm.
    """

    log: str
    subscription: str
    messages: int
    bytes: int
    limit: int


@runtime_checkable
class Keeping(Protocol):
    """An optional interface of a source whose broker keeps messages until every subscription has finished them."""

    def kept_log(self) -> KeptLog | None:
        """Return the messages that the log keeps for its slowest subscription, this source's or another.

        Any thread may call the method. The call does no I/O and raises no exception.

        Returns:
            The result of the last check, at most 15 s old while the broker answers. ``None`` = unknown.
        """


@runtime_checkable
class Ranged(Protocol):
    """An optional interface of a source whose processes own ranges of keys, so that some keys may have no owner."""

    def unowned(self) -> int | None:
        """Return the number of messages that wait for an owner of their keys.

        While a key has no owner, no process handles its messages.

        Any thread may call the method. The call does no I/O and raises no exception.

        Returns:
            The result of the last count. A source may stop counting at a bound, so the number may be higher. ``None`` =
            unknown, or the source has no ranges.
        """


class BrokerContact:
    """Answers and failures of the requests of a source, from which ``Connected.outage`` follows. No method blocks.

    After a freeze of the process, earlier requests may fail although the broker answers. An outage therefore requires
    two failed requests, the second of which was sent after the failure of the first. One thread reports all answers and
    failures.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._answered_at = clock()
        self._doubted_at: float | None = None
        # The tuple is replaced and never changed, because another thread may be reading it.
        self._outage: tuple[float, str] | None = None

    def answered(self) -> None:
        """Record that a broker has answered, perhaps with an error."""
        self._answered_at, self._doubted_at, self._outage = self._clock(), None, None

    def unanswered(self, sent_at: float, error: str) -> None:
        """Record that no broker has answered a request in time.

        Args:
            sent_at: Time at which the client sent the request. The object ignores requests from before the last answer.
            error: Text of the failure, without secrets.
        """
        if sent_at < self._answered_at:
            return
        if self._doubted_at is None:
            self._doubted_at = self._clock()
        elif sent_at >= self._doubted_at:
            self._outage = self._answered_at, error

    def outage(self, error: str = "", age: float | None = None) -> Outage | None:
        """Return the current outage. Any thread may call this method.

        Args:
            error: Text of the last error of the client, without secrets; "" = no error.
            age: Seconds since that error; None = unknown. The method ignores an error from before the outage.

        Returns:
            The outage; None = a broker answers. Without an error of the client, the outage has the error text of the
            last failed request.
        """
        if (outage := self._outage) is None:
            return None
        since, text = outage
        seconds = self._clock() - since
        return Outage(seconds, error if error and age is not None and age <= seconds else text)


class Retention(NamedTuple):
    """The time until the broker may delete a message by one rule.

    Attributes:
        left: Minimum number of seconds until the broker may delete the message. 0 = the broker may have deleted it.
        span: Seconds for which the broker keeps a message by the same rule, from its write, above 0.
        rule: The rule, such as ``retention.ms=60000``.
    """

    left: float
    span: float
    rule: str


@runtime_checkable
class Retaining(Protocol):
    """An optional interface of a source that knows when its broker deletes finished and unfinished messages.

    The consumer raises an alarm before the broker deletes an unfinished message; see ``Status.partitions``.
    """

    def retention(self, message: Message) -> Retention | None:
        """Return the time until the broker may delete a message.

        The call does no I/O and raises no exception.

        The runtime calls the method once a second for at most one message of each partition. This message has the
        lowest position of all messages that have been unfinished for a second. After the call, the source may query the
        broker to prepare the next answer.

        Args:
            message: An unfinished message of this source.

        Returns:
            The retention that has the smallest part of its span left. ``None`` = no rule applies, or the source does
            not know the rules yet.
        """


@runtime_checkable
class Declaring(Protocol):
    """An optional interface of a source that knows some of its traits before ``open``.

    The constructor of a consumer then refuses settings that contradict these traits, before any connection. ``open``
    returns the complete traits, which the consumer checks too.
    """

    def declared(self) -> SourceTraits:
        """Return the traits that the arguments of the source decide, and defaults for traits that the broker decides.

        The call does no I/O.

        Returns:
            The traits.
        """


@runtime_checkable
class Checkpointing(Protocol):
    """An optional interface of a source that itself stores which messages above the settled position are finished.

    After a crash, the finished messages that the source has not stored run again.
    """

    def checkpoint_within(self, seconds: float) -> None:
        """Set the time within which the source stores a finished message. The call does not block.

        The consumer calls the method at most once, before ``open``. While writes are few, the source stores it sooner.

        Args:
            seconds: ``Settings.commit_interval``, 0 or more.
        """


@runtime_checkable
class Confirming(Protocol):
    """An optional interface of a source whose broker assigns the partitions of a silent process to other processes.

    A process is silent while none of its threads runs, for example after SIGSTOP. After a freeze of more than
    ``freeze_limit`` seconds, the runtime starts handlers and writes dead letters only when every partition is confirmed
    or reported lost. The runtime does not read the clock for each message. Above 5,000 handler starts per second, up to
    15 handlers may start before the runtime detects the freeze.
    """

    def freeze_limit(self) -> float:
        """Return the seconds of silence after which the broker may reassign partitions.

        The runtime calls the method after ``open``, from any thread. The call does no I/O.

        Returns:
            The seconds. The runtime treats a value below 1 as 1. Infinity = the broker reassigns no partition. If the
            first call after ``open`` returns infinity, the runtime never checks for a freeze.
        """

    async def confirm(self, partitions: Sequence[Partition]) -> Sequence[Partition]:
        """Ask the broker whether this process still owns the partitions.

        The source must send the request after the start of this call.

        Cancel-safe.

        While the broker does not answer, the call waits. The runtime calls ``receive`` concurrently. The runtime
        repeats ``confirm`` for partitions that are neither confirmed nor reported lost.

        Args:
            partitions: Assignments of this source, perhaps none.

        Returns:
            The confirmed partitions. ``receive`` reports each other partition as lost, unless it was released.

        Raises:
            SourceError: No later request to the broker can succeed.
        """


@runtime_checkable
class Dividing(Protocol):
    """An optional interface of a source that gives up parts of a partition by ``RevokingPart``.

    A source with this method commits positions.
    """

    async def hand_over(self, partition: Partition, parts: Sequence[Part]) -> None:
        """Allow the next owners of the parts to start at the settled position of the partition.

        Idempotent. Cancel-safe.

        Before this call, ``settle`` has stored a position that is also correct for the parts. Every unfinished message
        of the parts is at or above this position, and is not in the completed set. The runtime repeats the call after a
        retryable error, unless the partition drains or is lost in the meantime. The release of a drained partition also
        hands over its parts.

        Args:
            partition: The assignment, which keeps its other messages.
            parts: The parts, as ``RevokingPart`` named them.

        Raises:
            SourceError: The broker does not answer or refuses the call.
        """


class Destination(NamedTuple):
    """The topic or stream of dead letters.

    Attributes:
        system: Kind of the broker, as in ``SourceTraits.system``.
        name: Name of the topic or stream.
        subject: Subject of the dead letters, where the broker has subjects.
    """

    system: str
    name: str
    subject: str = ""


@runtime_checkable
class Reading(Protocol):
    """An optional interface of a source that reports whether it reads a given topic or stream.

    The consumer calls ``reads`` at most once, after the source and the dead letters are open. The consumer refuses dead
    letters that the source would read again.
    """

    def reads(self, destination: Destination) -> bool:
        """Return whether the source reads messages of ``destination``.

        The call does no I/O.

        Args:
            destination: Topic or stream, possibly of another broker.

        Returns:
            True if the source reads messages of the destination. False if the source reads no such message, or if the
            answer is unknown.
        """


@runtime_checkable
class Addressed(Protocol):
    """An optional interface of ``DeadLetters`` that names its topic or stream."""

    def destination(self) -> Destination:
        """Return the topic or stream of the dead letters.

        The consumer calls the method after ``open``. The call does not block.

        Returns:
            The topic or stream.
        """


class DeadLetters(Protocol):
    """The target of dead letters."""

    async def open(self) -> None:
        """Connect and check that the target exists.

        Raises:
            ConfigError: The target does not exist, or a setting contradicts the broker.
            SourceError: The client cannot reach the target.
        """

    async def put(self, dead_letter: DeadLetter) -> None:
        """Write one dead letter and wait until the broker has confirmed it.

        Idempotent by the ``id`` if the backend can deduplicate. A cancelled call may have written the dead letter.

        Args:
            dead_letter: The dead letter.

        Raises:
            SourceError: With ``retryable=True``, the write is not confirmed, and the caller repeats the write
                until it succeeds. With ``retryable=False``, the consumer stops after a drain.
            LanesError: Any other error of ``lanes``, such as ``ConfigError``, stops the consumer after a drain.
                After an exception of another kind, the caller repeats the write.
        """

    async def aclose(self) -> None:
        """Close everything that ``open`` opened. Idempotent."""
