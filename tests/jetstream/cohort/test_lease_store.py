"""The bucket of a cohort on a real server keeps the contract, so a former owner cannot write the state."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, Literal

import anyio
import nats.errors
import pytest
from nats.aio.client import Client

import lanes
from lanes.cohort.leases import Conflict, Entry, LeaseStore, UnknownResult
from lanes.cohort.membership import HINTED
from lanes_jetstream.cohort.lease_store import JetStreamLeaseStore
from lanes_jetstream.wire.connection import Connection
from memsource.contract.leases import LEASE_CHECKS, LeaseCheck
from tests.components import NatsServer
from tests.jetstream.conftest import connect
from tests.jetstream.workload import unique, until

pytestmark = pytest.mark.anyio


def bucket_name() -> str:
    return unique("lanes_B")


async def opened(client: Client, bucket: str, **arguments: Any) -> JetStreamLeaseStore:
    store = JetStreamLeaseStore(Connection(client), bucket, **arguments)
    await store.open()
    return store


@pytest.fixture
async def bucket(client: Client) -> AsyncIterator[str]:
    name = bucket_name()
    yield name
    await client.request(f"$JS.API.STREAM.DELETE.KV_{name}", b"", timeout=5)


class Harness:
    """A bucket on the shared server; each store has its own connection."""

    def __init__(self, bucket: str, clients: list[Client]) -> None:
        self._bucket = bucket
        self._clients = clients
        self._of: dict[LeaseStore, Client] = {}

    def store(self) -> LeaseStore:
        client = self._clients.pop()
        # A busy machine may take seconds for an answer.
        store = JetStreamLeaseStore(Connection(client), self._bucket, timeout=30.0)
        self._of[store] = client
        return store

    async def elapse(self, seconds: float) -> None:
        await anyio.sleep(seconds)

    def fail(self, store: LeaseStore, what: Literal["request", "reply"]) -> None:
        client = self._of[store]
        request = client.request

        async def lost(subject: str, *args: Any, **arguments: Any) -> Any:
            client.request = request  # type: ignore[method-assign]
            if what == "reply":
                await request(subject, *args, **arguments)
            raise nats.errors.TimeoutError

        client.request = lost  # type: ignore[method-assign]


@pytest.mark.parametrize("check", LEASE_CHECKS, ids=lambda check: check.__name__)
async def test_a_bucket_on_a_server_keeps_the_contract_of_a_lease_store(
    nats_server: NatsServer, bucket: str, check: LeaseCheck
) -> None:
    clients = [await connect(nats_server.url) for _ in range(4)]
    try:
        await opened(clients[0], bucket)
        await check(Harness(bucket, list(clients)))
    finally:
        for client in clients:
            await client.close()


async def test_a_deleted_bucket_is_created_again_with_higher_revisions(client: Client, bucket: str) -> None:
    store = await opened(client, bucket)
    lease = await store.write("l.1", b"mine", revision=0, ttl=10)
    assert not await store.open()
    await client.request(f"$JS.API.STREAM.DELETE.KV_{bucket}", b"", timeout=5)
    with pytest.raises(Conflict):
        await store.write("l.1", b"renewed", revision=lease, ttl=10)
    assert await store.read("l.1") == Entry(None, 0)
    assert await store.write("l.2", b"new", revision=0) > lease
    await client.request(f"$JS.API.STREAM.DELETE.KV_{bucket}", b"", timeout=5)
    assert await store.read("l.2") == Entry(None, 0)
    await client.request(f"$JS.API.STREAM.DELETE.KV_{bucket}", b"", timeout=5)
    assert await store.entries("") == {}


@pytest.mark.parametrize("seen", ["written", "read"])
async def test_revisions_rise_although_the_clock_was_set_back(
    client: Client, bucket: str, monkeypatch: pytest.MonkeyPatch, seen: str
) -> None:
    other = await opened(client, bucket)
    store = await opened(client, bucket)
    lease = await (store if seen == "written" else other).write("l.1", b"mine", revision=0, ttl=10)
    if seen == "read":
        assert (await store.read("l.1")).revision == lease
    monkeypatch.setattr("lanes_jetstream.cohort.lease_store.time", SimpleNamespace(time_ns=lambda: 10**15))
    await client.request(f"$JS.API.STREAM.DELETE.KV_{bucket}", b"", timeout=5)
    assert await store.read("l.1") == Entry(None, 0)
    assert await store.write("l.1", b"new", revision=0) > lease


async def test_a_revision_of_a_deleted_bucket_is_refused(client: Client, bucket: str) -> None:
    """Revisions begin with the time, so a late renewal never hits a lease of another member."""
    store = await opened(client, bucket)
    before = await store.write("l.1", b"mine", revision=0, ttl=10)
    assert abs(before - time.time() * 1000) < 60_000


async def test_a_deleted_key_has_no_value_and_a_changed_key_is_not_deleted(client: Client, bucket: str) -> None:
    store = await opened(client, bucket)
    first = await store.write("plan", b"former", revision=0)
    second = await store.write("plan", b"present", revision=first)
    with pytest.raises(Conflict, match="'plan'"):
        await store.delete("plan", revision=first)
    assert (await store.read("plan")).value == b"present"
    await store.delete("plan", revision=second)
    gone = await store.read("plan")
    assert gone.value is None and gone.revision > second
    assert await store.write("plan", b"new", revision=gone.revision) > gone.revision


async def test_each_write_sends_a_hint(client: Client, bucket: str) -> None:
    store = await opened(client, bucket)
    keys: list[str] = []
    heard = anyio.Event()

    def changed(key: str) -> None:
        keys.append(key)
        heard.set()

    await store.watch(HINTED, changed)
    await client.flush()
    await store.write("s.17", b"1", revision=0)
    await store.write("l.17", b"1", revision=0, ttl=5)
    with anyio.fail_after(10):
        await heard.wait()
    assert keys == ["l.17"]
    await store.aclose()
    await store.aclose()


async def test_a_write_is_not_sent_after_a_reconnect(fresh_nats: Callable[..., NatsServer]) -> None:
    """By default, the client keeps a write during a reconnect, and sends the write later."""
    server = fresh_nats()
    client = await connect(server.url)
    try:
        store = await opened(client, "lanes_a", timeout=0.3)
        revision = await store.write("plan", b"1", revision=0)
        server.kill()
        with anyio.fail_after(10):
            await until(lambda: not client.is_connected)
        with pytest.raises(UnknownResult):
            await store.write("plan", b"2", revision=revision)
        with pytest.raises(UnknownResult):
            await store.read("plan")
        server.start()
        with anyio.fail_after(10):
            await until(lambda: client.is_connected)
        await client.flush()
        assert await store.read("plan") == Entry(b"1", revision)
    finally:
        await client.close()
    with pytest.raises(lanes.SourceError, match="closed"):
        await store.read("plan")


async def test_a_frozen_server_is_an_unknown_result(fresh_nats: Callable[..., NatsServer]) -> None:
    server = fresh_nats()
    client = await connect(server.url)
    try:
        store = await opened(client, "lanes_a", timeout=0.3)
        server.pause()
        with pytest.raises(UnknownResult):
            await store.entries("m.")
        with pytest.raises(UnknownResult):
            await store.write("plan", b"1", revision=0)
    finally:
        server.resume()
        await client.close()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"max_msgs_per_subject": 5}, ["history is 5"]),
        ({"allow_msg_ttl": False, "subject_delete_marker_ttl": 0}, ["cannot expire"]),
        ({"allow_direct": True}, ["replicas"]),
        ({"subjects": ["$KV.other.>"]}, ["$KV.other.>"]),
        ({"max_age": 3_600_000_000_000}, ["all of its keys expire", "max_age is 3600 s"]),
        ({"max_bytes": 1_000_000}, ["max_bytes=1000000", "drops keys"]),
        ({"max_msgs": 50, "discard": "old"}, ["max_msgs=50", "drops keys"]),
        ({"discard": "new", "discard_new_per_subject": True}, ["refuses a second value"]),
    ],
    ids=["history", "ttl", "direct", "subjects", "age", "bytes", "messages", "second values"],
)
async def test_a_bucket_that_does_not_fit_is_refused(
    client: Client, bucket: str, config: dict[str, Any], words: list[str]
) -> None:
    wanted: dict[str, Any] = {
        "name": f"KV_{bucket}",
        "subjects": [f"$KV.{bucket}.>"],
        "max_msgs_per_subject": 1,
        "allow_msg_ttl": True,
        "subject_delete_marker_ttl": 60_000_000_000,
    }
    answer = await client.request(f"$JS.API.STREAM.CREATE.KV_{bucket}", json.dumps(wanted | config).encode(), timeout=5)
    assert "error" not in json.loads(answer.data), answer.data
    with pytest.raises(lanes.ConfigError) as refused:
        await opened(client, bucket)
    for word in [bucket, *words, "creates the bucket again"]:
        assert word in str(refused.value)


async def test_a_bucket_whose_limits_drop_nothing_is_accepted(client: Client, bucket: str) -> None:
    """Accounts may require limits: a full bucket refuses a write and keeps its keys."""
    await opened(client, bucket)
    stream = f"KV_{bucket}"
    config = json.loads((await client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=5)).data)["config"]
    config["max_bytes"] = 1_000_000
    answer = await client.request(f"$JS.API.STREAM.UPDATE.{stream}", json.dumps(config).encode(), timeout=5)
    assert "error" not in json.loads(answer.data), answer.data
    assert not await JetStreamLeaseStore(Connection(client), bucket).open()


async def test_a_write_without_a_condition_is_refused(client: Client, bucket: str) -> None:
    store = await opened(client, bucket)
    conditions: list[dict[str, Any]] = [{"revision": None}, {"revision": 0, "ttl": 0.5}, {"revision": 0, "ttl": 1.5}]
    for arguments in conditions:
        with pytest.raises(ValueError, match=r"revision|whole seconds"):
            await store.write("plan", b"", **arguments)
    for key in ("", "a..b", ".a", "a.", "a b", "a.*", "a.>", "ä"):
        with pytest.raises(ValueError, match="key"):
            await store.read(key)
    assert await store.entries("") == {}


async def test_an_invalid_bucket_name_is_refused(client: Client) -> None:
    with pytest.raises(lanes.ConfigError, match=r"'lanes_a\.b'.*letters"):
        JetStreamLeaseStore(Connection(client), "lanes_a.b")


async def test_an_account_without_jetstream_is_refused(fresh_nats: Callable[..., NatsServer]) -> None:
    server = fresh_nats(
        config="""
        accounts { A { jetstream: disabled, users: [{user: a, password: a}] }, B { jetstream: enabled } }
        no_auth_user: a
        """
    )
    client = await connect(server.url)
    try:
        with pytest.raises(lanes.LanesError, match="JetStream"):
            await opened(client, "lanes_a")
    finally:
        await client.close()


async def test_an_old_server_is_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server before 2.11 would create a bucket whose keys never expire, without an error."""
    connection = Connection(client)
    ask = connection.api

    async def old(subject: str, request: Any = None) -> dict[str, Any]:
        answer = await ask(subject, request)
        if subject == "INFO":
            del answer["api"]["level"]
        return answer

    monkeypatch.setattr(connection, "api", old)
    with pytest.raises(lanes.ConfigError, match=r"2\.11 or newer.*durable="):
        await JetStreamLeaseStore(connection, bucket_name()).open()
