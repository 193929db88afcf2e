"""A JetStream pull consumer as a source, on a connection of its own or the user's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, get_args

from lanes.config import check_one_of, check_seconds, check_whole
from lanes.core.types import Message, Partition, Room, Settlement
from lanes.errors import ConfigError
from lanes.source import SourceEvent, SourceTraits
from lanes_jetstream.cohort.epoch_consumers import DEFAULT_ACK_WAIT as COHORT_ACK_WAIT
from lanes_jetstream.cohort.settings import Cohort
from lanes_jetstream.cohort.source import CohortSource
from lanes_jetstream.durable.consumer import LEAST_ACK_WAIT, DurableConsumer
from lanes_jetstream.durable.source import DurableSource
from lanes_jetstream.durable.takeover import TakeoverMode
from lanes_jetstream.wire.acks import AckMode
from lanes_jetstream.wire.connection import Connection, Server
from lanes_jetstream.wire.keys import KeyFunction
from lanes_jetstream.wire.stream import OutOfRange, Start, start_fields

__all__ = ["JetStreamSource"]

DEFAULT_ACK_WAIT: Final = 30.0
DEFAULT_MAX_ACK_PENDING: Final = 10_000
DEFAULT_START_TIMEOUT: Final = 30.0

_NAME: Final = re.compile(r"[^\s.*>/\\]+")


class JetStreamSource:
    """Wraps the durable pull consumer ``durable`` of ``stream``, or is a member of a ``cohort`` on it.

    ``cohort``: ``Cohort(name, …)``, or the name alone. Any number of processes share the stream then, and each key is
    handled by one of them at a time; the durables are made by the cohort, one for each of its partitions, and
    ``durable``, ``filter_subject``, ``takeover``, ``acks`` and ``shared`` are not for it. ``key``, ``start``,
    ``ack_wait`` (None = 300 s), ``max_ack_pending`` (of each partition) and ``out_of_range`` are. It needs permission
    to publish to ``$JS.API.>``, ``$JS.ACK.<stream>.>`` and ``$KV.lanes_<stream>_<namespace>.>``.

    ``where``: the URL of a server (several with commas), a connected nats client, or its JetStream context. A
    connection that is passed in is never closed. ``key``: where the partition key comes from: ``subject_token(n)``,
    ``header(name)``, ``whole_subject``, or a function of the client's message; None = no keys, no order. A message that
    it raises at, or returns no key for, is not handled: it goes to the poison policy at once, as a ``MessageError``.

    A consumer that does not exist is made with ``filter_subject`` (None = everything), ``ack_wait`` (seconds, 1
    or more; None = 30) and ``max_ack_pending``, and begins at ``start``: ``"beginning"``, ``"next"``, a stream
    sequence, or an aware ``datetime``. One that exists is adopted as it is and goes on where it stands; it is checked,
    and refused with the remedy when it does not fit.

    ``takeover``: how messages that an earlier process left unacknowledged come back before anything new. Where
    ``lanes`` made the consumer (``"auto"``), or whoever made it (``"modify"``), it is reset, or its ack_wait and
    BackOff are shrunk for a moment and restored; else, and with ``"hold-back"``, nothing is taken for one ack_wait,
    which needs no permission to change the consumer. The log names what was done.

    ``acks``: ``"fire-and-forget"``, ``"confirmed"`` (each settlement waits for the server) or ``"confirmed-at-drain"``:
    a release waits until the server has acted on the last acknowledgement and, where the stream has one copy, has
    written it down, 0.25 s later. What such a server was told in the 0.1 s before it is killed it forgets, in any mode.

    ``out_of_range``: when the stream has dropped messages before they were delivered, because it was purged or by its
    limits: ``"fail"``, or go on with the ``"earliest"`` there is. Streams that thin themselves out by design (one
    message a subject, rollups, a time to live for each) are not judged; of a filtered consumer, and of a cohort, only
    what happens while it is read. A cohort warns of messages that were deleted behind others that are still there, and
    goes on.

    ``shared``: other processes pull the same durable. No order can be kept, so only ``Settings(order="none")`` is let
    pass, and nothing is taken over. Otherwise another process that pulls is waited for at the start, 31 s, and then
    refused; one that comes later stops the source.

    ``start_timeout``: seconds, 0 or more, in which the stream's and the consumer's leader have to answer at the start;
    while it runs they are waited for without limit.

    Needs nats-server 2.11 or newer, and permission to publish to ``$JS.API.STREAM.INFO.<stream>``,
    ``$JS.API.CONSUMER.INFO.<stream>.<durable>``, ``$JS.API.CONSUMER.MSG.NEXT.<stream>.<durable>`` and
    ``$JS.ACK.<stream>.<durable>.>``; for a consumer that is made or modified also to
    ``$JS.API.CONSUMER.CREATE.<stream>.<durable>`` and ``$JS.API.CONSUMER.RESET.<stream>.<durable>``. asyncio only.
    Raises ``ConfigError`` for arguments that cannot be kept.
    """

    def __init__(
        self,
        server: Server,
        *,
        stream: str,
        durable: str | None = None,
        cohort: str | Cohort | None = None,
        key: KeyFunction | None,
        filter_subject: str | None = None,
        ack_wait: float | None = None,
        max_ack_pending: int = DEFAULT_MAX_ACK_PENDING,
        start: Start = "beginning",
        takeover: TakeoverMode = "auto",
        acks: AckMode = "confirmed-at-drain",
        out_of_range: OutOfRange = "fail",
        shared: bool = False,
        start_timeout: float = DEFAULT_START_TIMEOUT,
    ) -> None:
        _check_name("stream", stream)
        if (durable is None) == (cohort is None):
            raise ConfigError(
                f"durable={durable!r}, cohort={cohort!r}: pass durable=… for one process on a consumer of its own, or "
                "cohort=… for any number of them"
            )
        if key is not None and not callable(key):
            raise ConfigError(f"key={key!r}: pass subject_token(n), header(name), whole_subject, a function, or None")
        if ack_wait is not None:
            check_seconds("ack_wait", ack_wait, LEAST_ACK_WAIT)
        check_whole("max_ack_pending", max_ack_pending, 1)
        check_seconds("start_timeout", start_timeout, 0.0)
        check_one_of("takeover", takeover, get_args(TakeoverMode))
        check_one_of("acks", acks, get_args(AckMode))
        check_one_of("out_of_range", out_of_range, get_args(OutOfRange))
        begin = start_fields(start)
        connection = Connection(server)
        self._source: DurableSource | CohortSource
        if cohort is not None:
            for setting, given in (
                ("filter_subject", filter_subject is not None),
                ("takeover", takeover != "auto"),
                ("acks", acks != "confirmed-at-drain"),
                ("shared", shared),
                ("start_timeout", start_timeout != DEFAULT_START_TIMEOUT),
            ):
                if given:
                    raise ConfigError(f"{setting}=… is of a durable, and a cohort makes its own: leave it out")
            self._source = CohortSource(
                connection,
                stream,
                cohort if isinstance(cohort, Cohort) else Cohort(cohort),
                key=key,
                start=start,
                ack_wait=COHORT_ACK_WAIT if ack_wait is None else ack_wait,
                max_ack_pending=max_ack_pending,
                out_of_range=out_of_range,
            )
            return
        assert durable is not None, "one of both is given"
        _check_name("durable", durable)
        consumer = DurableConsumer(
            connection,
            stream,
            durable,
            filter_subject=filter_subject,
            ack_wait=DEFAULT_ACK_WAIT if ack_wait is None else ack_wait,
            max_ack_pending=max_ack_pending,
            start=begin,
            modify=takeover == "modify",
            hold_back=takeover == "hold-back",
        )
        self._source = DurableSource(
            connection,
            consumer,
            connection.next_subject(stream, durable),
            stream=stream,
            key=key,
            acks=acks,
            out_of_range=out_of_range,
            shared=shared,
            start_timeout=start_timeout,
        )

    def __repr__(self) -> str:
        return f"<JetStreamSource over {self._source!r}>"

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """Connect, find or make the consumer, and check it; see ``lanes.source.Source.open``."""
        return await self._source.open()

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Wait for messages; see ``lanes.source.Source.receive``."""
        return await self._source.receive(room)

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Acknowledge messages; see ``lanes.source.Source.settle``."""
        await self._source.settle(settlements)

    async def extend(self, messages: Sequence[Message]) -> None:
        """Tell the server that these are still in progress. Best effort."""
        await self._source.extend(messages)

    async def release(self, partition: Partition) -> None:
        """Stop pulling and wait for what ``acks`` asks for; a retryable ``SourceError`` says that it did not come."""
        await self._source.release(partition)

    async def aclose(self) -> None:
        """Close the inboxes, and the connection if it was opened here. Idempotent."""
        await self._source.aclose()

    def lag(self, partition: Partition) -> int | None:
        """See ``lanes.source.Lagging``: what was delivered and not acknowledged, and what was not delivered yet."""
        return self._source.lag(partition)


def _check_name(setting: str, name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{setting}={name!r}: must be a name without blanks, dots, slashes and wildcards")
