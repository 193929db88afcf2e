"""The durables of a cohort on a real server: created strictly, found by name, with the floor that a successor needs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Literal, get_args

import anyio
import nats.errors
import pytest
from nats.aio.client import Client

import lanes
from lanes.cohort.leases import ConsumerExists, EpochConsumer, EpochConsumers, UnknownResult
from lanes_jetstream.cohort.epoch_consumers import JetStreamEpochConsumers
from lanes_jetstream.wire.connection import CREATE_PAUSES, Connection
from memsource.contract.epochs import EPOCH_CHECKS, EpochCheck, EpochHarness
from memsource.jetstream.epoch_consumers import Durable, Retention
from tests.components import NatsServer
from tests.jetstream.cohort.conftest import Names
from tests.jetstream.conftest import connect

pytestmark = pytest.mark.anyio


RETENTIONS = ["limits", "workqueue", "interest"]


@pytest.fixture
async def names(client: Client) -> AsyncIterator[Names]:
    names = Names(client)
    yield names
    for name in names.made:
        await client.request(f"$JS.API.STREAM.DELETE.{name}", b"", timeout=5)


async def made(names: Names, **config: Any) -> tuple[str, JetStreamEpochConsumers]:
    """A stream ``<name>.<partition>.…`` and the durables of the cohort ``c`` on it."""
    name = names()
    config = {"name": name, "subjects": [f"{name}.>"], **config}
    info = await names.request(f"STREAM.CREATE.{name}", config)
    return name, consumers(names.client, name, info["created"])


def consumers(client: Client, stream: str, incarnation: str, **arguments: Any) -> JetStreamEpochConsumers:
    def filters(partition: int) -> list[str]:
        return [f"{stream}.{partition}.>"]

    return JetStreamEpochConsumers(
        Connection(client), stream, "c", incarnation=incarnation, filters=filters, **arguments
    )


class Harness:
    """A stream on the shared server; each client has its own connection."""

    def __init__(self, names: Names, retention: Retention, clients: list[Client]) -> None:
        self.retention: Retention = retention
        self._names = names
        self._clients = clients
        self._stream = names()
        self._incarnation = ""
        self._of: dict[EpochConsumers, Client] = {}
        self._replies: dict[tuple[Durable, int], str] = {}

    async def create(self) -> Harness:
        config = {"name": self._stream, "subjects": [f"{self._stream}.>"], "retention": self.retention}
        self._incarnation = (await self._names.request(f"STREAM.CREATE.{self._stream}", config))["created"]
        return self

    def consumers(self, lease: int = 0) -> EpochConsumers:
        client = self._clients.pop()
        made = consumers(client, self._stream, self._incarnation, lease=lease)
        self._of[made] = client
        return made

    async def publish(self, *partitions: int) -> list[int]:
        subjects = [f"{self._stream}.{partition}.key" for partition in partitions]
        answers = [await self._names.client.request(subject, b"", timeout=5) for subject in subjects]
        return [json.loads(answer.data)["seq"] for answer in answers]

    async def pull(self, durable: Durable, count: int) -> list[int] | None:
        client = self._names.client
        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox)
        name = f"c-p{durable.partition}-e{durable.epoch}" + (f"-{durable.sub}" if durable.sub else "")
        came: list[int] = []

        async def ask() -> None:
            request = json.dumps({"batch": count - len(came), "no_wait": True}).encode()
            await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{name}", request, reply=inbox)

        await ask()
        try:
            while len(came) < count:
                message = await subscription.next_msg(timeout=5)
                status = (message.headers or {}).get("Status")
                if status == "404" and await self._behind(durable, name):
                    await ask()
                    continue
                if status is not None:
                    return None if status == "503" else came
                came.append(int(message.reply.split(".")[5]))
                self._replies[durable, came[-1]] = message.reply
        finally:
            await subscription.unsubscribe()
        return came

    async def _behind(self, durable: Durable, name: str) -> bool:
        """Whether the consumer does not know the newest message yet, although its publisher has the confirmation."""
        asked = json.dumps({"last_by_subj": f"{self._stream}.{durable.partition}.key"}).encode()
        answer = await self._names.client.request(f"$JS.API.STREAM.MSG.GET.{self._stream}", asked, timeout=5)
        last = json.loads(answer.data).get("message", {}).get("seq", 0)
        info = await self._names.request(f"CONSUMER.INFO.{self._stream}.{name}", {})
        behind: bool = last > info["delivered"]["stream_seq"] and last >= info["config"].get("opt_start_seq", 0)
        return behind

    async def ack(self, durable: Durable, sequence: int) -> bool:
        try:
            await self._names.client.request(self._replies[durable, sequence], b"+ACK", timeout=5)
        except nats.errors.NoRespondersError:
            return False
        return True

    def fail(self, consumers: EpochConsumers, what: Literal["request", "reply"]) -> None:
        client = self._of[consumers]
        request = client.request

        async def lost(subject: str, *args: Any, **arguments: Any) -> Any:
            if ".CREATE." not in subject and ".DELETE." not in subject:
                return await request(subject, *args, **arguments)
            client.request = request  # type: ignore[method-assign]
            if what == "reply":
                await request(subject, *args, **arguments)
            raise nats.errors.TimeoutError

        client.request = lost  # type: ignore[method-assign]


async def publish(client: Client, stream: str, *partitions: int) -> None:
    for partition in partitions:
        await client.request(f"{stream}.{partition}.key", b"", timeout=5)


async def pull(client: Client, stream: str, durable: str, count: int) -> list[Any]:
    """Pull that many messages without an acknowledgement."""
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    request = json.dumps({"batch": count, "expires": 3_000_000_000}).encode()
    await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}", request, reply=inbox)
    arrived = [await subscription.next_msg(timeout=5) for _ in range(count)]
    await subscription.unsubscribe()
    return arrived


@pytest.mark.parametrize("retention", get_args(Retention))
@pytest.mark.parametrize("check", EPOCH_CHECKS, ids=lambda check: check.__name__)
async def test_durables_of_a_cohort_on_a_server_keep_the_contract(
    nats_server: NatsServer, names: Names, check: EpochCheck, retention: Retention
) -> None:
    clients = [await connect(nats_server.url) for _ in range(3)]
    try:
        harness: EpochHarness = await Harness(names, retention, list(clients)).create()
        await check(harness)
    finally:
        for client in clients:
            await client.close()


@pytest.mark.parametrize("retention", RETENTIONS)
async def test_the_floor_rises_with_acknowledgements(client: Client, names: Names, retention: str) -> None:
    stream, durables = await made(names, retention=retention)
    await durables.create(3, 7, 0, nonce="n", start=None if retention == "workqueue" else 1)
    await publish(client, stream, 3, 3, 5, 3, 3)
    arrived = await pull(client, stream, "c-p3-e7", 4)
    await client.request(arrived[0].reply, b"+ACK", timeout=5)
    await client.request(arrived[2].reply, b"+ACK", timeout=5)
    found, clock = await durables.found(3)
    assert found == [EpochConsumer(3, 7, 0, "n", 1)]
    assert abs(clock - time.time() * 1000) < 60_000
    await client.request(arrived[1].reply, b"+ACK", timeout=5)
    await client.request(arrived[3].reply, b"+ACK", timeout=5)
    assert (await durables.found(3))[0] == [EpochConsumer(3, 7, 0, "n", 5)]
    assert (await durables.found(5))[0] == []


async def test_the_floor_of_a_durable_without_deliveries_is_its_start(client: Client, names: Names) -> None:
    stream, durables = await made(names)
    await publish(client, stream, 1, 1, 1, 1)
    await durables.create(1, 1, 0, nonce="n", start=3)
    await durables.create(1, 2, 1, nonce="m", start=9)
    assert (await durables.found(1))[0] == [EpochConsumer(1, 1, 0, "n", 2), EpochConsumer(1, 2, 1, "m", 8)]
    assert [m.reply.split(".")[5] for m in await pull(client, stream, "c-p1-e1", 2)] == ["3", "4"]


async def test_a_second_acquisition_may_not_create_the_same_durable(client: Client, names: Names) -> None:
    """A retry of the same acquisition succeeds; another acquisition is refused and gets the creator's nonce."""
    _, durables = await made(names)
    await durables.create(1, 5, 0, nonce="mine", start=1)
    await durables.create(1, 5, 0, nonce="mine", start=1)
    for nonce, start in (("other", 1), ("mine", 2)):
        with pytest.raises(ConsumerExists) as exists:
            await durables.create(1, 5, 0, nonce=nonce, start=start)
        assert exists.value.nonce == "mine"
    await durables.create(1, 5, 2, nonce="mine", start=1)
    await durables.delete(1, 5, 0)
    await durables.delete(1, 5, 0)
    assert await durables.names() == [(1, 5, 2)]


