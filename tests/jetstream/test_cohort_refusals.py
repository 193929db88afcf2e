"""What only an operator can mend: a member says what it is, by name, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import anyio
import pytest

import lanes
from tests.components import NatsServer
from tests.jetstream.cohort_workload import FAST, CohortStream, Log, settled
from tests.jetstream.conftest import MakeCohortStream, connect
from tests.jetstream.test_source_stops import reload

pytestmark = pytest.mark.anyio

USERS: Final = """
accounts {{ A {{ jetstream: enabled, users: [
    {{user: admin, password: admin}},
    {{user: app, password: app, permissions: {{publish: {{deny: [{denied}]}}}}}}
]}}}}
no_auth_user: admin
"""


@pytest.mark.parametrize(
    "denied",
    [
        pytest.param("$JS.API.CONSUMER.MSG.NEXT.>", marks=pytest.mark.slow, id="pulls"),
        pytest.param("$JS.ACK.>", id="acknowledgements"),
        pytest.param("$KV.>", marks=pytest.mark.slow, id="leases"),
    ],
)
async def test_a_permission_that_is_lost_in_mid_run(fresh_nats: Callable[..., NatsServer], denied: str) -> None:
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
            # The server reads its file a moment after it was told to. While it does, nobody answers for JetStream, so
            # nobody is asked whether these were stored.
            while True:
                for key in stream.a_key_each():
                    await client.publish(f"{stream.name}.{key}", b"x")
                await anyio.sleep(0.1)

    subject = re.escape(denied.removesuffix(">").casefold())
    with anyio.fail_after(20):
        with pytest.raises(lanes.SourceError, match=rf"permissions violation for publish to .{subject}.*permit it"):
            await until_it_is_denied()
    await client.close()


async def test_somebody_elses_consumer_on_a_work_queue_is_named(make_cohort_stream: MakeCohortStream) -> None:
    stream = await make_cohort_stream(retention="workqueue")
    config = {"durable_name": "mine", "ack_policy": "explicit"}
    await stream.api(f"CONSUMER.CREATE.{stream.name}.mine", {"stream_name": stream.name, "config": config})
    with anyio.fail_after(20):
        with pytest.raises(
            lanes.ConfigError, match=r"another one is in the way .*foreign consumers are 'mine'\); delete"
        ):
            await lanes.run(stream.source("a"), Log().handler("a"), settings=FAST)
    # As it was: what was created for nothing would hold its messages back.
    assert await stream.durables() == ["mine"]
