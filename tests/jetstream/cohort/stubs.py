"""Stubs of a member's parts: a client, an inbox with pulls, and a source whose membership the test controls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

from lanes.clock import Clock, monotonic
from lanes.core.cohort.ledger import Done
from lanes.core.types import Partition, PartitionId
from lanes_jetstream import Cohort
from lanes_jetstream.cohort.epoch_consumers import JetStreamEpochConsumers
from lanes_jetstream.cohort.owned_partition import PulledPartition
from lanes_jetstream.cohort.pulls import ConsumerPulls, Inbox
from lanes_jetstream.cohort.source import CohortSource
from lanes_jetstream.wire.connection import Connection
from lanes_jetstream.wire.messages import READER
from tests.cohort.stub_cohort import StubCohort


class StubClient:
    """The part of a client that pulls use; ``asked`` holds the consumer and size of each request."""

    def __init__(self) -> None:
        self.stats = {"reconnects": 0}
        self.last_error = None
        self.is_connected = True
        self.is_closed = False
        self.asked: list[tuple[str, int]] = []

    def new_inbox(self) -> str:
        return "_INBOX.x"

    async def publish(self, subject: str, body: bytes, reply: str = "") -> None:
        self.asked.append((subject.rpartition(".")[2], json.loads(body)["batch"]))


class StubInbox:
    """An inbox with the pulls of some consumers, and methods that deliver messages and statuses."""

    def __init__(self, consumers: Sequence[str] = ("c",)) -> None:
        self.client = StubClient()
        connection = Connection.__new__(Connection)
        connection._prefix = "$JS.API"
        self.inbox = Inbox(self.client)  # type: ignore[arg-type]
        self.pulls = [ConsumerPulls(self.inbox, connection, "S", consumer, "test") for consumer in consumers]
        for each in self.pulls:
            each.start()

    async def deliver(self, consumer: str, sequence: int, delivery: int, *, key: str = "k", reply: str = "") -> None:
        ack = reply or f"$JS.ACK.S.{consumer}.1.{sequence}.{delivery}.1700000000.5"
        self.inbox._receive(Msg(self.client, f"0.{key}", ack, b"x"))  # type: ignore[arg-type]

    async def say(self, pulls: ConsumerPulls, *, to: str = "", **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.inbox._receive(Msg(self.client, to or f"{pulls.inbox}.1", "", b"", named))  # type: ignore[arg-type]


def owned_partition(pulls: ConsumerPulls, done: Done = Done(0, ())) -> PulledPartition:  # noqa: B008
    made = PulledPartition(3, Partition(PartitionId("S", 3), READER, "now"), done)
    made.follow(pulls)
    return made


def positions(found: PulledPartition, **arguments: Any) -> list[int]:
    delivered = found.take(arguments.get("key"), arguments.get("watch"))
    return [] if delivered is None else [message.position for message in delivered.run]


class Held(StubCohort[PulledPartition]):
    """A source with a stub membership. ``last`` is the end of the stream."""

    def __init__(self, *, last: int = 1_000, first: int = 0, clock: Clock = monotonic) -> None:
        self.side = StubInbox([])
        connection = Connection(Client())
        connection._prefix = "$JS.API"
        connection._client = self.side.client  # type: ignore[assignment]
        self.source = CohortSource(
            connection=connection,
            stream="S",
            cohort=Cohort("c", member="a"),
            key=None,
            start="beginning",
            ack_wait=30,
            max_ack_pending=9,
        )
        self.source._inbox = self.side.inbox
        consumers = JetStreamEpochConsumers(connection, "S", "c", incarnation="now", filters=lambda _: [])
        consumers._last = last
        consumers.name = "c-p{}-e{}-{}".format  # type: ignore[method-assign]
        self.source._consumers = consumers
        super().__init__(PulledPartition, self.source._follow, first=first, clock=clock)
        self.source._partitions = self.partitions

    def wake(self) -> None:
        self.side.inbox.wake.set()


def consumer_of(found: PulledPartition) -> str | None:
    return None if found.pulls is None else found.pulls.consumer
