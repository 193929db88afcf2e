"""Pulls of a cohort without a server: a client that notes what it is asked, an inbox that hears what a test says."""

from __future__ import annotations

import json
from collections.abc import Sequence

from nats.aio.msg import Msg

from lanes_jetstream.cohort.pulls import ConsumerPulls, Inbox
from lanes_jetstream.wire.connection import Connection


class StubClient:
    """What of a client the pulls use; ``asked`` is what was requested of which consumer."""

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


class Side:
    """An inbox with the pulls of some consumers, and a way to have them hear something."""

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
        await self.inbox._receive(Msg(self.client, f"0.{key}", ack, b"x"))  # type: ignore[arg-type]

    async def say(self, pulls: ConsumerPulls, *, to: str = "", **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        await self.inbox._receive(Msg(self.client, to or f"{pulls._inbox}.1", "", b"", named))  # type: ignore[arg-type]
