"""The public JetStream source, which reads one durable consumer or is a member of a cohort."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, get_args

from lanes.arguments import (
    OF_CONSUMERS,
    check_flag,
    check_one_of,
    check_seconds,
    check_whole,
    names_unknown_options,
    shown_value,
)
from lanes.core.types import Message, Partition, PartitionId, Room, Settlement
from lanes.errors import ConfigError
from lanes.queues.partitioned import PartitionedQueue
from lanes.queues.stranded import Stranded
from lanes.source import Backlog, Destination, Outage, Retention, SourceEvent, SourceTraits
from lanes_jetstream.cohort.epoch_consumers import DEFAULT_ACK_WAIT as COHORT_ACK_WAIT
from lanes_jetstream.cohort.partitioning import MOST_PARTITIONS
from lanes_jetstream.cohort.settings import Cohort
from lanes_jetstream.cohort.source import CohortSource
from lanes_jetstream.durable.consumer import LEAST_ACK_WAIT, DurableConsumer
from lanes_jetstream.durable.queue import QueuePart, QueueSource, durable_name
from lanes_jetstream.durable.source import DurableSource
from lanes_jetstream.durable.takeover import TakeoverMode
from lanes_jetstream.wire.acks import AckMode
from lanes_jetstream.wire.connection import Connection, Server
from lanes_jetstream.wire.keys import MISSING_KEY, KeyFunction, check_key, check_varies
from lanes_jetstream.wire.queue_subjects import check_queue, check_stream, subjects_of
from lanes_jetstream.wire.stream import OutOfRange, Start, check_name, start_fields
from lanes_jetstream.wire.subjects import is_subject

DEFAULT_ACK_WAIT: Final = 30.0
DEFAULT_MAX_ACK_PENDING: Final = 10_000
DEFAULT_START_TIMEOUT: Final = 30.0


_NAMED: Final = 8
"""Maximum number of physical queues that an error names."""


@names_unknown_options("JetStreamSource", hints={"key": MISSING_KEY}, homes=OF_CONSUMERS)
class JetStreamSource:
    """A source of messages from one JetStream stream, through one durable pull consumer or as a member of a cohort.

    With ``durable``, one process reads the consumer, unless ``shared`` is True. The source creates a missing consumer.
    An existing consumer continues at its position. If an existing consumer does not fit, the error names the fault and
    the remedy.

    With ``cohort``, any number of processes share the stream, and one process at a time handles each key. The cohort
    creates its own consumers, one for each partition. The options ``filter_subject``, ``takeover``, ``acks``,
    ``shared`` and ``start_timeout`` must therefore keep their defaults.

    Needs nats-server 2.11 or newer, asyncio, and permission to publish to these subjects:

    - durable: ``$JS.API.STREAM.INFO.<stream>``, ``$JS.API.CONSUMER.INFO.<stream>.<durable>``,
      ``$JS.API.CONSUMER.MSG.NEXT.<stream>.<durable>`` and ``$JS.ACK.<stream>.<durable>.>``
    - a durable that the source creates or modifies: also ``$JS.API.CONSUMER.CREATE.<stream>.<durable>`` and
      ``$JS.API.CONSUMER.RESET.<stream>.<durable>``
    - cohort: ``$JS.API.>``, ``$JS.ACK.<stream>.>`` and ``$KV.<bucket>.>``; the bucket is ``lanes_<stream>_<namespace>``
      if the namespace has no underscore

    Args:
        server: URL of a server (several with commas), a connected nats client, or its JetStream context. The source
            never closes a client of the caller.
        stream: Name of the stream.
        durable: Name of the durable consumer. Pass either ``durable`` or ``cohort``.
        cohort: The cohort, or its name for a cohort with default settings.
        key: Source of the partition key: ``subject_token(n)``, ``header(name)``, ``whole_subject``, or a function of
            the client's message; None = no keys and no order. If the function raises an error or returns an invalid
            key, the engine does not call the handler, and applies the poison policy to the message. Without ``shared``,
            the source refuses a ``subject_token`` whose token is the same literal in all subjects, or the partition
            number of a transform.
        filter_subject: Subject filter of a new consumer; None = all subjects. The source refuses a filter that matches
            no subject and no message of the stream.
        queue: A partitioned queue in the stream; None = no queue. Partition n has the subjects ``NAME`` and ``NAME.>``,
            where ``NAME`` is ``queue.names[n]``. With ``durable``, partition 0 has the durable of this name, and
            partition n has the durable ``DURABLE__pn``. In a cohort, each partition of the queue is one cohort
            partition. With a queue, leave out ``filter_subject``, ``shared``, and ``partitions`` and ``create`` of the
            cohort.
        ack_wait: Seconds until the server redelivers an unacknowledged message, 1 or more, for a new consumer; None =
            30 s, or 300 s in a cohort.
        max_ack_pending: Limit of unacknowledged messages, 1 or more, for a new consumer. In a cohort the limit applies
            to each partition.
        start: First message of a new consumer: ``"beginning"``, ``"next"``, a stream sequence from 1, or an aware
            ``datetime``.
        takeover: Method by which unacknowledged messages of an earlier process arrive before new messages. ``"auto"``
            resets a consumer that ``lanes`` created, or briefly shrinks its ack_wait and removes its BackOff.
            ``"modify"`` also resets or changes a consumer that another program created. ``"hold-back"`` sends no
            request for one ack_wait and one second, and needs no permission to change the consumer. The source uses
            ``"hold-back"`` if it may not change the consumer, and for ``"auto"`` with a consumer of another program.
            The log names the method.
        acks: Mode of waiting for confirmations of acknowledgements. ``"fire-and-forget"`` never waits. ``"confirmed"``
            waits for the server at each settlement. ``"confirmed-at-drain"`` waits at each release until the server has
            processed the last acknowledgement. If the stream or the consumer has only one copy on disk, a release waits
            up to 0.25 s more, until the server has written the acknowledgement. In all modes, a server with the only
            copy can lose the acknowledgements of the last 0.1 s when it is killed.
        out_of_range: Policy if the stream dropped messages before their delivery, by a purge or its limits. ``"fail"``
            stops the source, and ``"earliest"`` continues with the remaining messages. The source does not check a
            stream that drops single messages by design (one message for each subject, rollups, a TTL for each message).
            For a filtered consumer and for a cohort, the source detects only drops during the run. If messages between
            remaining messages are missing, a cohort warns and continues.
        shared: Whether other processes pull the same durable. True needs ``Settings(order="none")``, because several
            processes cannot keep an order. A shared durable has no takeover. With False, a start waits 2 s for another
            process to stop, and raises an error if that process continues. If that process does not answer, the start
            waits up to 31 s. If another process pulls during the run, the source stops.
        start_timeout: Seconds, 0 or more, for the leaders of the stream and the consumer to answer at the start. During
            the run the source waits for the leaders without limit.

    Raises:
        ConfigError: An argument is invalid, or two arguments exclude each other.
    """

    needs_asyncio: Final = True
    """Whether ``lanes.main`` refuses trio for this source."""

    def __init__(
        self,
        server: Server,
        *,
        stream: str,
        durable: str | None = None,
        cohort: str | Cohort | None = None,
        key: KeyFunction | None,
        filter_subject: str | None = None,
        queue: PartitionedQueue | None = None,
        ack_wait: float | None = None,
        max_ack_pending: int = DEFAULT_MAX_ACK_PENDING,
        start: Start = "beginning",
        takeover: TakeoverMode = "auto",
        acks: AckMode = "confirmed-at-drain",
        out_of_range: OutOfRange = "fail",
        shared: bool = False,
        start_timeout: float = DEFAULT_START_TIMEOUT,
    ) -> None:
        check_name("stream", stream)
        if (durable is None) == (cohort is None):
            fault = (
                "neither durable=… nor cohort=… is given"
                if durable is None
                else "durable=… and cohort=… exclude each other"
            )
            raise ConfigError(
                f"{fault}: pass durable=… for one process on its own consumer, or cohort=… for any number of processes"
            )
        check_key(key)
        if ack_wait is not None:
            check_seconds("ack_wait", ack_wait, LEAST_ACK_WAIT)
        check_whole("max_ack_pending", max_ack_pending, 1)
        check_seconds("start_timeout", start_timeout, 0.0)
        check_flag("shared", shared)
        if filter_subject is not None and not isinstance(filter_subject, str):
            raise ConfigError(f"filter_subject={shown_value(filter_subject)}: must be one subject, a str")
        if filter_subject is not None and not is_subject(filter_subject):
            raise ConfigError(
                f"filter_subject={shown_value(filter_subject)}: has an empty token, a space, or a > before the end; "
                "separate tokens by single dots, and use > only as the last token"
            )
        if queue is not None:
            check_queue(queue)
            _check_beside_queue(queue, cohort, filter_subject=filter_subject, shared=shared)
        check_one_of("takeover", takeover, get_args(TakeoverMode))
        check_one_of("acks", acks, get_args(AckMode))
        check_one_of("out_of_range", out_of_range, get_args(OutOfRange))
        begin = start_fields(start)
        connection = Connection(server)
        self._source: DurableSource | QueueSource | CohortSource
        if cohort is not None:
            for setting, given in (
                ("filter_subject", filter_subject is not None),
                ("takeover", takeover != "auto"),
                ("acks", acks != "confirmed-at-drain"),
                ("shared", shared),
                ("start_timeout", start_timeout != DEFAULT_START_TIMEOUT),
            ):
                if given:
                    raise ConfigError(f"{setting}=… applies to durable=… only, not to a cohort; omit it")
            self._source = CohortSource(
                connection=connection,
                stream=stream,
                cohort=cohort if isinstance(cohort, Cohort) else Cohort(cohort),
                key=key,
                start=start,
                ack_wait=COHORT_ACK_WAIT if ack_wait is None else ack_wait,
                max_ack_pending=max_ack_pending,
                out_of_range=out_of_range,
                queue=queue,
            )
            return
        assert durable is not None, "durable or cohort is given"
        check_name("durable", durable)
        if filter_subject is not None and not shared:
            check_varies(key, [filter_subject], f"filter_subject={filter_subject!r}")

        def consumer(name: str, filters: Sequence[str] = ()) -> DurableConsumer:
            return DurableConsumer(
                connection,
                stream,
                name,
                filter_subject=filter_subject,
                filter_subjects=filters,
                ack_wait=DEFAULT_ACK_WAIT if ack_wait is None else ack_wait,
                max_ack_pending=max_ack_pending,
                start=begin,
                modify=takeover == "modify",
                hold_back=takeover == "hold-back",
                check=lambda state: None if queue is None else check_stream(queue, stream, state.intake),
            )

        if queue is None:
            self._source = DurableSource(
                connection=connection,
                durable=consumer(durable),
                key=key,
                acks=acks,
                out_of_range=out_of_range,
                shared=shared,
                start_timeout=start_timeout,
            )
            return
        wake = asyncio.Event()
        parts = [
            QueuePart(
                connection=connection,
                durable=consumer(durable_name(durable, number), subjects_of(name)),
                key=key,
                acks=acks,
                out_of_range=out_of_range,
                shared=False,
                start_timeout=start_timeout,
                place=PartitionId(name, number),
                wake=wake,
            )
            for number, name in enumerate(queue.names)
        ]
        self._source = QueueSource(connection, stream, durable, queue, parts, wake)

    def __repr__(self) -> str:
        return f"<JetStreamSource over {self._source!r}>"

    def checkpoint_within(self, seconds: float) -> None:
        """Set the time within which a member of a cohort stores a finished message. The call does not block.

        For a durable the call does nothing, because the durable stores each acknowledgement; see
        ``lanes.source.Checkpointing``.

        Args:
            seconds: The time, 0 or more. Call the method before ``open``.
        """
        if isinstance(self._source, CohortSource):
            self._source.checkpoint_within(seconds)

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """Connect, find or create the consumer or join the cohort, and check the setup.

        Returns:
            The traits of the source.

        Raises:
            ConfigError: The stream, the consumer or the server does not fit.
            SourceError: No server answers, or a permission is missing.
        """
        return await self._source.open()

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Wait for messages and partition events; see ``lanes.source.Source.receive``. Cancel-safe.

        Args:
            room: Maximum number and bytes of messages to deliver, and the paused partitions.

        Returns:
            At least one event.

        Raises:
            SourceError: The source cannot continue.
        """
        return await self._source.receive(room)

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Acknowledge messages; see ``lanes.source.Source.settle``.

        Args:
            settlements: Messages to acknowledge, by partition.

        Raises:
            SourceError: The source could not send the acknowledgements, or received no confirmation.
        """
        await self._source.settle(settlements)

    async def extend(self, messages: Sequence[Message]) -> None:
        """Tell the server that these messages are still in progress. Best effort.

        Args:
            messages: Messages to keep alive.
        """
        await self._source.extend(messages)

    async def release(self, partition: Partition) -> None:
        """Stop pulling a partition, and wait for confirmations according to ``acks``.

        Args:
            partition: The drained partition.

        Raises:
            SourceError: A confirmation is missing (retryable), or the member has lost the partition.
        """
        await self._source.release(partition)

    async def aclose(self) -> None:
        """Close the inboxes, leave the cohort, and close a connection that the source opened. Idempotent."""
        await self._source.aclose()

    def declared(self) -> SourceTraits:
        """Return the traits that the arguments decide; see ``lanes.source.Declaring.declared``.

        Returns:
            The traits, except those that depend on the stream and the consumer.
        """
        return self._source.declared()

    def lag(self, partition: Partition) -> int | None:
        """Return the lag of a partition; see ``lanes.source.Lagging``.

        Args:
            partition: The partition.

        Returns:
            Number of unacknowledged and undelivered messages; None = unknown.
        """
        return self._source.lag(partition)

    def backlog(self, partition: Partition) -> Backlog:
        """Return the messages that wait for their delivery; see ``lanes.source.Backlogged``.

        Args:
            partition: The partition.

        Returns:
            Sum of undelivered messages and missing deliveries. The result also contains the reason of an interruption,
            or the last error of the client.
        """
        return self._source.backlog(partition)

    def outage(self) -> Outage | None:
        """Return the time since a server answered; see ``lanes.source.Connected``.

        With a durable, the source requests the state of the consumer every 2 s. A member of a cohort renews its leases
        instead.

        Returns:
            The outage, with the last error of the client; None while a server answers.
        """
        return self._source.outage()

    def retention(self, message: Message) -> Retention | None:
        """Return the time until the server may delete a message; see ``lanes.source.Retaining``.

        Args:
            message: An unfinished message.

        Returns:
            The earliest time by ``max_age``, ``max_msgs`` and ``max_bytes`` of the stream.
        """
        return self._source.retention(message)

    def stranded(self) -> Sequence[Stranded]:
        """Return the physical queues whose messages no consumer reads; see ``lanes.source.Stranding.stranded``.

        Every 5 s the source checks subjects with names of the queue, up to twice the number of partitions. The source
        also checks names of a former, larger number, if the durable or the cohort has consumers for these names.

        Returns:
            The physical queues; always empty without ``queue``.
        """
        return () if isinstance(self._source, DurableSource) else self._source.queue_watch.found

    def findings(self) -> Sequence[str]:
        """Return the text of the alarm about stranded messages; see ``lanes.source.Reporting.findings``.

        Returns:
            The text; empty = no stranded messages.
        """
        return () if isinstance(self._source, DurableSource) else self._source.queue_watch.findings()

    def reads(self, destination: Destination) -> bool:
        """Return whether the source would deliver messages of a destination; see ``lanes.source.Reading``.

        Args:
            destination: Stream and subject of the dead letters.

        Returns:
            True if the consumer would deliver the dead letters. For a filtered consumer of a stream that transforms
            subjects, the result is False.
        """
        return destination.system == "nats" and self._source.reads(destination)


def _check_beside_queue(
    queue: PartitionedQueue, cohort: str | Cohort | None, *, filter_subject: str | None, shared: bool
) -> None:
    """Raise ``ConfigError`` for an argument that contradicts ``queue``."""
    names = ", ".join(map(repr, queue.names[:_NAMED])) + (", …" if queue.partitions > _NAMED else "")
    if filter_subject is not None:
        raise ConfigError(
            f"queue={queue.name!r} and filter_subject={filter_subject!r} exclude each other, because the filters are "
            f"the subjects of the physical queues {names}; omit filter_subject=…"
        )
    if shared:
        raise ConfigError(
            f"queue={queue.name!r} and shared=True exclude each other; omit shared=True, and pass cohort=… in place of "
            "durable=… for several processes"
        )
    if isinstance(cohort, Cohort):
        if cohort.partitions not in (None, queue.partitions):
            raise ConfigError(
                f"queue={queue.name!r} has {queue.partitions} partitions, but Cohort(partitions={cohort.partitions}) "
                "has another number, and each physical queue is one cohort partition; omit partitions=…"
            )
        if cohort.create is not None:
            raise ConfigError(
                f"queue={queue.name!r} and Cohort(create=…) exclude each other, because a transform would change the "
                f"subjects of the physical queues {names}; create the stream yourself, and omit create=…"
            )
    elif cohort is None and queue.partitions > MOST_PARTITIONS:
        raise ConfigError(
            f"queue={queue.name!r} needs {queue.partitions} durables, one for each partition; more than "
            f"{MOST_PARTITIONS} durables slow the server down; use fewer partitions"
        )
