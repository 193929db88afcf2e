"""The source that reads one durable consumer. All messages of the consumer form one partition."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import nats.errors
from nats.aio.msg import Msg

from lanes.clock import monotonic
from lanes.core.types import Message, Partition, PartitionId, Room, Settlement
from lanes.errors import ConfigError, SourceError
from lanes.source import Assigned, Backlog, Delivered, Destination, Outage, Retention, SourceEvent, SourceTraits
from lanes_jetstream.durable.consumer import DurableConsumer
from lanes_jetstream.durable.presence import Presence
from lanes_jetstream.durable.pulls import DurablePulls
from lanes_jetstream.durable.takeover import POLL_INTERVAL, RETRY_DELAY, Takeover
from lanes_jetstream.durable.watch import DurableWatch, ReadState
from lanes_jetstream.wire.acks import AckMode, Acks, OwnAcks, ack_errors, give_back, keep_alive
from lanes_jetstream.wire.answers import ApiError
from lanes_jetstream.wire.connection import Connection, NoAnswer
from lanes_jetstream.wire.keys import KeyFunction
from lanes_jetstream.wire.messages import READER, message_of, sequences
from lanes_jetstream.wire.pull_requests import PULL_EXPIRES
from lanes_jetstream.wire.stream import OutOfRange

log = logging.getLogger("lanes.jetstream")

_OTHER_PROCESS_WAIT: Final = 2.0
"""Seconds that a start waits for another process on the consumer to stop."""

_LOST_MACHINE_WAIT: Final = PULL_EXPIRES + 1.0
"""Seconds that a start waits until the pull requests of a silent process have ended.

