"""A JetStream pull consumer as a source: one durable, one process, the whole stream as one partition."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Sequence
from typing import Final

import nats.errors
from nats.aio.msg import Msg

from lanes.core.types import Message, Partition, PartitionId, Room, Settlement, key_bytes
from lanes.errors import ConfigError, MessageError, SourceError
from lanes.source import Assigned, Delivered, SourceEvent, SourceTraits
from lanes_jetstream.connection import Connection, NoAnswer, Where
from lanes_jetstream.durable import LEAST_ACK_WAIT, Durable
from lanes_jetstream.keys import KeyFunction
from lanes_jetstream.takeover import Mode, Takeover
from lanes_jetstream.transport import PULL_EXPIRES, Pulls, sequences, size_of

log = logging.getLogger("lanes.jetstream")

DEFAULT_ACK_WAIT: Final = 30.0
DEFAULT_MAX_ACK_PENDING: Final = 10_000

_LOOK: Final = 0.25
"""Seconds between two looks at the connection while nothing arrives."""

_OTHER_PULLER_WAIT: Final = PULL_EXPIRES + 1.0
"""Seconds that pull requests of another process may stay open at the start before this one refuses to run: those of
a machine that was lost are gone by then."""

_ACKS_KEPT: Final = 10_000
"""Acknowledgements that are repeated after a reconnect: more than a connection can lose."""

_NAME: Final = re.compile(r"[^\s.*>/\\]+")


class JetStreamSource:
    """Wraps the durable pull consumer ``durable`` of ``stream``.

    ``where``: the URL of a server, a connected nats client, or its JetStream context. A connection that is
    passed in is never closed. ``key``: where the partition key comes from: ``subject_token(n)``,
    ``header(name)``, ``whole_subject``, or a function of the client's message; None = no keys, no order. A message that
    it raises at, or returns no key for, is not handled: it goes to the poison policy at once, as a ``MessageError``.

    A consumer that does not exist is made with ``filter_subject`` (None = everything), ``ack_wait`` (seconds, 1
    or more) and ``max_ack_pending``; one that exists is adopted as it is, checked, and refused with the remedy
    when it does not fit.

    ``takeover``: how messages that an earlier process left unacknowledged come back before anything new. Where
    ``lanes`` made the consumer, or with ``"modify"``, its ack_wait is shrunk for a moment and restored; else
    (``"hold-back"``) nothing is taken for one ack_wait, which needs no permission to change the consumer.

    Per-key order needs exactly one process on a durable: pull requests of another one at the start are refused.
    asyncio only.
    """

    def __init__(
        self,
        where: Where,
        *,
        stream: str,
        durable: str,
        key: KeyFunction | None,
        filter_subject: str | None = None,
        ack_wait: float = DEFAULT_ACK_WAIT,
        max_ack_pending: int = DEFAULT_MAX_ACK_PENDING,
        takeover: Mode = "auto",
    ) -> None:
        for setting, name in (("stream", stream), ("durable", durable)):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ConfigError(f"{setting}={name!r}: must be a name without blanks, dots, slashes and wildcards")
        if key is not None and not callable(key):
            raise ConfigError(f"key={key!r}: pass subject_token(n), header(name), whole_subject, a function, or None")
        if not ack_wait >= LEAST_ACK_WAIT:
            raise ConfigError(f"ack_wait={ack_wait!r}: must be {LEAST_ACK_WAIT:g} seconds or more")
        if takeover not in ("auto", "modify", "hold-back"):
            raise ConfigError(f'takeover={takeover!r}: use "auto", "modify" or "hold-back"')
        self._connection = Connection(where)
        self._name = f"jetstream {stream}/{durable}"
        self._stream = stream
        self._durable = Durable(
            self._connection,
            stream,
            durable,
            filter_subject=filter_subject,
            ack_wait=ack_wait,
            max_ack_pending=max_ack_pending,
        )
        self._next = (stream, durable)
        self._key = key
        self._mode: Mode = takeover
        self._takeover: Takeover
        self._pulls: Pulls
        self._partition: Partition | None = None
        self._assigned = False
        self._expected: int | None = None
        self._highest = 0
        self._waited = False
        self._taken_over = False
        self._acks: deque[str] = deque(maxlen=_ACKS_KEPT)
        self._acks_reconnects = 0

    def __repr__(self) -> str:
        return f"<JetStreamSource {self._name}>"

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """Connect, find or make the consumer, and check it; see ``lanes.source.Source.open``."""
        await self._connection.open()
        try:
            await self._durable.ensure()
            await self._refuse_other_pullers()
        except NoAnswer as error:
            raise SourceError(str(error), retryable=True) from None
        client = self._connection.client
        self._acks_reconnects = client.stats["reconnects"]
        self._pulls = Pulls(client, self._connection.next_subject(*self._next), self._name)
        self._takeover = Takeover(
            self._connection, self._durable, self._pulls, self._mode, self._name, self._resend_acks
        )
        self._partition = Partition(PartitionId(self._stream, 0), _READER, self._durable.incarnation)
        return SourceTraits(
            name=self._name,
            system="nats",
            extend_interval=self._durable.ack_wait / 3,
            max_in_flight=self._durable.max_ack_pending,
            redelivers=True,
            partitions=1,
        )

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Wait for messages; see ``lanes.source.Source.receive``."""
        partition = self._partition
        assert partition is not None, "open() comes first"
        if not self._assigned:
            self._assigned = True
            return [Assigned(partition)]
        while True:
            if not self._taken_over or self._pulls.check() is not None:
                # A state of its own: a cancelled takeover is started again, whatever the connection says then.
                self._taken_over = False
                self._expected = None
                collected = await self._takeover.run(room, self._highest)
                self._taken_over = True
                if collected:
                    # By sequence, so not in the order of their deliveries; these end at the highest.
                    self._expected = max(sequences(raw.reply)[1] for raw in collected) + 1
                    return self._delivered(partition, collected, collected=True)
            arrived = self._pulls.take()
            if arrived:
                events = self._delivered(partition, arrived)
                if events:
                    return events
                continue
            try:
                await self._pulls.pull(room)
            except (nats.errors.Error, OSError) as error:
                self._pulls.broken = f"pull not sent ({type(error).__name__})"
            await self._pulls.wait(_LOOK)

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Acknowledge messages; see ``lanes.source.Source.settle``.

        Acknowledgements are sent, not confirmed: one that is lost makes the server deliver the message again,
        and the engine settles it again without running it.
        """
        publish = self._connection.client.publish
        try:
            for settlement in settlements:
                tokens = [str(message.token) for message in settlement.messages]
                # Before the first of them leaves: all are of finished messages, so none may be repeated too early.
                self._acks.extend(tokens)
                for token in tokens:
                    await publish(token, b"+ACK")
        except nats.errors.ConnectionClosedError:
            raise SourceError(f"{self._name}: the connection is closed") from None
        except (nats.errors.Error, OSError) as error:
            raise SourceError(f"{self._name}: not acknowledged: {type(error).__name__}", retryable=True) from error

    async def extend(self, messages: Sequence[Message]) -> None:
        """Tell the server that these are still in progress. Best effort."""
        client = self._connection.client
        if not client.is_connected:
            # After the reconnect the takeover sorts out what was redelivered meanwhile.
            return
        try:
            for message in messages:
                await client.publish(str(message.token), b"+WPI")
        except (nats.errors.Error, OSError) as error:
            log.debug("%s: in-progress not sent: %s", self._name, error)

    async def release(self, partition: Partition) -> None:
        """Stop pulling and wait until the server has read every acknowledgement."""
        try:
            await self._pulls.close()
        except (nats.errors.Error, OSError) as error:
            log.debug("%s: inbox not closed: %s", self._name, error)
        await self._resend_acks()
        await self._connection.flush()

    async def _resend_acks(self) -> None:
        """Repeat the last acknowledgements after a reconnect: some may have been lost with the connection.

        An acknowledgement names one delivery of one message, so a repeated one changes nothing.
        """
        client = self._connection.client
        reconnects = client.stats["reconnects"]
        if reconnects != self._acks_reconnects:
            for token in list(self._acks):
                await client.publish(token, b"+ACK")
            self._acks_reconnects = reconnects

    async def aclose(self) -> None:
        """Close the inbox, and the connection if it was opened here. Idempotent."""
        if hasattr(self, "_pulls") and not self._connection.client.is_closed:
            try:
                await self._pulls.close()
            except (nats.errors.Error, OSError) as error:
                log.debug("%s: inbox not closed: %s", self._name, error)
        await self._connection.close()

    # --- messages

    def _delivered(self, partition: Partition, arrived: list[Msg], *, collected: bool = False) -> list[SourceEvent]:
        """One run of messages, up to the first sign that a delivery was lost on the way.

        ``collected``: by a takeover, so not in the order of their deliveries. A message whose key cannot be had has
        none, and is ``broken``.
        """
        run: list[Message] = []
        size, highest, key = 0, self._highest, self._key
        expected = None if collected else self._expected
        for raw in arrived:
            position, delivery = sequences(raw.reply)
            if not collected:
                if expected is not None and delivery != expected:
                    # Something the server counts as delivered did not arrive and will come back behind newer ones.
                    # Everything from here on is dropped: the takeover brings it back in order.
                    self._pulls.broken = f"delivery {expected} missing, got {delivery}"
                    break
                expected = delivery + 1
            lane, broken = None, None
            if key is not None:
                try:
                    found = key(raw)
                    lane = None if found is None else key_bytes(found)
                except Exception as error:
                    broken = MessageError(
                        f"key=… failed at {self._stream} sequence {position} with {type(error).__name__}: correct the "
                        "key function, or exclude such messages with filter_subject"
                    )
                    broken.__cause__ = error
            bytes_of = size_of(raw)
            message = Message(partition, position, lane, bytes_of, raw, raw.reply)
            if broken is not None:
                message.broken = broken
            run.append(message)
            size += bytes_of
            if position > highest:
                highest = position
        self._highest = highest
        if not collected:
            self._expected = expected
        if not run:
            return []
        self._pulls.learn(len(run), size)
        return [Delivered(partition, run, size)]

    # --- start

    async def _refuse_other_pullers(self) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        while (await self._durable.refresh()).waiting_pulls:
            if loop.time() - started > _OTHER_PULLER_WAIT:
                raise ConfigError(
                    f"consumer {self._durable} is pulled by another process: two cannot keep a key's order; stop the "
                    "other one, or use a durable of its own"
                )
            if not self._waited:
                self._waited = True
                log.warning(
                    "%s: somebody pulls already; waiting up to %.0f s for that to end", self._name, _OTHER_PULLER_WAIT
                )
            await asyncio.sleep(_LOOK)


class _Reader:
    """Looks into the client's messages; see ``lanes.core.types.Reader``."""

    def value(self, raw: object) -> bytes:
        assert isinstance(raw, Msg)
        return raw.data

    def headers(self, raw: object) -> Sequence[tuple[str, bytes]]:
        assert isinstance(raw, Msg)
        return [(name, value.encode()) for name, value in (raw.headers or {}).items()]

    def subject(self, raw: object) -> str:
        assert isinstance(raw, Msg)
        return raw.subject


_READER: Final = _Reader()
