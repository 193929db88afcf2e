"""Logs of tests: a schema with tables, transactions that append, and what a reader finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from lanes_postgres import Log, Record, migrate
from tests.components import PostgresServer


@dataclass(frozen=True)
class Logs:
    """One log in a schema of its own."""

    url: str
    schema: str
    log: Log

    @classmethod
    def make(cls, server: PostgresServer, schema: str, *, partitions: int = 1, name: str = "orders") -> Logs:
        log = Log(name, partitions=partitions, schema=schema)
        with psycopg.connect(server.url) as connection:
            migrate(connection, schema=schema)
        with psycopg.connect(server.url) as connection:
            log.create(connection)
        return cls(server.url, schema, log)

    def connect(self, **settings: Any) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url, **settings)

    def append(self, connection: psycopg.Connection[Any], *values: str, key: str = "k") -> None:
        self.log.append(connection, [Record(value, key) for value in values])

    def commit(self, *values: str, key: str = "k") -> None:
        """Append in a transaction of its own."""
        with self.connect() as connection:
            self.append(connection, *values, key=key)

    def sequence(self) -> int | None:
        """Give positions to all visible messages, like a reader; returns the number of batches."""
        with self.connect(autocommit=True) as connection:
            row = connection.execute(self.query("SELECT {}.lanes_log_sequence(1000)")).fetchone()
        assert row is not None
        count: int | None = row[0]
        return count

    def read(self) -> dict[int, list[str]]:
        """The values of each partition in the order of the positions, which must have no gap."""
        self.sequence()
        found: dict[int, list[str]] = {}
        with self.connect(autocommit=True) as connection:
            rows = connection.execute(
                self.query(
                    "SELECT e.partition, e.position + m.index, m.value FROM {0}.lanes_log_entries e "
                    "JOIN {0}.lanes_log_messages m USING (batch) ORDER BY 1, 2"
                )
            ).fetchall()
        for partition, position, value in rows:
            values = found.setdefault(partition, [])
            assert position == len(values), f"partition {partition} has a gap below position {position}"
            values.append(value.decode())
        return found

    def values(self) -> list[str]:
        """The values of a log of one partition."""
        return self.read().get(0, [])

    def query(self, text: str) -> sql.Composed:
        return sql.SQL(text).format(sql.Identifier(self.schema))

    def execute(self, text: str) -> list[Any]:
        with self.connect(autocommit=True) as connection:
            cursor = connection.execute(self.query(text))
            return cursor.fetchall() if cursor.description else []
