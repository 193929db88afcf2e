"""Locks over a bucket of a real server keep the contract of locks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection

import anyio
import pytest
from nats.aio.client import Client

from lanes.clock import monotonic
from lanes.ownership import LeaseLocks, Locks
from lanes.ownership.lease_locks import key_of
from lanes_jetstream.cohort.lease_store import JetStreamLeaseStore
from lanes_jetstream.wire.connection import Connection
from memsource.contract.locks import LOCK_CHECKS, LockAbility, LockCheck
from tests.components import NatsServer
from tests.jetstream.conftest import connect
from tests.jetstream.workload import unique

pytestmark = pytest.mark.anyio


class Harness:
    """Processes over one bucket of the shared server; each has its own connection."""

    can: Collection[LockAbility] = ("expire", "lose")
    lease = 3.0

    def __init__(self, stores: list[JetStreamLeaseStore]) -> None:
        self._stores = stores
        self._of: dict[Locks, JetStreamLeaseStore] = {}

    def locks(self) -> LeaseLocks:
        store = self._stores.pop()
        locks = LeaseLocks(store, lease=self.lease)
        self._of[locks] = store
        return locks

    async def elapse(self, seconds: float) -> None:
        await anyio.sleep(seconds)

    def now(self) -> float:
        return monotonic()

    async def lose(self, locks: Locks) -> None:
        assert isinstance(locks, LeaseLocks)
        for name in list(locks._held):
            entry = await self._of[locks].read(key_of(name))
            await self._of[locks].delete(key_of(name), revision=entry.revision)


@pytest.fixture
async def stores(nats_server: NatsServer, client: Client) -> AsyncIterator[list[JetStreamLeaseStore]]:
    bucket = unique("lanes_K")
    clients = [await connect(nats_server.url) for _ in range(4)]
    made = [JetStreamLeaseStore(Connection(each), bucket, timeout=2.0) for each in clients]
    for store in made:
        await store.open()
    yield made
    for each in clients:
        await each.close()
    await client.request(f"$JS.API.STREAM.DELETE.KV_{bucket}", b"", timeout=5)


@pytest.mark.parametrize("check", LOCK_CHECKS, ids=lambda check: check.__name__)
async def test_locks_over_a_bucket_keep_the_contract(check: LockCheck, stores: list[JetStreamLeaseStore]) -> None:
    await check(Harness(stores))
