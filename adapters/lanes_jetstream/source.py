"""A JetStream pull consumer as a source: one durable, one process, the whole stream as one partition."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Final, Literal

import nats.errors
from nats.aio.msg import Msg

from lanes.core.types import Message, Partition, PartitionId, Room, Settlement, key_bytes
from lanes.errors import ConfigError, SourceError
from lanes.source import Assigned, Delivered, SourceEvent, SourceTraits
from lanes_jetstream.connection import ApiError, Connection, NoAnswer, Where
from lanes_jetstream.durable import LEAST_ACK_WAIT, Durable
from lanes_jetstream.keys import KeyFunction
from lanes_jetstream.transport import Pulls, size_of

log = logging.getLogger("lanes.jetstream")

Takeover = Literal["auto", "modify", "hold-back"]

DEFAULT_ACK_WAIT: Final = 30.0
DEFAULT_MAX_ACK_PENDING: Final = 10_000

_LOOK: Final = 0.25
"""Seconds between two looks at the connection while nothing arrives."""

_RETRY: Final = 0.5
"""Seconds before a takeover that could not be finished is tried again."""

_OTHER_PULLER_WAIT: Final = 5.0
"""Seconds that pull requests of another process may stay open at the start before this one refuses to run."""

_HOLD_BACK_MARGIN: Final = 1.0

_NAME: Final = re.compile(r"[^\s.*>/\\]+")


class JetStreamSource:
    """Wraps the durable pull consumer ``durable`` of ``stream``.

    ``where``: the URL of a server, a connected nats client, or its JetStream context. A connection that is
    passed in is never closed. ``key``: where the partition key comes from: ``subject_token(n)``,
    ``header(name)``, ``whole_subject``, or a function of the client's message; None = no keys, no order.

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
        takeover: Takeover = "auto",
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
        self._takeover = takeover
        self._pulls: Pulls
        self._partition: Partition | None = None
        self._assigned = False
        self._expected: int | None = None
        self._taken_over = False

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
        self._pulls = Pulls(client, self._connection.next_subject(*self._next), self._name)
        self._partition = Partition(PartitionId(self._stream, 0), _READER, self._durable.incarnation)
        return SourceTraits(
            name=self._name,
            extend_interval=self._durable.ack_wait / 3,
            max_in_flight=self._durable.max_ack_pending,
            redelivers=True,
        )

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Wait for messages; see ``lanes.source.Source.receive``."""
        partition = self._partition
        assert partition is not None, "open() comes first"
        if not self._assigned:
            self._assigned = True
            return [Assigned(partition)]
        while True:
            if self._pulls.check() is not None:
                orphans = await self._take_over(room)
                if orphans:
                    # Sorted by sequence, so not in the order of their deliveries; these end at the highest.
                    self._expected = max(_sequences(raw.reply)[1] for raw in orphans) + 1
                    run = [self._message(partition, raw, _sequences(raw.reply)[0]) for raw in orphans]
                    return [_delivered(partition, run)]
            arrived = self._pulls.take()
            if arrived:
                events = self._deliver(partition, arrived)
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
                for message in settlement.messages:
                    await publish(str(message.token), b"+ACK")
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
        await self._connection.flush()

    async def aclose(self) -> None:
        """Close the inbox, and the connection if it was opened here. Idempotent."""
        if hasattr(self, "_pulls") and not self._connection.client.is_closed:
            try:
                await self._pulls.close()
            except (nats.errors.Error, OSError) as error:
                log.debug("%s: inbox not closed: %s", self._name, error)
        await self._connection.close()

    # --- messages

    def _deliver(self, partition: Partition, arrived: list[Msg]) -> list[SourceEvent]:
        """Messages for what arrived, up to the first sign that a delivery was lost on the way."""
        run: list[Message] = []
        for raw in arrived:
            position, delivery = _sequences(raw.reply)
            if self._expected is not None and delivery != self._expected:
                # Something the server counts as delivered did not arrive and will come back behind newer ones.
                # Everything from here on is dropped: the takeover brings it back in order.
                self._pulls.broken = f"delivery {self._expected} missing, got {delivery}"
                break
            self._expected = delivery + 1
            run.append(self._message(partition, raw, position))
        return [_delivered(partition, run)] if run else []

    def _message(self, partition: Partition, raw: Msg, position: int) -> Message:
        return Message(partition, position, self._key_of(raw, position), size_of(raw), raw, raw.reply)

    def _key_of(self, raw: Msg, position: int) -> bytes | None:
        if self._key is None:
            return None
        try:
            key = self._key(raw)
            return None if key is None else key_bytes(key)
        except Exception as error:
            raise SourceError(
                f"{self._name}: key=… failed at sequence {position} with {type(error).__name__}: {error}; correct the "
                "key function, or exclude such messages with filter_subject"
            ) from error

    # --- takeover

    async def _refuse_other_pullers(self) -> None:
        deadline = asyncio.get_running_loop().time() + _OTHER_PULLER_WAIT
        while (await self._durable.refresh()).waiting_pulls:
            # A process that has just died may still be listed for a moment.
            if asyncio.get_running_loop().time() > deadline:
                raise ConfigError(
                    f"consumer {self._durable} is pulled by another process: two cannot keep a key's order; stop the "
                    "other one, or use a durable of its own"
                )
            await asyncio.sleep(_LOOK)

    async def _take_over(self, room: Room) -> list[Msg]:
        """Start on a fresh inbox so that what is unacknowledged comes before anything new.

        Returns the orphans themselves when they had to be collected. Waits for the connection and the server for
        as long as it takes; raises ``SourceError`` only when they cannot come back.
        """
        reason = self._pulls.broken
        if self._taken_over:
            log.warning("%s: pulling again from a fresh inbox: %s", self._name, reason)
        while True:
            self._expected = None
            try:
                await self._until_connected()
                await self._pulls.renew()
                # Nothing of the old inbox may arrive at the server after what follows.
                await self._connection.flush()
                await self._durable.check_stream()
                pending = await self._durable.refresh()
                await self._durable.restore()
                orphans = await self._requeue(pending.count, room) if pending.count else []
            except (NoAnswer, nats.errors.Error, OSError) as error:
                log.info("%s: takeover not finished (%s), again in %g s", self._name, error, _RETRY)
            except SourceError as error:
                if not error.retryable:
                    raise
                log.info("%s: takeover not finished (%s), again in %g s", self._name, error, _RETRY)
            except ApiError as error:
                raise SourceError(f"consumer {self._durable}: {error}") from None
            else:
                if self._pulls.check() is None:
                    self._taken_over = True
                    return orphans
            await asyncio.sleep(_RETRY)

    async def _requeue(self, pending: int, room: Room) -> list[Msg]:
        """Have the unacknowledged messages delivered before anything new; at the start, all of them at once.

        Messages expire in batches, and the server queues batch behind batch: what an earlier process left is in
        order only after sorting all of it. Later, what this process holds needs no order, and deliveries that
        were lost on the way expire in the order in which they were made.
        """
        if not await self._shrink(pending):
            await self._hold_back()
        if self._taken_over:
            return []
        collected: dict[int, Msg] = {}
        while True:
            count = (await self._durable.refresh()).count
            # Everything collected is unacknowledged itself, so equal counts mean that nothing is missing.
            if count <= len(collected):
                return [collected[position] for position in sorted(collected)]
            if count > room.messages:
                raise SourceError(
                    f"{self._name}: an earlier run left {count} messages unacknowledged and max_in_flight is "
                    f"{room.messages}: they can be put in order only together; raise max_in_flight to that once"
                )
            # When not all of them came, some had not expired: once more, for what is missing.
            if not await self._collect(count, collected) and not await self._shrink(count):
                await self._hold_back()

    async def _collect(self, count: int, collected: dict[int, Msg]) -> bool:
        """Pull until ``count`` messages are collected; False when they stop coming before that."""
        await self._pulls.ask_exactly(count - len(collected))
        while len(collected) < count:
            await self._pulls.wait(_RETRY)
            arrived = self._pulls.take()
            if self._pulls.check() is not None:
                raise NoAnswer(f"{self._name}: {self._pulls.broken}")
            if not arrived:
                return False
            for raw in arrived:
                collected[_sequences(raw.reply)[0]] = raw
        return True

    async def _shrink(self, pending: int) -> bool:
        """Requeue by ack_wait shrink, where that is permitted; False where it is not."""
        if self._takeover == "hold-back" or (self._takeover == "auto" and not self._durable.managed):
            return False
        try:
            await self._durable.requeue_pending()
        except ApiError as error:
            log.warning("%s: ack_wait cannot be changed (%s): holding back instead", self._name, error)
            return False
        except NoAnswer as error:
            if self._pulls.check() is not None:
                raise
            # A request that permissions forbid is dropped by the server without an answer.
            log.warning("%s: %s: holding back instead", self._name, error)
            return False
        log.info("%s: %d unacknowledged messages come first (ack_wait shrink)", self._name, pending)
        return True

    async def _hold_back(self) -> None:
        """Take nothing until ack_wait is over for everything that is unacknowledged."""
        loop = asyncio.get_running_loop()
        wait = self._durable.ack_wait + _HOLD_BACK_MARGIN
        log.warning("%s: taking nothing for %.1f s, until unacknowledged messages come back", self._name, wait)
        deadline = loop.time() + wait
        while loop.time() < deadline:
            await asyncio.sleep(min(_RETRY, max(0.0, deadline - loop.time())))
            if not (await self._durable.refresh()).count:
                return
            if self._pulls.check() is not None:
                raise NoAnswer(f"{self._name}: {self._pulls.broken}")

    async def _until_connected(self) -> None:
        client = self._connection.client
        while not client.is_connected:
            if client.is_closed:
                raise SourceError(f"{self._name}: the connection is closed and does not come back")
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


def _delivered(partition: Partition, run: list[Message]) -> Delivered:
    return Delivered(partition, run, sum(message.size for message in run))


def _sequences(reply: str) -> tuple[int, int]:
    """Stream sequence and delivery number of the consumer, from either form of the reply subject.

    ``$JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>``, or with
    ``<domain>.<account hash>`` before the stream and possibly a token behind (NATS ADR-15).
    """
    tokens = reply.split(".")
    first = 5 if len(tokens) == 9 else 7
    return int(tokens[first]), int(tokens[first + 1])
