"""A member of a cohort keeps the contract of a source, on a real server."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, Final

import anyio
import nats
import pytest
from nats.aio.client import Client

from lanes.core.cohort.records import DrainRequest, Heartbeat, Lease, Record, drain_key, encode, lease_key, member_key
from lanes.core.types import Partition
from lanes.source import Source
from lanes_jetstream import Cohort, JetStreamSource, subject_token
from lanes_jetstream.cohort.lease_store import bucket_name
from memsource.contract.source import Ability, Check, Sample, checks
from tests.components import NatsServer

ABILITIES: Final[tuple[Ability, ...]] = ("ack wait", "revoke", "lose")

WAITING: Final = frozenset(checks(ABILITIES)) - frozenset(checks([one for one in ABILITIES if one != "ack wait"]))
"""Checks that wait for an ``ack_wait``. Any other may take longer than a short one on a busy machine, and then the
server would rightly deliver again."""


class CohortHarness:
    """A stream of one cohort partition, on the session's server; each source is a separate member."""

    can: Collection[Ability] = ABILITIES
    patience = 0.3
    ack_wait = 30.0

    def __init__(self, client: Client, url: str, name: str) -> None:
        self._client = client
        self._url = url
        self._name = name
        self._members = (f"m{number}" for number in itertools.count())
        self._newest = ""

    async def api(self, subject: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        request = b"" if body is None else json.dumps(body).encode()
        answer: dict[str, Any] = json.loads((await self._client.request(f"$JS.API.{subject}", request, timeout=5)).data)
        assert "error" not in answer, answer
        return answer

    async def create(self) -> None:
        transform = {"src": f"{self._name}.*", "dest": f"{self._name}.{{{{partition(1,1)}}}}.{{{{wildcard(1)}}}}"}
        # With a work queue the server remembers each message that was acknowledged before a crash.
        config: dict[str, Any] = {"name": self._name, "subjects": [f"{self._name}.*"], "subject_transform": transform}
        config["retention"] = "workqueue"
        await self.api(f"STREAM.CREATE.{self._name}", config)

    async def delete(self) -> None:
        for stream in (bucket_name(self._name, "lanes"), self._name):
            await self._client.request(f"$JS.API.STREAM.DELETE.{stream}", b"", timeout=5)
            await self._client.request(f"$JS.API.STREAM.DELETE.KV_{stream}", b"", timeout=5)

    async def publish(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            headers = {name: value.decode() for name, value in sample.headers}
            await self._client.request(
                f"{self._name}.{sample.key.decode()}", sample.value, headers=headers or None, timeout=5
            )

    def source(self) -> Source:
        self._newest = next(self._members)
        cohort = Cohort("contract", member=self._newest, lease=3)
        return JetStreamSource(
            self._url, stream=self._name, cohort=cohort, key=subject_token(2), ack_wait=self.ack_wait
        )

    async def _durables(self) -> list[str]:
        return (await self.api(f"CONSUMER.NAMES.{self._name}")).get("consumers") or []

    async def unsettled(self) -> int:
        infos = [await self.api(f"CONSUMER.INFO.{self._name}.{durable}") for durable in await self._durables()]
        return sum(info["num_ack_pending"] for info in infos)

    async def elapse(self, seconds: float) -> None:
        # The server has its own clock, so a test can only wait.
        await anyio.sleep(seconds)

    async def revoke(self, partition: Partition) -> None:
        """Start a second member, and drain the first one by its own plan."""
        await self._write(drain_key(self._newest), DrainRequest(since=0))
        await self._write(member_key("another"), Heartbeat(nonce="x", weight=1, active_members=None, session=0))

    async def lose(self, partition: Partition) -> None:
        await self._write(lease_key(0), Lease("somebody", "else"))

    async def _write(self, key: str, record: Record) -> None:
        subject = f"$KV.{bucket_name(self._name, 'lanes')}.{key}"
        assert b"error" not in (await self._client.request(subject, encode(record), timeout=5)).data

    async def finish(self) -> None:
        raise NotImplementedError("a stream has no end")


@pytest.fixture
async def harness(nats_server: NatsServer) -> AsyncIterator[CohortHarness]:
    client = await nats.connect(nats_server.url)
    harness = CohortHarness(client, nats_server.url, f"contract-{uuid.uuid4().hex[:12]}")
    await harness.create()
    try:
        yield harness
    finally:
        await harness.delete()
        await client.close()


@pytest.mark.long
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("check", checks(ABILITIES), ids=lambda check: check.__name__.removeprefix("check_"))
async def test_a_member_of_a_cohort_keeps_the_contract(check: Check, harness: CohortHarness) -> None:
    if check in WAITING:
        harness.ack_wait = 1.0  # the least a source allows
    await check(harness)
