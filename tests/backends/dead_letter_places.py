"""Places of dead letters on each backend, and the commands that read them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import anyio
import nats

import lanes
from lanes_jetstream import JetStreamDeadLetters
from lanes_kafka import KafkaDeadLetters
from lanes_kafka.broker import describe_topic
from lanes_postgres import PostgresDeadLetters
from lanes_postgres.log.appending import headers_of
from tests.components import KafkaServer, NatsServer, PostgresServer
from tests.fakes.dead_letters import dead_letter
from tests.kafka.dead_letters import records
from tests.kafka.workload import Topic
from tests.postgres.log.logs import Logs

HERE = "tests.backends.dead_letter_handlers"
"""Module of the handlers that commands name."""


class Said(NamedTuple):
    status: object
    out: str
    err: str


Command = Callable[..., Said]


class Place:
    """A topic, subject or table of dead letters, and the origin of their messages. All calls block.

    ``remembers`` = a dead letter that was disposed of differs from an unknown id. ``source`` is the topic, stream or
    log of the origin, and ``system`` the kind of its broker.
    """

    def __init__(self, options: list[str], origin: str, remembers: bool, *, source: str, system: str) -> None:
        self.options = options
        self.origin = origin
        self.remembers = remembers
        self.source = source
        self.system = system

    def park(self, *letters: lanes.DeadLetter) -> None:
        raise NotImplementedError

    def published(self) -> list[tuple[bytes, dict[str, Any]]]:
        raise NotImplementedError

    def incarnation(self) -> str:
        raise NotImplementedError


class KafkaPlace(Place):
    def __init__(self, server: KafkaServer) -> None:
        self._orders = Topic(server.url, f"orders-{_number()}", 4)
        self._dead = Topic(server.url, f"{self._orders.name}.dead", 2)
        self._orders.create()
        self._dead.create()
        super().__init__(
            ["--server", server.url, "--topic", self._dead.name],
            self._orders.name,
            True,
            source=self._orders.name,
            system="kafka",
        )

    def park(self, *letters: lanes.DeadLetter) -> None:
        async def put() -> None:
            target = KafkaDeadLetters({"bootstrap.servers": self._dead.url}, self._dead.name)
            await target.open()
            for one in letters:
                await target.put(one)
            await target.aclose()

        anyio.run(put)

    def published(self) -> list[tuple[bytes, dict[str, Any]]]:
        return [(one.value() or b"", dict(one.headers() or [])) for one in records(self._orders)]

    def incarnation(self) -> str:
        facts = describe_topic({"bootstrap.servers": self._dead.url}, self._orders.name, name="test")
        assert facts is not None
        return facts.id

    def delete(self) -> None:
        self._orders.delete()
        self._dead.delete()


class JetStreamPlace(Place):
    def __init__(self, server: NatsServer) -> None:
        self._url = server.url
        self._name = f"O{_number()}"
        super().__init__(
            ["--server", server.url, "--subject", f"{self._name}dead.x"],
            f"{self._name}.a",
            False,
            source=self._name,
            system="nats",
        )
        self._run(
            lambda js: js.add_stream(name=self._name, subjects=[f"{self._name}.>"]),
            lambda js: js.add_stream(name=f"{self._name}dead", subjects=[f"{self._name}dead.>"]),
        )

    def park(self, *letters: lanes.DeadLetter) -> None:
        async def put() -> None:
            target = JetStreamDeadLetters(self._url, f"{self._name}dead.x")
            await target.open()
            for one in letters:
                await target.put(one)
            await target.aclose()

        anyio.run(put)

    def published(self) -> list[tuple[bytes, dict[str, Any]]]:
        (state,) = self._run(lambda js: js.stream_info(self._name))
        found = self._run(*(partial(_message, self._name, number) for number in range(1, state.state.last_seq + 1)))
        return [(one.data or b"", {name: text.encode() for name, text in (one.headers or {}).items()}) for one in found]

    def incarnation(self) -> str:
        (answer,) = self._run(lambda js: js._nc.request(f"$JS.API.STREAM.INFO.{self._name}"))
        return str(json.loads(answer.data)["created"])

    def delete(self) -> None:
        self._run(lambda js: js.delete_stream(self._name), lambda js: js.delete_stream(f"{self._name}dead"))

    def _run(self, *calls: Callable[[Any], Any]) -> list[Any]:
        async def work() -> list[Any]:
            client = await nats.connect(self._url)
            try:
                return [await call(client.jetstream()) for call in calls]
            finally:
                await client.close()

        return anyio.run(work)


class PostgresPlace(Place):
    def __init__(self, server: PostgresServer) -> None:
        self._logs = Logs.make(server, f"dead{_number()}", partitions=4)
        log = self._logs.log
        super().__init__(
            ["--dsn", server.url, "--schema", log.schema, "--name", "billing"],
            log.name,
            True,
            source=log.name,
            system="postgresql",
        )

    def park(self, *letters: lanes.DeadLetter) -> None:
        async def put() -> None:
            target = PostgresDeadLetters(self._logs.url, "billing", schema=self._logs.schema)
            await target.open()
            for one in letters:
                await target.put(one)
            await target.aclose()

        anyio.run(put)

    def published(self) -> list[tuple[bytes, dict[str, Any]]]:
        rows = self._logs.execute("SELECT value, headers FROM {}.lanes_log_messages ORDER BY batch, index")
        return [(value, dict(headers_of(headers))) for value, headers in rows]

    def incarnation(self) -> str:
        ((found,),) = self._logs.execute("SELECT incarnation FROM {}.lanes_logs")
        return str(found)

    def delete(self) -> None:
        self._logs.execute("DROP SCHEMA {} CASCADE")


def _message(stream: str, number: int, jetstream: Any) -> Any:
    return jetstream.get_msg(stream, number)


_numbers = iter(range(1_000_000))


def _number() -> str:
    return f"{os.getpid()}x{next(_numbers)}"


def of(place: Place, **changes: Any) -> lanes.DeadLetter:
    usual = {"source": place.origin, "subject": place.origin, "headers": (("color", b"red"),)}
    return dead_letter(**usual | changes)


def ids(command: Command, place: Place) -> list[str]:
    said = command("list", *place.options, "--json")
    assert said.status == 0
    return [json.loads(line)["id"] for line in said.out.splitlines()]
