"""The HTTP port of a consumer on Kafka: the CPU that the port takes, and the time of its answers.

1,000/s, 10 ms: CPU a message of all threads of a process whose port is open. Another process asks the probes and the
metrics every 5 s, which is more often than Kubernetes and Prometheus do by default. The baseline is the same process
without a port, and therefore without metrics, or with the metrics alone. At 1,000/s a process sends messages at a
steady rate. In the case of 10 ms, 1,000 handlers at once work on a backlog. The three kinds of runs take turns.

The other cases are times from the connection to the end of the answer. Another process asks the routes in turn, each
time over a new connection: beside 1,000 handlers of 10 ms, then while the broker is frozen by SIGSTOP, then after its
death by ``kill -9``. The baseline is the time of the same route of the idle consumer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, Final, Literal, get_args

from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider

import lanes
from bench.alone import alone
from bench.figures import Effort, Figure, cost, middle
from bench.kafka_broker import PARTITIONS, TIMEOUT, Backlog, Clocked, create, fill, kafka_server, until
from bench.kafka_handlers import WAITING, WAITING_MESSAGES
from bench.kafka_light import send
from bench.paced import LEAST, WARM_UP, Watch
from bench.waiting import CONCURRENCY, WAITING_KEYS, wait
from lanes import Message

CPU_GOAL: Final = 1.03
TIME_GOAL: Final = 50.0

PACE, PACED = 1_000, 5_000
"""Messages a second, and number of measured messages."""

MORE: Final = 6
"""Number of additional repeats, because the goal is near the spread of a pair of runs."""

Use = Literal["nothing", "metrics", "port"]
"""The observed part of a run."""

ASKED_EVERY: Final = 5.0
BUSY_MESSAGES, LEAST_BUSY = 600_000, 30_000
LOOKED: Final = 8.0
"""Seconds for which a consumer that waits is asked."""

PAUSE: Final = 0.01
ROUTES: Final = ("/live", "/ready", "/metrics")

Times = dict[str, list[float]]
"""Milliseconds of each answer, by the route."""


def figures(effort: Effort) -> list[Figure]:
    """Measure the CPU of the port and the time of its answers, on a new broker."""
    with kafka_server() as server:
        create(server.url, "paced")
        paced, count = Backlog(server.url, "paced", 0), max(LEAST, effort.messages(PACED))
        backlog = fill(server.url, "waiting", effort.messages(WAITING_MESSAGES), WAITING_KEYS)
        number = effort.repeats + MORE if effort.repeats > 1 else 1
        made = [
            *_costs(f"http {PACE:,}/s", lambda use: alone(_paced, paced, count, use=use), number),
            *_costs("http 10 ms", lambda use: alone(_waiting, backlog, use=use), number),
        ]
        busy = fill(server.url, "busy", max(LEAST_BUSY, effort.messages(BUSY_MESSAGES)), WAITING_KEYS)
        seconds = LOOKED * min(1.0, effort.scale)
        context = get_context("spawn")
        address, begun, ended = _free_address(), context.Event(), context.Event()
        process = context.Process(target=_probed, args=(busy, address, begun, ended))
        process.start()
        try:
            assert begun.wait(TIMEOUT), "no handler has begun"
            beside = _asked(address, ended.is_set)
            idle = _asked(address, _after(seconds))
            server.pause()
            frozen = _asked(address, _after(seconds))
            server.kill()
            dead = _asked(address, _after(seconds))
        finally:
            process.kill()
            process.join()
    for state, times in (
        (f"beside {CONCURRENCY:,} handlers", beside),
        ("with a frozen broker", frozen),
        ("without a broker", dead),
    ):
        made += [row for route in ROUTES for row in _rows(f"http {route} {state}", times[route], idle[route])]
    return made


def _costs(name: str, run: Callable[[Use], float], repeats: int) -> Iterator[Figure]:
    """Yield the cost of the port against no port, and against the metrics alone."""
    measured = [{use: run(use) for use in get_args(Use)} for _ in range(repeats)]
    for use, shown in (("nothing", ""), ("metrics", ", against the metrics")):
        pair = middle([(each["port"], each[use]) for each in measured])
        yield cost(f"{name}{shown}", "µs CPU/message", *pair).within(CPU_GOAL)


def _rows(name: str, times: list[float], idle: list[float]) -> Iterator[Figure]:
    for percentile, place in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        yield cost(f"{name}, {percentile}", "ms", _at(times, place), _at(idle, place), TIME_GOAL)


def _at(times: list[float], place: float) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * place))]


# --- CPU


def _paced(backlog: Backlog, count: int, *, use: Use) -> float:
    """Handle messages that another process sends at a steady rate, and return microseconds of CPU a message."""
    context, warm_up = get_context("spawn"), round(PACE * WARM_UP)
    ready = context.Event()
    sender = context.Process(target=send, args=(backlog, warm_up + count, PACE, ready))
    sender.start()
    watch = Watch(warm_up + count, warm_up, lambda: consumer.stop())

    async def handle(message: Message) -> None:
        watch.handled(message.value)

    async def start() -> None:
        await until(lambda: len(consumer.status().partitions) == PARTITIONS, "the partitions of the group")
        ready.set()

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(start())
            await _serve(consumer, address)

    consumer = lanes.Consumer(backlog.source(auto_offset_reset="latest"), handle)
    with _used(use) as address:
        asyncio.run(run())
    sender.join()
    return watch.load().cpu


def _waiting(backlog: Backlog, *, use: Use) -> float:
    """Handle all messages with 1,000 handlers of 10 ms at once, and return microseconds of CPU a message."""
    clocked = Clocked(backlog.count, lambda: consumer.stop())

    async def handle(message: Message) -> None:
        await wait(message)
        clocked.handled()

    consumer = lanes.Consumer(backlog.source(), handle, settings=WAITING)
    with _used(use) as address:
        asyncio.run(_serve(consumer, address))
    return clocked.cpu


async def _serve(consumer: lanes.Consumer, address: str | None) -> None:
    status = await lanes.serve(consumer, http=address)
    assert status == 0, f"the consumer ended with status {status}"


@contextmanager
def _used(use: Use) -> Iterator[str | None]:
    """Yield an address whose routes another process asks during the block; None without a port."""
    if use == "metrics":
        metrics.set_meter_provider(MeterProvider([PrometheusMetricReader()]))
    if use != "port":
        yield None
        return
    address = _free_address()
    process = get_context("spawn").Process(target=_ask_now_and_then, args=(address,))
    process.start()
    try:
        yield address
    finally:
        process.kill()
        process.join()


def _ask_now_and_then(address: str) -> None:
    while True:
        for route in ROUTES:
            try:
                _ask(address, route)
            except ConnectionError:
                # The port is not open yet, or not any more.
                break
        else:
            time.sleep(ASKED_EVERY)
            continue
        time.sleep(0.05)


# --- time of an answer


def _probed(backlog: Backlog, address: str, begun: Any, ended: Any) -> None:
    """Handle all messages with 1,000 handlers of 10 ms at once, then wait."""
    left = backlog.count

    async def handle(message: Message) -> None:
        nonlocal left
        begun.set()
        await wait(message)
        left -= 1
        if not left:
            ended.set()

    # The client and the consumer report the broker that this benchmark freezes and kills.
    logging.disable()
    consumer = lanes.Consumer(backlog.source(), handle, settings=WAITING)
    asyncio.run(_serve(consumer, address))


def _asked(address: str, done: Callable[[], bool]) -> Times:
    """Ask the routes in turn until a condition holds, and return the times."""
    times: Times = {route: [] for route in ROUTES}
    while True:
        for route in ROUTES:
            begin = time.perf_counter()
            status = _ask(address, route)
            times[route].append(1e3 * (time.perf_counter() - begin))
            assert status == 200 or (route == "/ready" and status == 503), f"{route} has answered {status}"
            time.sleep(PAUSE)
        if done():
            return times


def _ask(address: str, route: str) -> int:
    """Return the status of an answer, after its end."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), TIMEOUT) as connection:
        connection.sendall(f"GET {route} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
        answer = bytearray()
        while part := connection.recv(65_536):
            answer += part
    return int(answer.split(maxsplit=2)[1])


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"