async def test_a_work_queue_has_one_durable_for_each_partition(client: Client, names: Names) -> None:
    _, durables = await made(names, retention="workqueue")
    await durables.create(1, 5, 0, nonce="mine", start=None)
    await durables.create(2, 5, 0, nonce="mine", start=None)
    with pytest.raises(ConsumerExists) as exists:
        await durables.create(1, 6, 0, nonce="other", start=None)
    assert exists.value.nonce is None
    await durables.delete(1, 5, 0)
    await durables.create(1, 6, 0, nonce="other", start=None)


async def test_foreign_durables_are_ignored(client: Client, names: Names) -> None:
    stream, durables = await made(names)
    hostile = [
        "c-p1-e01",
        "c-p1-e1-0",
        "c-p01-e1",
        "cc-p1-e9",
        "c-p1-e9x",
        "x-c-p1-e9",
        "c-p1-e",
        "c-p1-e99999999999999999999",
    ]
    for name in hostile:
        await names.request(
            f"CONSUMER.CREATE.{stream}.{name}",
            {"stream_name": stream, "config": {"name": name, "durable_name": name, "ack_policy": "explicit"}},
        )
    await durables.create(1, 1, 0, nonce="n", start=1)
    assert await durables.names() == [(1, 1, 0)]
    assert [each.epoch for each in (await durables.found(1))[0]] == [1]


