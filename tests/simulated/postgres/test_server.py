"""The simulated PostgreSQL answers scripts of the adapter's statements. A real server gives the same answers."""

from __future__ import annotations

import asyncio
import itertools
import os
from random import Random
from typing import Any

import psycopg
import pytest
from psycopg import sql

from lanes_postgres import Log, Record, migrate
from memsource.sim.loop.choosers import Fifo
from memsource.sim.loop.event_loop import current
from memsource.sim.loop.virtual import run
from memsource.sim.world.world import EPOCH
from tests.components import PostgresServer
from tests.simulated.postgres.client import Network, SimConnection
from tests.simulated.postgres.log import Batch, ReferenceLog, StoredRow
from tests.simulated.postgres.scripts import SCRIPTS, Commit, Script, Seen
from tests.simulated.postgres.seams import seams
from tests.simulated.postgres.server import PostgresServer as SimulatedServer
from tests.simulated.postgres.statements import LOG, SCHEMA

PARTITIONS = 2
KEYS = (b"2", b"1")
"""A key of each partition."""

_numbers = itertools.count()


class Simulated:
    """The stage on a simulated server, in virtual time."""

    def __init__(self) -> None:
        self.log = ReferenceLog(PARTITIONS)
        self.network = Network(SimulatedServer(self.log), Random(0), (0.001,))

    async def connect(self) -> SimConnection:
        return await SimConnection.connect("postgresql://simulated/test")

    def _rows(self, partition: int, values: tuple[bytes, ...]) -> tuple[StoredRow, ...]:
        time = EPOCH + current().time()
        return tuple(StoredRow(KEYS[partition], LOG, value, time) for value in values)

    async def append(self, partition: int, *values: bytes) -> None:
        self.log.append(partition, self._rows(partition, values))

    async def late(self, partition: int, *values: bytes) -> tuple[Commit, Commit]:
        transaction = self.log.begin()
        transaction.batches.append(Batch(partition, self._rows(partition, values)))
        self.log.at_commit(transaction)

        async def commit() -> None:
            self.log.commit(transaction)

        async def roll_back() -> None:
            self.log.roll_back(transaction)

        return commit, roll_back


class Real:
    """The stage on a real server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.log = Log(LOG, schema=SCHEMA)

    async def connect(self) -> psycopg.AsyncConnection[Any]:
        return await psycopg.AsyncConnection.connect(self.url, autocommit=True)

    async def append(self, partition: int, *values: bytes) -> None:
        commit, _ = await self.late(partition, *values)
        await commit()

    async def late(self, partition: int, *values: bytes) -> tuple[Commit, Commit]:
        connection = await psycopg.AsyncConnection.connect(self.url)
        await self.log.append(connection, [Record(value, KEYS[partition]) for value in values])
        # The trigger takes the ticket now, and the transaction stays open.
        await connection.execute("SET CONSTRAINTS ALL IMMEDIATE")

        async def commit() -> None:
            await connection.commit()
            await connection.close()

        async def roll_back() -> None:
            await connection.rollback()
            await connection.close()

        return commit, roll_back


def simulated(script: Script) -> Seen:
    """Play a script on a simulated server, in virtual time."""

    async def main() -> Seen:
        stage = Simulated()
        try:
            return await script(stage)
        finally:
            stage.network.end()

    with seams():
        return run(main, chooser=Fifo()).result


def real(script: Script, server: PostgresServer) -> Seen:
    """Play a script on a real server, in a separate database."""
    database = f"scripts_{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(database)))
    url = server.url_of(database)
    try:
        with psycopg.connect(url) as connection:
            migrate(connection, schema=SCHEMA)
        with psycopg.connect(url) as connection:
            facts = Log(LOG, partitions=PARTITIONS, schema=SCHEMA).create(connection)
        assert facts.id == 1
        return asyncio.run(script(Real(url)))
    finally:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(database)))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_both_servers_answer_alike(script: Script, postgres: PostgresServer) -> None:
    assert simulated(script) == real(script, postgres)
