"""A permission that is missing at the start or withdrawn during the run stops the source with the subject."""

from __future__ import annotations

import anyio
import pytest

import lanes
from tests.jetstream.conftest import FreshStream, connect
from tests.jetstream.workload import USERS, Recorder, reload, stops

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("frequent_checks")]


@pytest.mark.parametrize("verb", ["MSG.NEXT", "ACK"])
@pytest.mark.parametrize("own", [True, False])
async def test_a_withdrawn_permission_stops_the_source(fresh_stream: FreshStream, verb: str, own: bool) -> None:
    server, stream = await fresh_stream(config=USERS.format(denied=""))
    await stream.publish(20)
    recorder = Recorder()
    url = server.url.replace("nats://", "nats://app:app@")
    client = None
    if not own:
        client = await connect(url)
    settings = lanes.Settings(max_in_flight=10, concurrency=10)
    consumer = lanes.Consumer(stream.source(where=client or url), recorder, settings=settings)
    async with stops(consumer, r"permissions violation for publish to .*grant this permission"):
        with anyio.fail_after(10):
            await recorder.reached(20)
            await stream.acknowledged()
        denied = '"$JS.API.CONSUMER.MSG.NEXT.>"' if verb == "MSG.NEXT" else '"$JS.ACK.>"'
        reload(server, USERS.format(denied=denied))
        with anyio.move_on_after(15):
            # The server reloads its file a moment after the signal.
            while consumer.ready:
                await stream.publish(20, seed=2)
                await anyio.sleep(0.1)
    if client is not None:
        await client.close()


async def test_a_missing_permission_is_refused(fresh_stream: FreshStream) -> None:
    server, stream = await fresh_stream(config=USERS.format(denied='"$JS.API.CONSUMER.INFO.>"'))
    url = server.url.replace("nats://", "nats://app:app@")
    with anyio.fail_after(4):
        with pytest.raises(lanes.SourceError, match=r"permissions violation .*consumer\.info.*; grant this permission"):
            await lanes.run(stream.source(where=url), Recorder())
