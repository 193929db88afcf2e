"""The permissions that docs/reference/jetstream.md lists are sufficient, and a missing one is named."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import anyio
import pytest
from nats.aio.client import Client

import lanes
from lanes_jetstream import Cohort, JetStreamSource, subject_token
from tests.components import NatsServer
from tests.jetstream.cohort_workload import FAST, LEASE, CohortStream, Log, members, settled
from tests.jetstream.conftest import connect
from tests.jetstream.workload import USERS, reload, until

pytestmark = pytest.mark.anyio


PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "jetstream.md").read_text()


COHORT, DURABLE = re.findall(r"^```text\n(permissions: \{\n.*?^\})\n```", PAGE, re.MULTILINE | re.DOTALL)


STREAM, PARTITIONS, ORDERS = "ORDERS", 4, 80


def url(server: NatsServer, user: str) -> str:
    return server.url.replace("nats://", f"nats://{user}:secret@")


Start = Callable[[str], Awaitable[tuple[NatsServer, Client]]]


@pytest.fixture
async def start(fresh_nats: Callable[..., NatsServer]) -> AsyncIterator[Start]:
    """Starts a server with the page's stream, whose user ``app`` has these permissions, and an unrestricted client."""
    clients: list[Client] = []

    async def make(permissions: str) -> tuple[NatsServer, Client]:
        server = fresh_nats(
            config=f"""
            accounts {{ SHOP {{ jetstream: enabled, users: [
                {{user: admin, password: secret}}
                {{user: app, password: secret, {permissions}}}
            ]}}}}
            """
        )
        client = await connect(url(server, "admin"))
        clients.append(client)
        divide = {"src": "orders.*", "dest": f"orders.{{{{partition({PARTITIONS},1)}}}}.{{{{wildcard(1)}}}}"}
        stream = {"name": STREAM, "subjects": ["orders.*"], "subject_transform": divide}
        await client.request(f"$JS.API.STREAM.CREATE.{STREAM}", json.dumps(stream).encode(), timeout=5)
        return server, client

    yield make
    for client in clients:
        await client.close()


def member_of(server: NatsServer, name: str = "a") -> JetStreamSource:
    cohort = Cohort("billing", member=name, lease=LEASE)
    return JetStreamSource(url(server, "app"), stream=STREAM, cohort=cohort, key=subject_token(2))


async def publish(client: Client) -> None:
    for number in range(ORDERS):
        await client.jetstream().publish(f"orders.customer{number % 20}", b"x")


async def unacknowledged(client: Client) -> int:
    answer = json.loads((await client.request(f"$JS.API.CONSUMER.LIST.{STREAM}", b"", timeout=5)).data)
    return sum(info["num_ack_pending"] + info["num_pending"] for info in answer["consumers"])


async def test_the_listed_permissions_suffice_for_a_cohort(start: Start) -> None:
    """Two members join, share, take over from themselves after a reconnect, and leave."""
    server, admin = await start(COHORT)
    log = Log()
    a, b = (lanes.Consumer(member_of(server, name), log.handler(name), settings=FAST) for name in "ab")
    async with members() as running:
        running.join(a)
        await settled(a, partitions=PARTITIONS)
        await publish(admin)
        await log.handled(ORDERS)
        running.join(b)
        await settled(a, b, partitions=PARTITIONS)
        server.kill()
        await until(lambda: not admin.is_connected)
        server.start()
        await until(lambda: admin.is_connected)
        await publish(admin)
        await log.handled(2 * ORDERS)
        await running.leave(a)
        await settled(b, partitions=PARTITIONS)
    assert log.violations == []
    assert await unacknowledged(admin) == 0


async def test_the_listed_permissions_suffice_for_a_durable(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """The source creates its consumer, and resets it at the second start."""
    caplog.set_level(logging.INFO, "lanes.jetstream")
    server, admin = await start(DURABLE)
    log, again, never = Log(), Log(), anyio.Event()

    def source() -> JetStreamSource:
        return JetStreamSource(url(server, "app"), stream=STREAM, durable="billing", key=subject_token(2))

    async def hang(message: lanes.Message) -> None:
        await never.wait()

    async with members() as running:
        await publish(admin)
        crashing = lanes.Consumer(source(), log.handler("a", hang), settings=FAST)
        running.join(crashing)
        await until(lambda: len(log.runs) == 20)
        await running.crash(crashing)
        running.join(lanes.Consumer(source(), again.handler("a"), settings=FAST))
        await again.handled(ORDERS)
    assert "early redelivery is by RESET" in caplog.text
    assert again.violations == []
    assert await unacknowledged(admin) == 0


@pytest.mark.parametrize(
    "subject",
    ["$KV.lanes_ORDERS_lanes.>", "$JS.API.CONSUMER.NAMES.ORDERS", "$JS.API.CONSUMER.CREATE.ORDERS.>"],
    ids=["bucket", "names", "create"],
)
async def test_a_missing_permission_is_refused_with_its_subject(start: Start, subject: str) -> None:
    """The error names the first denied subject, without the user's name and password."""
    publishing, subscribing = COHORT.split("subscribe")
    assert f'"{subject}"' in publishing
    server, _ = await start(publishing.replace(f'"{subject}"', "") + "subscribe" + subscribing)
    named = re.escape(subject.removesuffix(">"))
    with pytest.raises(lanes.SourceError, match=f"(?i){named}.*grant this permission") as refused:
        with anyio.fail_after(20):
            await lanes.run(member_of(server), Log().handler("a"))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "denied",
    [
        pytest.param("$JS.API.CONSUMER.MSG.NEXT.>", marks=pytest.mark.slow, id="pulls"),
        pytest.param("$JS.ACK.>", id="acknowledgements"),
        pytest.param("$KV.>", marks=pytest.mark.slow, id="leases"),
    ],
)
async def test_a_withdrawn_permission_stops_a_member(fresh_nats: Callable[..., NatsServer], denied: str) -> None:
    server = fresh_nats(config=USERS.format(denied=""))
    client = await connect(server.url)
    stream, log = CohortStream(server.url, client, "S"), Log()
    await stream.create()
    where = server.url.replace("nats://", "nats://app:app@")
    consumer = lanes.Consumer(stream.source("a", where=where), log.handler("a"), settings=FAST)

    async def until_it_is_denied() -> None:
        async with consumer:
            await settled(consumer, partitions=4)
            await stream.publish(*stream.a_key_each())
            await log.handled(4)
            reload(server, USERS.format(denied=f'"{denied}"'))
            # The server reloads its file a moment after the signal. Meanwhile JetStream does not answer, so the
            # publishes ask for no confirmation.
            while True:
                for key in stream.a_key_each():
                    await client.publish(f"{stream.name}.{key}", b"x")
                await anyio.sleep(0.1)

    subject = re.escape(denied.removesuffix(">").casefold())
    with anyio.fail_after(20):
        with pytest.raises(
            lanes.SourceError, match=rf"permissions violation for publish to .{subject}.*grant this permission"
        ):
            await until_it_is_denied()
    await client.close()