A process is silent if it does not answer, for example after the loss of its machine. Its pull requests end within this
time.
"""


@dataclass(eq=False, repr=False, kw_only=True)
class DurableSource:
    """The source that reads one durable consumer; see ``JetStreamSource``, which checks the arguments.

    Attributes:
        connection: Connection to the server.
        durable: The consumer.
        key: Function that returns the key of a message; None = no keys.
        acks: Mode of waiting for confirmations of acknowledgements; see ``JetStreamSource``.
        out_of_range: Policy for messages that the stream dropped.
        shared: Whether other processes pull the consumer too.
        start_timeout: Seconds that a start waits for leaders, 0 or more.
        place: Id of the partition; None = number 0 of the stream.
        wake: Event that the pull requests set when a message or a status arrives. The partitions of a queue share one
            event.
    """

    connection: Connection
    durable: DurableConsumer
    key: KeyFunction | None
    acks: AckMode
    out_of_range: OutOfRange
    shared: bool
    start_timeout: float
    place: PartitionId | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._name = f"jetstream {self.durable}"
        self.connection.serve(self._name)
        self._watch = DurableWatch(
            connection=self.connection,
            durable=self.durable,
            name=self._name,
            out_of_range=self.out_of_range,
            alone=not self.shared,
        )
        self._takeover: Takeover
        self._pulls: DurablePulls
        self._acks: Acks
        self._own_acks = OwnAcks(self._name)
        self._partition: Partition | None = None
        self._assigned = False
        self._expected: int | None = None
        self._highest = 0
        self._extend_at = 0.0
        self._warned_of_puller = False
        self._taken_over = False
        # Messages that a takeover collected, and that still wait for room.
        self._collected: list[Msg] = []
        self._opened = AsyncExitStack()

    def __repr__(self) -> str:
        return f"<DurableSource {self._name}>"

    @cached_property
    def _presence(self) -> Presence:
        # The source makes this object at the first use, because the object needs the client of an open connection.
        return Presence(self.connection, self.durable.tokens, self._second)

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """Connect, find or create the consumer, and check it; see ``lanes.source.Source.open``."""
        await self.connection.open()
        self.connection.check_server()
        await self._find_consumer()
        if not self.shared:
            await self._presence.announce()
            self._opened.push_async_callback(self._presence.close)
        client = self.connection.client
        self._pulls = DurablePulls(client, self.durable.next_subject, self._name, self.wake)
        self.connection.watch_outages(self.outage)
        self._acks = Acks(client, self.acks, self._name)
        self._takeover = Takeover(
            connection=self.connection,
            durable=self.durable,
            pulls=self._pulls,
            name=self._name,
            resend=self._acks.resend,
            check_dropped=self._watch.check_dropped,
            shared=self.shared,
        )
        place = self.place or PartitionId(self.durable.stream, 0)
        self._partition = Partition(place, READER, self.durable.stream_state.incarnation)
        self._opened.push_async_callback(self._close_inboxes)
        self._watch.start(self._reading, self._is_ours, self._interrupt_shrunk)
        self._opened.push_async_callback(self._watch.stop)
        shortest, _ = self.durable.ack_waits
        return dataclasses.replace(
            self.declared(), extend_interval=shortest / 3, max_in_flight=self.durable.max_ack_pending
        )

    def declared(self) -> SourceTraits:
        """Return the traits that do not depend on the consumer; see ``lanes.source.Declaring.declared``."""
        return SourceTraits(name=self._name, system="nats", partitions=1, ordered=not self.shared)

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Wait for messages; see ``lanes.source.Source.receive``."""
        partition = self._partition
        assert partition is not None, "open() comes first"
        if not self._assigned:
            self._assigned = True
            return [Assigned(partition)]
        while True:
            if self._watch.failure is not None or self._pulls.failure is not None:
                raise await self._failure()
            if partition in room.paused or (self.shared and partition.draining):
                # Another process may take the messages that a paused or draining process does not take.
                if self.shared:
                    await self._give_back()
                await self._idle()
                continue
            if self._collected:
                # Do this before the next takeover. Without a shrunk ack_wait, the server does not redeliver these
                # messages.
                if room.messages <= 0:
                    await self._idle()
                    continue
                collected, self._collected = self._collected[: room.messages], self._collected[room.messages :]
                return self._delivered(partition, collected, in_turn=False)
            if not self._taken_over or self._pulls.check() is not None:
                # Reset the flag first. A cancelled takeover must start again, even if the connection holds.
                self._taken_over = False
                self._expected = None
                collected = await self._takeover.run(room, self._highest)
                self._taken_over = True
                if collected:
                    # The messages are in order of sequence. The highest delivery number belongs to the last delivery.
                    self._expected = max(sequences(raw.reply)[1] for raw in collected) + 1
                    if self.durable.modifiable:
                        return self._delivered(partition, collected, in_turn=False)
                    # After a hold-back the messages may exceed the room.
                    self._collected = collected
                # A check may have set a failure during the takeover.
                continue
            arrived = self._pulls.take()
            if arrived:
                events = self._delivered(partition, arrived, in_turn=not self.shared)
                if events:
                    return events
                continue
            try:
                await self._pulls.pull(room)
            except (nats.errors.Error, OSError) as error:
                self._pulls.interrupt("unsent", f"pull not sent ({type(error).__name__})")
            await self._pulls.wait(POLL_INTERVAL)

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Acknowledge messages; see ``lanes.source.Source.settle``.

        After the loss of an acknowledgement, the server redelivers the message. The engine then settles the message
        again without a call of the handler.
        """
        with ack_errors(self._name):
            for settlement in settlements:
                self._own_acks.look(settlement)
                await self._acks.send([str(message.token) for message in settlement.messages])

    async def extend(self, messages: Sequence[Message]) -> None:
        """Tell the server that these messages are still in progress. Best effort."""
        # After a reconnect the takeover handles messages that were redelivered in the meantime.
        await keep_alive(self.connection.client, [str(message.token) for message in messages], self._name)

    async def release(self, partition: Partition) -> None:
        """Stop pulling, and wait until the server has read every acknowledgement; see ``JetStreamSource``."""
        try:
            if self.shared:
                await self._pulls.drain(self.connection.flush)
                await self._give_back()
            await self._pulls.close()
            await self._acks.resend()
            await self.connection.flush()
            failed = self._watch.failure is not None or self._pulls.failure is not None
            await self._acks.finish(loses_last_acks=self.durable.loses_last_acks, failed=failed)
        except (nats.errors.Error, OSError) as error:
            raise SourceError(
                f"{self._name}: flush failed ({type(error).__name__}); check the server", retryable=True
            ) from error

    async def aclose(self) -> None:
        """Close the inboxes, and a connection that the source opened. Idempotent."""
        try:
            await self._opened.aclose()
        finally:
            await self.connection.close()

    def lag(self, partition: Partition) -> int | None:
        """Return the number of unacknowledged and undelivered messages; see ``lanes.source.Lagging``."""
        return self._watch.lag

    def backlog(self, partition: Partition) -> Backlog:
        """Return the messages that wait for their delivery; see ``lanes.source.Backlogged``."""
        interruption, watch = self._pulls.interruption, self._watch
        if interruption is not None:
            return Backlog(watch.waiting, interruption.text)
        return Backlog(watch.waiting, *self.connection.last_error(), cause=watch.limit_reached)

    def outage(self) -> Outage | None:
        """Return the time since a server answered; see ``lanes.source.Connected``."""
        outage = self.connection.outage()
        if outage is None:
            return None
        # A busy server may deliver messages while it answers no requests.
        return outage._replace(seconds=min(outage.seconds, monotonic() - self._pulls.heard_at))

    def retention(self, message: Message) -> Retention | None:
        """Return the time until the server may delete a message; see ``lanes.source.Retaining``."""
        return self._watch.retention.of(message)

    def reads(self, destination: Destination) -> bool:
        """Return whether the consumer delivers the messages of this destination."""
        return self.durable.delivers(destination.name, destination.subject)

    # --- messages

    async def _close_inboxes(self) -> None:
        if not self.connection.client.is_closed:
            try:
                await self._pulls.close()
                await self._acks.close()
            except (nats.errors.Error, OSError) as error:
                log.debug("%s: inbox not closed: %s", self._name, error)

    async def _give_back(self) -> None:
        """Return messages to other processes, if the messages arrived for requests that only the server can end."""
        arrived, self._pulls.arrived = self._pulls.arrived, []
        await give_back(self.connection.client, [raw.reply for raw in arrived], self._name)

    async def _idle(self) -> None:
        """Keep the arrived messages of the paused partition alive, then wait for ``POLL_INTERVAL`` seconds.

        With a shared consumer the wait ends when a message arrives.
        """
        self._takeover.check_connection()
        now = monotonic()
        waiting = [raw.reply for raw in [*self._collected, *self._pulls.arrived]]
        if now >= self._extend_at and waiting and self._pulls.check() is None:
            shortest, _ = self.durable.ack_waits
            self._extend_at = now + shortest / 3
            await keep_alive(self.connection.client, waiting, self._name)
        if self.shared and self._pulls.check() is None:
            await self._pulls.wait(POLL_INTERVAL)
        else:
            await asyncio.sleep(POLL_INTERVAL)

    def _delivered(self, partition: Partition, arrived: list[Msg], *, in_turn: bool) -> list[SourceEvent]:
        """Make one event of the arrived messages, up to the first gap in the delivery numbers.

        Args:
            partition: The partition.
            arrived: Messages as the client received them.
            in_turn: Whether the delivery numbers must rise without a gap. False for messages that a takeover collected,
                and for a shared consumer.

        Returns:
            One event with the messages; empty if no message precedes the gap.
        """
        run: list[Message] = []
        size, highest, key = 0, self._highest, self.key
        expected = self._expected if in_turn else None
        for raw in arrived:
            position, delivery = sequences(raw.reply)
            if in_turn:
                if expected is not None and delivery != expected:
                    # A delivery that the server has counted did not arrive. Its message would return after newer
                    # messages. Drop this message and all later messages, because the takeover receives them again in
                    # order.
                    self._pulls.interrupt("gap", f"delivery {expected} missing, got {delivery}")
                    break
                if self._takeover.next and position != self._takeover.next.popleft():
                    # The message follows a missing message, or arrives after a message with a higher sequence.
                    self._pulls.interrupt("unsorted", f"sequence {position} arrived out of order")
                    break
                expected = delivery + 1
            message = message_of(partition, raw, position, key)
            run.append(message)
            size += message.size
            if position > highest:
                highest = position
        self._highest = highest
        if in_turn:
            self._expected = expected
        if not run:
            return []
        self._pulls.learn_sizes(len(run), size)
        return [Delivered(partition, run, size)]

    def _reading(self) -> ReadState:
        return ReadState(
            active=self._taken_over,
            takeovers=self._takeover.count,
            highest=self._highest,
            delivery=None if self._expected is None else self._expected - 1,
            outstanding=self._pulls.reserved,
            open_requests=self._pulls.open_requests,
        )

    def _interrupt_shrunk(self, text: str) -> None:
        self._pulls.interrupt("shrunk", text)

    def _second(self) -> None:
        if self._watch.failure is None:
            self._watch.failure = SourceError(self.durable.second_puller)

    async def _failure(self) -> SourceError:
        """Return the error that stops the source.

        An error of the stream takes precedence over an error of the consumer.
        """
        if self._watch.failure is not None:
            return self._watch.failure
        try:
            await self.durable.check_stream(self._highest)
        except SourceError as error:
            if not error.retryable:
                return error
        except NoAnswer as error:
            log.debug("%s: %s", self._name, error)
        assert self._pulls.failure is not None
        return self._pulls.failure

    def _is_ours(self, subject: str) -> bool:
        """Return whether the source needs a denied ``subject``, which the client reports in lower case."""
        if subject.startswith("$js.ack."):
            return f".{self.durable.tokens}.".casefold() in subject
        inbox = self._pulls.inbox.casefold()
        return subject == self.durable.next_subject.casefold() or (inbox != "" and subject.startswith(inbox))

    # --- start

    async def _find_consumer(self) -> None:
        """Find or create the consumer, and check that no other process consumes it.

        Retries after retryable errors for ``start_timeout`` seconds.
        """
        give_up = monotonic() + self.start_timeout
        while True:
            try:
                await self.durable.ensure(None if self.shared else self.key)
                if not self.shared:
                    await self._refuse_second_process()
                return
            except (ApiError, NoAnswer) as error:
                failure = self.connection.failed(f"consumer {self.durable}", error)
            except SourceError as error:
                failure = error
            if not failure.retryable or monotonic() > give_up:
                raise failure
            log.warning("%s: %s; retrying", self._name, failure)
            await asyncio.sleep(RETRY_DELAY)

    async def _refuse_second_process(self) -> None:
        began = monotonic()
        while True:
            other = await self._presence.ask()
            if not other and not (await self.durable.refresh()).waiting_pulls:
                return
            silent = other is None
            limit = _LOST_MACHINE_WAIT if silent else _OTHER_PROCESS_WAIT
            if monotonic() - began > limit:
                raise ConfigError(f'{self.durable.second_puller}; or give up order: shared=True and order="none"')
            if not self._warned_of_puller:
                self._warned_of_puller = True
                log.warning(
                    "%s: another process %s; waiting up to %.0f s until it stops",
                    self._name,
                    "pulls and does not answer, so its machine may be lost" if silent else "consumes it",
                    limit,
                )
            await asyncio.sleep(POLL_INTERVAL)