async def test_a_listing_reads_all_pages(client: Client, names: Names) -> None:
    """The server returns a limited number of names at once; only the second page has the last one."""
    _, durables = await made(names)
    connection = durables.connection
    ask, asked = connection.api, []

    async def by_twos(subject: str, request: Any = None) -> dict[str, Any]:
        answer = await ask(subject, request)
        if subject.startswith("CONSUMER.NAMES"):
            asked.append(request["offset"])
            answer["consumers"] = (answer["consumers"] or [])[:2]
        return answer

    connection.api = by_twos  # type: ignore[method-assign]
    for partition in range(5):
        await durables.create(partition, 1, 0, nonce="n", start=1)
    assert await durables.names() == [(partition, 1, 0) for partition in range(5)]
    assert asked == [0, 2, 4]


async def test_concurrent_calls_share_a_listing(client: Client, names: Names) -> None:
    """A later call sees the later state of the server."""
    _, durables = await made(names)
    for partition in range(8):
        await durables.create(partition, 1, 0, nonce="n", start=1)
    listings = 0
    ask = durables.connection.api

    async def count(subject: str, request: Any = None) -> dict[str, Any]:
        nonlocal listings
        listings += subject.startswith("CONSUMER.NAMES")
        return await ask(subject, request)

    durables.connection.api = count  # type: ignore[method-assign]
    found = await asyncio.gather(*(durables.found(partition) for partition in range(8)))
    assert [len(each) for each, _ in found] == [1] * 8
    assert listings == 1
    asking = asyncio.create_task(durables.found(0))
    with anyio.fail_after(10):
        while listings < 2:
            await asyncio.sleep(0)
    await durables.create(0, 2, 0, nonce="n", start=1)
    assert [each.epoch for each in (await durables.found(0))[0]] == [1, 2]
    asking.cancel()
    await asyncio.wait([asking])
    assert len((await durables.found(1))[0]) == 1


