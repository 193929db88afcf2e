"""A handler with effects in PostgreSQL, fenced by `lanes_postgres`, and traps that kill its process.

Besides the fenced effects, an unfenced table has a row for each call.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import anyio
import psycopg
from psycopg_pool import AsyncConnectionPool

import lanes
from lanes_postgres import Positions, migrate

Place = tuple[int, int]
"""The partition and position of a message."""

TWIN_SECONDS: Final = 300.0
"""Longest wait of a call for a call with the same message in another process."""


@dataclass(frozen=True)
class Trap:
    """A kill of processes in the transaction of the message at `place`; it strikes once.

    Attributes:
        kills: The process to kill. A surviving process continues, like a process that Spark has lost.
        place: The partition and position of the message.
        flag: Path of a file that exists after the kill.
        driver: The process ids of the driver; needed to kill the driver.
    """

    kills: Literal["worker", "executor", "driver"]
    place: Place
    flag: str
    driver: tuple[int, ...] = ()

    def spring(self, place: Place) -> None:
        if place != self.place:
            return
        try:
            os.close(os.open(self.flag, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        here = os.getpid()
        # A worker is a child of a daemon, which is a child of the JVM.
        executor = parent(parent(here))
        for pid in {"worker": (here,), "executor": (executor,), "driver": self.driver}[self.kills]:
            os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Fenced:
    """The handler with its settings, which Spark sends to the workers, and queries of its tables.

    With `twins`, a call for a message of this key waits until another process is called with the message.
    """

    url: str
    schema: str
    trap: Trap | None = None
    twins: bytes | None = None

    def make(self) -> None:
        """Create the tables, before the first call."""
        with psycopg.connect(self.url) as connection:
            migrate(connection, schema=self.schema)
            for table in ("effects", "calls"):
                connection.execute(
                    f"CREATE TABLE {self.schema}.{table} "
                    "(id serial PRIMARY KEY, pid int, partition int, position bigint, key bytea)"
                )

    # --- in a worker

    async def setup(self) -> None:
        pool = AsyncConnectionPool(
            self.url, min_size=1, max_size=4, open=False, kwargs={"application_name": self.schema}
        )
        await pool.open()
        _POOLS[self.schema] = pool

    async def teardown(self) -> None:
        await _POOLS.pop(self.schema).close()

    async def __call__(self, message: lanes.Message) -> dict[str, object]:
        pool, place = _POOLS[self.schema], (message.partition.id.number, message.position)
        row = (os.getpid(), *place, message.key)
        async with pool.connection() as connection:
            await connection.execute(self._insert("calls"), row)
        if self.twins is not None and message.key == self.twins:
            await self._twin(place)
        positions = Positions("fenced", schema=self.schema)
        async with pool.connection() as connection, positions.once(connection, message) as fresh:
            if fresh:
                await connection.execute(self._insert("effects"), row)
                if self.trap is not None:
                    self.trap.spring(place)
        return {"partition": place[0], "position": place[1]}

    async def _twin(self, place: Place) -> None:
        count = f"SELECT count(DISTINCT pid) FROM {self.schema}.calls WHERE (partition, position) = (%s, %s)"
        with anyio.fail_after(TWIN_SECONDS):
            while True:
                async with _POOLS[self.schema].connection() as connection:
                    found = await (await connection.execute(count.encode(), place)).fetchone()
                if found is not None and found[0] > 1:
                    return
                await anyio.sleep(0.02)

    def _insert(self, table: str) -> bytes:
        return f"INSERT INTO {self.schema}.{table} (pid, partition, position, key) VALUES (%s, %s, %s, %s)".encode()

    # --- in the test

    def effects(self) -> list[tuple[int, int, bytes | None]]:
        """Partition, position and key of each effect; effects of one key are in the order of their commits."""
        return self._rows("SELECT partition, position, key FROM {}.effects ORDER BY id")

    def calls(self) -> list[tuple[int, int, int, bytes | None]]:
        """Process id, partition, position and key of each call; calls of one process and key are in order."""
        return self._rows("SELECT pid, partition, position, key FROM {}.calls ORDER BY id")

    def connections(self) -> int:
        """Number of open connections of the workers."""
        found = self._rows(f"SELECT count(*) FROM pg_stat_activity WHERE application_name = '{self.schema}'")
        return int(found[0][0])

    def check(self, messages: Sequence[dict[str, Any]]) -> set[Place]:
        """Assert that every message had one effect, in order within its key, and that each process had its calls in
        order.

        Returns the messages with more than one call.
        """
        effects, calls = self.effects(), self.calls()
        everything = sorted((one["partition"], one["offset"]) for one in messages)
        assert sorted((partition, position) for partition, position, _ in effects) == everything
        in_order([(key, partition, position) for partition, position, key in effects])
        in_order([((pid, key), partition, position) for pid, partition, position, key in calls if key is not None])
        counted = Counter((partition, position) for _, partition, position, _ in calls)
        assert sorted(counted) == everything
        return {place for place, count in counted.items() if count > 1}

    def _rows(self, query: str) -> list[Any]:
        with psycopg.connect(self.url) as connection:
            return connection.execute(query.format(self.schema).encode()).fetchall()


_POOLS: Final[dict[str, AsyncConnectionPool]] = {}
"""The connection pool of the task in this worker, by schema."""


def in_order(calls: Sequence[tuple[Any, int, int]]) -> None:
    """Assert that positions rise within each partition and group; the first field is the group, and None has no
    order."""
    last: dict[tuple[Any, int], int] = {}
    for of, partition, position in calls:
        if of is not None:
            assert last.get((of, partition), -1) < position, f"{of}: {partition}/{position} comes late"
            last[of, partition] = position


def parent(pid: int) -> int:
    # The name of the process is in parentheses, and may contain any character.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
