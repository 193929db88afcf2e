"""`lanes` compared with FastStream's NATS subscribers, with a no-op handler on a real server: messages a second.

The baselines are FastStream's push subscriber, and its pull subscriber on a durable with the default batch size, as its
documentation recommends. Both subscribers acknowledge each message, as `lanes` does. Both subscribers receive a tenth
of the messages, so that a run does not take longer than a run of `lanes`. The time starts at the first message, and
ends at the last message of FastStream or the last acknowledgement of `lanes`.

Without FastStream (``pip install 'faststream[nats]'``) the command does not measure the case.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
import time
import warnings
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count as count_from
from typing import Any, Final

from nats.aio.client import Client

from bench.figures import Effort, Figure, interleaved, rate
from bench.jetstream import STREAM, connected, fill, through_lanes
from tests.components import running

GOAL: Final = 20.0
MESSAGES: Final = 50_000
OF_THEM: Final = 0.1
"""The share of the messages that FastStream gets."""


def figures(effort: Effort) -> list[Figure]:
    """Measure the cases, interleaved, on a new server. Without FastStream the list is empty."""
    if importlib.util.find_spec("faststream") is None:
        print("bench: without FastStream nothing is measured: pip install 'faststream[nats]'", file=sys.stderr)
        return []
    count = effort.messages(MESSAGES)
    fewer = max(1, round(count * OF_THEM))
    number = count_from(1)
    with running("nats") as urls:
        url = urls["nats"]
        asyncio.run(fill(url, count))

        def lanes() -> float:
            durable = f"lanes-{next(number)}"
            return asyncio.run(connected(url, lambda client: through_lanes(client, durable, count)))

        def faststream(*, pull: bool) -> float:
            durable = f"faststream-{next(number)}"
            return asyncio.run(connected(url, lambda client: _faststream(client, url, durable, fewer, pull=pull)))

        figure, pulled, pushed = interleaved(
            [lanes, partial(faststream, pull=True), partial(faststream, pull=False)], effort.repeats
        )
    return [
        rate("jetstream-faststream pull subscriber", "messages/s", figure, pulled, GOAL),
        rate("jetstream-faststream push subscriber", "messages/s", figure, pushed),
    ]


async def _faststream(client: Client, url: str, durable: str, count: int, *, pull: bool) -> float:
    # Import FastStream by name, because the package may be missing.
    nats: Any = importlib.import_module("faststream.nats")
    broker = nats.NatsBroker(url, logger=None)
    stream = nats.JStream(STREAM, declare=False)
    done = asyncio.Event()
    handled, first = 0, 0.0

    async def handle(body: bytes) -> None:
        nonlocal handled, first
        if not handled:
            first = time.perf_counter()
        handled += 1
        if handled == count:
            done.set()

    with warnings.catch_warnings():
        # FastStream warns that several processes cannot share a push consumer, but only one process runs here.
        warnings.simplefilter("ignore", RuntimeWarning)
        options = {"pull_sub": nats.PullSub()} if pull else {}
        subscribe: Callable[..., Any] = broker.subscriber("bench.*", stream=stream, durable=durable, **options)
        subscribe(handle)
    start: Callable[[], Awaitable[None]] = broker.start
    await start()
    await done.wait()
    seconds = time.perf_counter() - first
    await broker.stop()
    await client.jetstream().delete_consumer(STREAM, durable)
    return count / seconds