async def test_a_recreated_stream_is_refused(client: Client, names: Names) -> None:
    stream, durables = await made(names)
    await durables.create(1, 1, 0, nonce="n", start=1)
    await names.request(f"STREAM.DELETE.{stream}", {})
    with pytest.raises(lanes.SourceError, match=f"{stream}.*was deleted") as gone:
        await durables.found(1)
    assert not gone.value.retryable
    with pytest.raises(lanes.SourceError, match=f"{stream}.*was deleted"):
        await durables.create(1, 2, 0, nonce="n", start=1)
    await names.request(f"STREAM.CREATE.{stream}", {"name": stream, "subjects": [f"{stream}.>"]})
    with pytest.raises(lanes.LanesError, match=f"{stream}.*deleted and created again"):
        await durables.found(1)


async def test_a_consumer_limit_is_reported(client: Client, names: Names) -> None:
    _, durables = await made(names, max_consumers=1)
    await durables.create(1, 1, 0, nonce="n", start=1)
    with pytest.raises(lanes.SourceError, match="max_consumers"):
        await durables.create(2, 1, 0, nonce="n", start=1)


@pytest.mark.parametrize("performed", [False, True])
@pytest.mark.parametrize("failures", [1, len(CREATE_PAUSES), len(CREATE_PAUSES) + 1])
async def test_a_creation_in_which_the_server_failed_is_repeated(
    client: Client, names: Names, monkeypatch: pytest.MonkeyPatch, failures: int, *, performed: bool
) -> None:
    """nats-server fails for a moment if two members create a durable at once, whether or not it keeps the durable."""
    monkeypatch.setattr("lanes_jetstream.wire.connection.CREATE_PAUSES", [0.001] * len(CREATE_PAUSES))
    _, durables = await made(names)
    request, left = client.request, failures
    error = {"code": 500, "err_code": 10012, "description": "open meta.inf.tmp: no such file or directory"}

    async def failing(subject: str, *arguments: Any, **named: Any) -> Any:
        nonlocal left
        if ".CREATE." not in subject or not left:
            return await request(subject, *arguments, **named)
        left -= 1
        if performed:
            await request(subject, *arguments, **named)
        return SimpleNamespace(data=json.dumps({"error": error}).encode())

    client.request = failing  # type: ignore[method-assign]
    try:
        if failures <= len(CREATE_PAUSES):
            await durables.create(1, 5, 0, nonce="mine", start=1)
            assert (await durables.found(1))[0] == [EpochConsumer(1, 5, 0, "mine", 0)]
        else:
            with pytest.raises(lanes.SourceError, match=r"c-p1-e5 .*no such file or directory \(10012\)"):
                await durables.create(1, 5, 0, nonce="mine", start=1)
    finally:
        client.request = request  # type: ignore[method-assign]
    assert left == 0


async def test_a_missing_answer_is_an_unknown_result(client: Client, names: Names) -> None:
    _, durables = await made(names)

    async def silent(*_: Any, **__: Any) -> Any:
        raise nats.errors.TimeoutError

    client.request = silent  # type: ignore[method-assign]
    try:
        for call in (
            lambda: durables.found(1),
            lambda: durables.create(1, 1, 0, nonce="n", start=1),
            lambda: durables.delete(1, 1, 0),
        ):
            with pytest.raises(UnknownResult):
                await call()
    finally:
        del client.request


async def test_a_durable_deleted_during_a_listing_is_listed_again(client: Client, names: Names) -> None:
    """A listing may name a deleted consumer, so the next listing decides."""
    _, durables = await made(names)
    await durables.create(1, 1, 0, nonce="n", start=1)
    await durables.create(1, 2, 0, nonce="n", start=1)
    ask = durables.connection.api
    deleted = False

    async def between(subject: str, request: Any = None) -> dict[str, Any]:
        nonlocal deleted
        answer = await ask(subject, request)
        if subject.startswith("CONSUMER.NAMES") and not deleted:
            deleted = True
            await durables.delete(1, 1, 0)
        return answer

    durables.connection.api = between  # type: ignore[method-assign]
    with anyio.fail_after(10):
        assert [each.epoch for each in (await durables.found(1))[0]] == [2]
