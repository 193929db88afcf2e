"""Kafka on a real broker, with a handler that does nothing or burns CPU: `lanes` compared with a plain loop.

No-op: the figure is messages a second, from the end of the first handler to the end of the last handler. The baselines
are three plain loops. Two loops consume by the same pair of calls as `lanes` and commit once a second. The tuned loop
has the setting that keeps the client from stalling (``fetch.queue.backoff.ms=5``), and the second loop has the client's
defaults. The third loop calls ``poll`` for each message, and the client commits by its defaults.

No-op, CPU: the figure is microseconds of CPU a message, of all threads of the process, in the same runs.

The cases of CPU compare the tuned loop and `lanes` with a handler that computes for a fixed time. The loop is faster
than ``lanes``.

FastStream: the baseline is FastStream's confluent broker with acknowledgement after the handler. Without FastStream the
command prints that the case needs FastStream.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, Final

from confluent_kafka import Consumer as Client

from bench.figures import Effort, Figure, cost, interleaved, rate
from bench.kafka_broker import Backlog, Clocked, broker, clocked_run, consume, fill, plainly
from lanes import Message, Settings

TUNED_GOAL: Final = 0.22
CPU_GOAL: Final = 5.0
DEFAULTS_GOAL: Final = 1.0
PEER_GOAL: Final = 20.0
KEYS, MESSAGES, PEER_MESSAGES = 10_000, 2_000_000, 100_000
BURNS: Final = {"10 µs": 10e-6, "100 µs": 100e-6}
BURN_MESSAGES: Final = 2.0
"""Seconds that all handlers of a CPU case take together."""

TUNED: Final[dict[str, Any]] = {"fetch_queue_backoff_ms": 5}


def figures(effort: Effort) -> list[Figure]:
    """Measure the cases, each interleaved with its baselines, on a new broker."""
    with broker() as url:
        backlog = fill(url, "no-op", effort.messages(MESSAGES), KEYS)
        cpu: dict[str, list[float]] = {"lanes": [], "loop": []}
        tuned, defaults, polled, figure = interleaved(
            [
                lambda: _noted(plainly(backlog, None, **TUNED), cpu["loop"]),
                lambda: plainly(backlog, None).rate,
                partial(_polled, backlog),
                lambda: _noted(clocked_run(backlog, None, Settings()), cpu["lanes"]),
            ],
            effort.repeats,
        )
        made = [
            rate("kafka no-op", "messages/s", figure, tuned, TUNED_GOAL),
            cost("kafka no-op, CPU", "µs CPU/message", median(cpu["lanes"]), median(cpu["loop"]), CPU_GOAL),
            rate("kafka no-op, loop at defaults", "messages/s", figure, defaults, DEFAULTS_GOAL),
            rate("kafka no-op, loop of poll()", "messages/s", figure, polled),
        ]
        made += [_burning(url, name, seconds, effort) for name, seconds in BURNS.items()]
        if _peer_is_there():
            backlog = fill(url, "peer", effort.messages(PEER_MESSAGES), KEYS)
            peer, figure = interleaved(
                [partial(_faststream, backlog), partial(consume, backlog, None, Settings())], effort.repeats
            )
            made.append(rate("kafka no-op, FastStream", "messages/s", figure, peer, PEER_GOAL))
    return made


def _noted(clocked: Clocked, cpu: list[float]) -> float:
    cpu.append(clocked.cpu)
    return clocked.rate


def _polled(backlog: Backlog) -> float:
    """Run the loop of the client's documentation, with one ``poll`` a message and the default settings."""
    client = Client(backlog.config())
    clocked = Clocked(backlog.count)
    client.subscribe([backlog.topic])
    left = backlog.count
    while left:
        raw = client.poll(1.0)
        if raw is not None:
            assert raw.error() is None, raw.error()
            clocked.handled()
            left -= 1
    client.close()
    return clocked.rate


def _burning(url: str, name: str, seconds: float, effort: Effort) -> Figure:
    backlog = fill(url, f"burn-{round(seconds * 1e6)}", effort.messages(round(BURN_MESSAGES / seconds)), KEYS)

    async def handler(message: Message) -> None:
        _burn(seconds)

    loop, figure = interleaved(
        [
            lambda: plainly(backlog, lambda raw: _burn(seconds), **TUNED).rate,
            partial(consume, backlog, handler, Settings()),
        ],
        effort.repeats,
    )
    return rate(f"kafka {name} of CPU", "messages/s", figure, loop)


def _burn(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _peer_is_there() -> bool:
    if importlib.util.find_spec("faststream") is not None:
        return True
    print("bench: kafka: FastStream is missing and not measured: pip install 'faststream[confluent]'", file=sys.stderr)
    return False


def _faststream(backlog: Backlog) -> float:
    # Import FastStream by name, because the package may be missing.
    faststream: Any = importlib.import_module("faststream")
    confluent: Any = importlib.import_module("faststream.confluent")

    async def main() -> float:
        ended = asyncio.Event()
        clocked = Clocked(backlog.count, ended.set)
        app = confluent.KafkaBroker(backlog.url, logger=None)
        handler: Callable[..., Any] = app.subscriber(
            backlog.topic,
            group_id=backlog.config()["group.id"],
            auto_offset_reset="earliest",
            ack_policy=faststream.AckPolicy.NACK_ON_ERROR,
        )

        @handler
        async def handle(body: bytes) -> None:
            clocked.handled()

        await app.start()
        await ended.wait()
        await app.stop()
        return clocked.rate

    return asyncio.run(main())
