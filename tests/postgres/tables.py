"""A table of effects in addition to the tables of ``lanes``, and messages that have effects."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import Trace

from lanes.core.types import Message, Partition, PartitionId
from lanes_postgres import Positions, migrate
from tests.components import PostgresServer

Place = tuple[str, int]


class Reader:
    def value(self, raw: object) -> bytes:
        return b""

    def headers(self, raw: object) -> Sequence[tuple[str, bytes]]:
        return ()

    def subject(self, raw: object) -> str:
        return "subject"


def partition(
    number: int = 0, *, topic: str = "orders", epoch: int | None = None, incarnation: str = "", live: bool = False
) -> Partition:
    made = Partition(PartitionId(topic, number), Reader(), incarnation, fencing_token=epoch)
    made.live = live
    return made


def message(position: int, key: bytes | None = b"k", of: Partition | None = None) -> Message:
    return Message(of or partition(), position, key, 1, None, None)


@contextmanager
def requests(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> Iterator[list[str]]:
    """List the requests that a connection sends inside the block, each of which waits for its answer."""
    found: list[str] = []
    with TemporaryFile("r") as file:
        connection.pgconn.trace(file.fileno())
        connection.pgconn.set_trace_flags(Trace.SUPPRESS_TIMESTAMPS)
        yield found
        connection.pgconn.untrace()
        file.seek(0)
        found += [line for line in file if re.match(r"F\t\d+\t(Query|Sync)", line)]


@dataclass(frozen=True)
class Effects:
    """One row for each effect: subscriber and position, in the order of the commits."""

    url: str
    schema: str

    @classmethod
    def make(cls, server: PostgresServer, schema: str) -> Effects:
        effects = cls(server.url, schema)
        with psycopg.connect(server.url) as connection:
            migrate(connection, schema=schema)
            connection.execute(effects.query("CREATE TABLE {} (id serial PRIMARY KEY, name text, position bigint)"))
        return effects

    def query(self, text: str, table: str = "effects") -> sql.Composed:
        return sql.SQL(text).format(sql.Identifier(self.schema, table))

    def add(self, connection: psycopg.Connection[Any], position: int, name: str = "") -> None:
        connection.execute(self.query("INSERT INTO {} (name, position) VALUES (%s, %s)"), (name, position))

    async def add_async(self, connection: psycopg.AsyncConnection[Any], position: int, name: str = "") -> None:
        await connection.execute(self.query("INSERT INTO {} (name, position) VALUES (%s, %s)"), (name, position))

    def all(self, name: str = "") -> list[int]:
        """Positions of the effects of one subscriber, in order."""
        found = self.fetch("SELECT position FROM {} WHERE name = %s ORDER BY id", "effects", (name,))
        return [position for (position,) in found]

    def kept(self) -> dict[str, int]:
        """Number of rows of each table."""
        names = ("lanes_topics", "lanes_positions", "lanes_letters", "lanes_attempts")
        return {name: self.fetch("SELECT count(*) FROM {}", name)[0][0] for name in names}

    def fetch(self, text: str, table: str, parameters: Sequence[object] = ()) -> list[Any]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            return connection.execute(self.query(text, table), parameters).fetchall()


def handle(
    positions: Positions, connection: psycopg.Connection[Any], effects: Effects, *messages: Message
) -> list[bool]:
    """Add the effects of messages like a handler; returns which messages were fresh."""
    found = []
    for each in messages:
        with positions.once(connection, each) as fresh:
            if fresh:
                effects.add(connection, each.position)
        found.append(fresh)
    return found
