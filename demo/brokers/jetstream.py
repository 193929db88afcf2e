"""The demo's streams on a NATS server: publishing, the consumer's backlog, and the dead letters."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import anyio
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from demo.brokers.broker import Left, Published
from demo.config import Retention
from demo.errors import DemoError, NoAnswer
from demo.events import Event
from demo.ledger import Step
from lanes.clock import monotonic
from lanes.core.types import PartitionId
from lanes.errors import SourceError
from lanes.history.recorder import Recorder
from lanes.queues.partitioned import PartitionedQueue
from lanes_jetstream.wire.answers import ApiError
from lanes_jetstream.wire.connection import Connection
from lanes_jetstream.wire.connection import NoAnswer as NoApi

_STREAM_NOT_FOUND: Final = 10059
_CONSUMER_NOT_FOUND: Final = 10014
_MESSAGE_NOT_FOUND: Final = 10037
_WRONG_LAST_ID: Final = 10070
_NO_LEADER: Final = 10008
_SUBJECTS_OVERLAP: Final = 10065

_DUPLICATE_WINDOW: Final = 3_600
"""Seconds in which the server recognises events that a publisher sends again after an outage."""

_WINDOW: Final = 2_000
"""Maximum number of published and unconfirmed events."""

_CONFIRMED_WITHIN: Final = 5.0
"""Seconds without a confirmation after which the publisher sends the unconfirmed events again."""

_NAMED_LIMIT: Final = 4
"""Most subjects that an error names."""

_PAUSE: Final = 0.2
"""Seconds without a confirmation after which the publisher checks whether it must send events again."""


class JetStreamBroker:
    """A ``Broker`` on JetStream.

    ``stream`` captures ``declarations.<name>.<case>``, and with a ``width`` above 1 the subjects of the other physical
    queues too, such as ``declarations.<name>__p1.<case>``. ``dead_stream`` captures the subject ``dead_subject``.

    Args:
        server: URL of the server.
        name: Name of the run, part of the names of all streams and subjects.
        retention: Retention of ``stream``.
        transform: First token that the server adds to each stored subject; None = no token.
        width: Number of physical queues. Above 1, each queue has a separate durable, and there is no ``transform``.
    """

    def __init__(
        self,
        server: str,
        name: str,
        *,
        retention: Retention = "limits",
        transform: str | None = None,
        width: int = 1,
    ) -> None:
        self._connection = Connection(server)
        self._retention = retention
        self._transform = transform
        self.queue = PartitionedQueue(f"declarations.{name}", width)
        self._made: list[str] = []
        self.stream = f"DECLARATIONS_{name}"
        self.durable = "approvals"
        self.dead_stream = f"DEAD_{name}"
        self.dead_subject = f"dead.declarations.{name}"

    async def open(self) -> None:
        """Connect, and create the streams. Raises ``SourceError`` or ``DemoError`` if that fails."""
        await self._connection.open()
        try:
            more: dict[str, Any] = {"retention": self._retention}
            if self._transform is not None:
                stored = f"{self._transform}.{self.queue.name}.{{{{wildcard(1)}}}}"
                more["subject_transform"] = {"src": f"{self.queue.name}.*", "dest": stored}
            await self._make(self.stream, [f"{name}.*" for name in self.queue.names], more)
            await self._make(self.dead_stream, [self.dead_subject], {"retention": "limits"})
        except NoAnswer as error:
            raise DemoError(str(error)) from None

    @property
    def connected(self) -> bool:
        """Whether the client has a connection to the server."""
        return bool(self._connection.client.is_connected)

    async def close(self) -> list[str]:
        """Delete the streams of ``open``, and close the connection. Return the names of the remaining streams."""
        stayed = []
        for stream in self._made:
            if not self.connected:
                stayed.append(stream)
                continue
            try:
                await self._ask(f"STREAM.DELETE.{stream}")
            except ApiError as error:
                if error.err_code != _STREAM_NOT_FOUND:
                    stayed.append(stream)
            except (NoAnswer, SourceError):
                stayed.append(stream)
        self._made = []
        await self._connection.close()
        return stayed

    async def publish(self, events: Sequence[Event], history: Recorder, published: Published) -> None:
        """See ``Broker.publish``."""
        publisher = _Publisher(self._connection.client, self.queue, events)
        recorded = 0
        await publisher.open()
        try:
            while recorded < len(events):
                await publisher.step()
                now = monotonic()
                while recorded < publisher.confirmed:
                    case = events[recorded].case
                    history.produced(self._place(case), publisher.sequences[recorded], case.encode(), now)
                    recorded += 1
                await published(recorded)
        finally:
            with anyio.CancelScope(shield=True):
                await publisher.close()
        history.flush()

    def _place(self, case: str) -> PartitionId:
        """Return the partition of a case's events."""
        if self.queue.partitions == 1:
            return PartitionId(self.stream, 0)
        route = self.queue.route_by_key(case)
        return PartitionId(route.name, route.partition)

    async def left(self) -> Left | None:
        """Return the backlog of all durables, see ``Broker.left``."""
        durables = [f"{self.durable}__p{number}" if number else self.durable for number in range(self.queue.partitions)]
        infos = []
        for durable in durables:
            try:
                infos.append(await self._ask(f"CONSUMER.INFO.{self.stream}.{durable}"))
            except ApiError as error:
                if error.err_code == _CONSUMER_NOT_FOUND:
                    return None
                raise DemoError(
                    f"consumer {self.stream}/{durable}: {error}: do not change the stream during the demo"
                ) from None
        return Left(
            pending=sum(int(info["num_pending"]) for info in infos),
            unacknowledged=sum(int(info["num_ack_pending"]) for info in infos),
            floor=min(int(info["ack_floor"]["stream_seq"]) for info in infos) + 1,
        )

    async def count_dead_letters(self) -> int:
        """See ``Broker.count_dead_letters``."""
        return int((await self._state(self.dead_stream))["messages"])

    async def dead_letters(self) -> list[Step]:
        """Return the events of the dead letters in order, see ``Broker.dead_letters``."""
        state = await self._state(self.dead_stream)
        letters = []
        # A stream that was never used begins at 0, which is no sequence.
        for sequence in range(max(1, int(state["first_seq"])), int(state["last_seq"]) + 1):
            try:
                answer = await self._ask(f"STREAM.MSG.GET.{self.dead_stream}", {"seq": sequence})
            except ApiError as error:
                if error.err_code == _MESSAGE_NOT_FOUND:
                    continue
                raise DemoError(f"stream {self.dead_stream}: {error}") from None
            event = json.loads(base64.b64decode(answer["message"]["data"]))
            letters.append((str(event["case"]), int(event["step"])))
        return letters

    async def _ask(self, question: str, payload: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            return await self._connection.api(question, payload)
        except NoApi as error:
            raise NoAnswer(str(error)) from None

    async def _state(self, stream: str) -> dict[str, Any]:
        try:
            state: dict[str, Any] = (await self._ask(f"STREAM.INFO.{stream}"))["state"]
        except ApiError as error:
            raise DemoError(f"stream {stream}: {error}: do not change the stream during the demo") from None
        return state

    async def _make(self, stream: str, subjects: Sequence[str], more: Mapping[str, Any]) -> None:
        config = {
            **more,
            "name": stream,
            "subjects": subjects,
            "storage": "file",
            "num_replicas": 1,
            "max_consumers": -1,
            "max_msgs": -1,
            "max_bytes": -1,
            "max_age": 0,
            "discard": "new",
            "duplicate_window": _DUPLICATE_WINDOW * 1_000_000_000,
        }
        where = f"stream {stream} on {self._connection.servers}"
        try:
            found = await self._ask(f"STREAM.INFO.{stream}")
        except ApiError as error:
            if error.err_code != _STREAM_NOT_FOUND:
                raise DemoError(f"{where}: {error}: allow this account to use JetStream") from None
        else:
            raise DemoError(
                f"{where} exists already, with the subjects {found['config'].get('subjects')} and "
                f"{found['state']['messages']} messages: delete it, or choose another --name"
            )
        try:
            await self._ask(f"STREAM.CREATE.{stream}", config)
        except ApiError as error:
            remedy = "see the server's limits for streams and storage"
            if error.err_code == _SUBJECTS_OVERLAP:
                named = ", ".join(map(repr, subjects[:_NAMED_LIMIT])) + (", …" if subjects[_NAMED_LIMIT:] else "")
                remedy = f"another stream captures {named}: delete that stream, or use another server"
            raise DemoError(f"{where} cannot be created: {error}: {remedy}") from None
        self._made.append(stream)


class _Publisher:
    """A publisher that sends many events before their confirmations, and keeps the order of the log after a loss.

    Each event after the first names the previous event as the last event of the stream (``Nats-Expected-Last-Msg-Id``).
    After a lost event the server therefore refuses all later events. The publisher then sends all unconfirmed events
    again. The server recognises stored events by their ``Nats-Msg-Id`` and confirms their old sequences.
    """

    def __init__(self, client: Client, queue: PartitionedQueue, events: Sequence[Event]) -> None:
        self._client = client
        self._queue = queue
        self._events = events
        self._inbox = client.new_inbox()
        self._subscription: Any = None
        self._next = 0
        self._round = 0
        self._again = False
        self._failure: DemoError | None = None
        self._wake = asyncio.Event()
        self._last_sign = monotonic()
        self.sequences = [0] * len(events)
        self.confirmed = 0

    async def open(self) -> None:
        self._subscription = await self._client.subscribe(
            f"{self._inbox}.*.*", cb=self._confirm, pending_msgs_limit=0, pending_bytes_limit=0
        )

    async def close(self) -> None:
        if not self._client.is_closed:
            await self._subscription.unsubscribe()

    async def step(self) -> None:
        """Send all permitted events, and wait for a confirmation or for the next check."""
        if self._failure is not None:
            raise self._failure
        try:
            if self._client.is_connected and not self._again:
                await self._send()
        except (nats.errors.Error, OSError):
            self._again = True
        self._wake.clear()
        try:
            async with asyncio.timeout(_PAUSE):
                await self._wake.wait()
        except TimeoutError:
            silent = monotonic() - self._last_sign > _CONFIRMED_WITHIN
            if self._client.is_connected and (self._again or silent):
                # Late confirmations of the last round have arrived during the pause. A new round begins.
                self._again = False
                self._round += 1
                self._next = self.confirmed
                self._last_sign = monotonic()
            elif not self._client.is_connected:
                self._again = True

    async def _send(self) -> None:
        end = min(self.confirmed + _WINDOW, len(self._events))
        while self._next < end and not self._again:
            index = self._next
            event = self._events[index]
            headers = {"Nats-Msg-Id": f"{event.case}/{event.step}"}
            if index:
                before = self._events[index - 1]
                headers["Nats-Expected-Last-Msg-Id"] = f"{before.case}/{before.step}"
            await self._client.publish(
                f"{self._queue.route_by_key(event.case).name}.{event.case}",
                event.payload,
                reply=f"{self._inbox}.{self._round}.{index}",
                headers=headers,
            )
            self._next += 1

    async def _confirm(self, message: Msg) -> None:
        number, _, index = message.subject[len(self._inbox) + 1 :].partition(".")
        if not message.data:
            # No stream answers while the server is starting.
            self._again = True
            return
        answer = json.loads(message.data)
        error = answer.get("error")
        if error is None:
            self._last_sign = monotonic()
            sequences = self.sequences
            sequences[int(index)] = answer["seq"]
            while self.confirmed < len(sequences) and sequences[self.confirmed]:
                self.confirmed += 1
        elif error.get("err_code") == _WRONG_LAST_ID:
            self._again = self._again or int(number) == self._round
            return
        elif error.get("err_code") == _NO_LEADER:
            self._again = True
            return
        else:
            event = self._events[int(index)]
            self._failure = DemoError(
                f"the server refused case {event.case!r} step {event.step}: {error.get('description')} "
                f"({error.get('err_code')}): free space on the server's disk, or raise its limits"
            )
        self._wake.set()
