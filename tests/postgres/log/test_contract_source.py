"""``PostgresSource`` keeps the contract of sources on a real server."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
import pytest

from lanes.core.types import Partition
from lanes.ownership import LocalLocks
from lanes_postgres import PostgresSource, Record
from memsource.contract import Ability, Check, Sample, checks
from tests.components import PostgresServer
from tests.postgres.log.logs import Logs

CAN: tuple[Ability, ...] = ("commits", "hands over", "revoke", "lose")


class PostgresHarness:
    can = CAN
    patience = 0.3
    ack_wait = 0.0

    def __init__(self, server: PostgresServer, schema: str) -> None:
        self._logs = Logs.make(server, schema, partitions=3)
        self._source: PostgresSource

    async def publish(self, samples: Sequence[Sample]) -> None:
        async with await psycopg.AsyncConnection.connect(self._logs.url) as connection:
            records = [Record(each.value, each.key, headers=each.headers) for each in samples]
            await self._logs.log.append(connection, records)

    def source(self) -> PostgresSource:
        self._source = PostgresSource(
            self._logs.url,
            self._logs.log,
            subscription="billing",
            time_budget=0.0,
            poll_interval=0.05,
            locks=LocalLocks(self._logs.schema),
        )
        return self._source

    async def unsettled(self) -> int:
        while self._logs.sequence():
            pass
        (published,) = self._logs.execute("SELECT coalesce(sum(run), 0)::bigint FROM {}.lanes_log_entries")[0]
        rows = self._logs.execute("SELECT floor, completed FROM {}.lanes_states")
        settled = 0
        for floor, completed in rows:
            settled += floor + sum(end - start for start, end in zip(completed[::2], completed[1::2], strict=True))
        left: int = published - settled
        return left

    async def revoke(self, partition: Partition) -> None:
        """Let the newest source give the partition up, as when another member waits for it."""
        visitor = self._source._visitor
        visitor.revoke(visitor.owned[partition.id.number])

    async def lose(self, partition: Partition) -> None:
        """Let another process claim the partition, and tell the source so at its next look."""
        visitor = self._source._visitor
        visitor.lose(visitor.owned[partition.id.number], "the test takes it")

    async def elapse(self, seconds: float) -> None: ...

    async def finish(self) -> None: ...


@pytest.mark.anyio
@pytest.mark.parametrize("check", checks(CAN), ids=lambda check: check.__name__)
async def test_the_source_keeps_the_contract(check: Check, postgres: PostgresServer, schema: str) -> None:
    await check(PostgresHarness(postgres, schema))
