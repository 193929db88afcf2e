"""PostgreSQL as a broker: a log and a subscription against hand-written programs, on one server with its disk.

10 ms: the case of `bench.waiting` over a log. The baseline is 1,000 bare tasks over the same batched `SELECT`, with
equally frequent stores of a position. A further figure without a goal measures 16 workers that each lock one row by
`FOR UPDATE SKIP LOCKED`.

Serial: the consumer handles the messages sequentially, each for 1 ms. The baseline is a loop over the same `SELECT`
with equally frequent stores of its position.

Append: the figure is transactions a second with one message each. The baseline is the same `INSERT` into a table
without the trigger.

Light load: the figure is the time from the call of `append` to the handler, while other connections write. The appender
calls `Log.notify` after each COMMIT. The baseline is a loop that listens, and selects after each notification of the
appender. The polled rows, as information, have an appender without notifications, and the same baseline. Idle: the
figure is the percent of a core without a message.

Stuck key: the figure is the p99 of the other keys while the handler of one key hangs. The baseline is the same run
without the hang.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any, Final

from psycopg import AsyncConnection, Connection

from bench.alone import alone
from bench.figures import Effort, Figure, Pair, cost, interleaved, middle, pairs, rate
from bench.paced import IDLE, IDLE_GOAL, SETTLED_IN, WARM_UP, Load, Watch, due, pause
from bench.waiting import CONCURRENCY, STUCK_GOAL, STUCK_KEY, WAIT, tuned_run
from lanes import Consumer, Message, Settings
from lanes_postgres import Log, PostgresSource, Record, migrate
from lanes_postgres.log.reading import LogTables, Wanted
from tests.components import PostgresServer

WAITING_GOAL, SERIAL_GOAL, APPEND_GOAL, P50_GOAL = 0.7, 0.9, 0.8, 1.5
WAITING_MESSAGES, WAITING_KEYS, FETCH = 40_000, 10_000, 2_000
SERIAL_MESSAGES, SERIAL_WAIT = 2_000, 0.001
APPENDS, APPENDERS = 2_000, (1, 16)
LIGHT_RATE, LIGHT_SECONDS, WRITERS, WRITES = 50, 6.0, 4, 50
STUCK_RATE, STUCK_SECONDS, STUCK_KEYS, STUCK_WAIT = 1_000, 4.0, 100, 0.001
WORKERS, WORKED = 16, 2_000
STORE_EVERY: Final = 0.05
"""Seconds between two positions that the baselines store, as often as a consumer with the default settings."""

_BARE: Final = (
    "INSERT INTO bare (batch, index, log, partition, run, slot, time, key, subject, headers, value) VALUES "
    "(nextval('bare_batches'), 0, 1, %s, 1, %s, clock_timestamp(), %s, %s, %s::jsonb, %s)"
)
_STORE: Final = "UPDATE positions SET position = %s WHERE name = 'loop'"
_TABLES: Final = """
    CREATE TABLE bare (LIKE lanes.lanes_log_messages INCLUDING ALL);
    CREATE SEQUENCE bare_batches;
    CREATE TABLE positions (name text PRIMARY KEY, position bigint NOT NULL);
    INSERT INTO positions VALUES ('loop', 0);
    CREATE TABLE told (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, value bytea NOT NULL);
    CREATE TABLE others (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, value bytea NOT NULL);
    CREATE TABLE work (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, value bytea NOT NULL)
"""

_names = itertools.count()


def figures(effort: Effort) -> list[Figure]:
    """Measure the cases, each with its baseline, on a new server that writes to its disk before a COMMIT returns."""
    settings = ("fsync=on", "max_connections=100", "max_wal_size=4GB")
    with PostgresServer(settings=settings) as server:
        url = server.url
        with Connection.connect(url) as connection:
            migrate(connection)
            connection.execute(_TABLES)
        return [*_waiting(url, effort), _serial(url, effort), *_appends(url, effort), *_light(url, effort)]


# --- 10 ms, serial


def _waiting(url: str, effort: Effort) -> list[Figure]:
    count = effort.messages(WAITING_MESSAGES)
    log = _filled(url, count, partitions=64, keys=WAITING_KEYS)
    settings = Settings(concurrency=CONCURRENCY, max_in_flight=4 * CONCURRENCY)
    worked = effort.messages(WORKED)
    lanes, tasks, skip_locked = interleaved(
        [
            lambda: _consumed(url, log, count, WAIT, settings),
            lambda: tuned_run(_tasks(url, log, count)),
            lambda: tuned_run(_workers(url, worked)),
        ],
        effort.repeats,
    )
    return [
        rate("postgres-log 10 ms handler", "messages/s", lanes, tasks, WAITING_GOAL),
        rate(f"postgres-log {WORKERS} workers with SKIP LOCKED", "messages/s", skip_locked, lanes),
    ]


def _serial(url: str, effort: Effort) -> Figure:
    count = effort.messages(SERIAL_MESSAGES)
    log = _filled(url, count, partitions=1, keys=1)
    lanes, loop = interleaved(
        [
            lambda: _consumed(url, log, count, SERIAL_WAIT, Settings(order="serial")),
            lambda: tuned_run(_loop(url, log, count)),
        ],
        effort.repeats,
    )
    return rate("postgres-log serial, 1 ms handler", "messages/s", lanes, loop, SERIAL_GOAL)


def _filled(url: str, count: int, *, partitions: int, keys: int) -> Log:
    log = Log(f"log-{next(_names)}", partitions=partitions)
    with Connection.connect(url) as connection:
        log.create(connection)
    with Connection.connect(url) as connection:
        for first in range(0, count, FETCH):
            numbers = range(first, min(first + FETCH, count))
            log.append(connection, [Record(b"%d" % number, b"key-%d" % (number % keys)) for number in numbers])
            connection.commit()
    with Connection.connect(url, autocommit=True) as connection:
        while connection.execute("SELECT lanes.lanes_log_sequence(5000)").fetchone() != (0,):
            pass
        connection.execute("VACUUM ANALYZE lanes.lanes_log_messages, lanes.lanes_log_entries")
        connection.execute("CHECKPOINT")
    return log


def _consumed(url: str, log: Log, count: int, seconds: float, settings: Settings) -> float:
    """Return messages a second of ``lanes``, from the begin of the first handler to the end of the last."""
    left, begin, end = count, 0.0, 0.0

    async def handler(message: Message) -> None:
        nonlocal left, begin, end
        begin = begin or time.perf_counter()
        await asyncio.sleep(seconds)
        left -= 1
        if not left:
            end = time.perf_counter()
            consumer.stop()

    consumer = Consumer(PostgresSource(url, log, subscription=f"s{next(_names)}"), handler, settings=settings)
    tuned_run(consumer.run())
    return count / (end - begin)


class _Reader:
    """Reads a log by the batched ``SELECT`` of the adapter."""

    def __init__(self, connection: AsyncConnection[Any], tables: LogTables) -> None:
        self._connection = connection
        self._tables = tables
        self._next = dict.fromkeys(range(tables.partitions), 0)

    @classmethod
    async def open(cls, url: str, log: Log) -> _Reader:
        connection = await AsyncConnection.connect(url, autocommit=True)
        row = await (
            await connection.execute("SELECT id, partitions FROM lanes.lanes_logs WHERE name = %s", (log.name,))
        ).fetchone()
        assert row is not None
        return cls(connection, LogTables("lanes", row[0], row[1]))

    async def read(self) -> list[bytes]:
        share = max(1, FETCH // len(self._next))
        wanted = [Wanted(partition, position, share) for partition, position in self._next.items()]
        values = []
        for partition, rows in (await self._tables.fetch(self._connection, wanted)).items():
            self._next[partition] = rows[-1].position + 1
            values += [row.value for row in rows]
        return values

    async def close(self) -> None:
        await self._connection.close()


async def _storing(url: str, position: Callable[[], int]) -> None:
    async with await AsyncConnection.connect(url, autocommit=True) as connection:
        while True:
            await asyncio.sleep(STORE_EVERY)
            await connection.execute(_STORE, (position(),))


async def _tasks(url: str, log: Log, count: int) -> float:
    reader = await _Reader.open(url, log)
    queue: asyncio.Queue[bytes] = asyncio.Queue(4 * CONCURRENCY)
    done = 0
    over = asyncio.Event()

    async def feed() -> None:
        while values := await reader.read():
            for value in values:
                await queue.put(value)

    async def work() -> None:
        nonlocal done
        while True:
            await queue.get()
            await asyncio.sleep(WAIT)
            done += 1
            if done == count:
                over.set()

    storing = asyncio.create_task(_storing(url, lambda: done))
    begin = time.perf_counter()
    tasks = [asyncio.create_task(feed()), *(asyncio.create_task(work()) for _ in range(CONCURRENCY))]
    await over.wait()
    seconds = time.perf_counter() - begin
    await _cancel(storing, *tasks)
    await reader.close()
    return count / seconds


async def _loop(url: str, log: Log, count: int) -> float:
    reader = await _Reader.open(url, log)
    done, begin = 0, time.perf_counter()
    stored = begin
    async with await AsyncConnection.connect(url, autocommit=True) as connection:
        while values := await reader.read():
            for _ in values:
                await asyncio.sleep(SERIAL_WAIT)
                done += 1
                if time.perf_counter() >= stored + STORE_EVERY:
                    await connection.execute(_STORE, (done,))
                    stored = time.perf_counter()
    seconds = time.perf_counter() - begin
    await reader.close()
    assert done == count
    return count / seconds


async def _workers(url: str, count: int) -> float:
    """Return messages a second of workers that hold a row lock while they handle a message."""
    async with await AsyncConnection.connect(url) as connection:
        await connection.execute("TRUNCATE work")
        await connection.execute("INSERT INTO work (value) SELECT 'x' FROM generate_series(1, %s)", (count,))

    async def work() -> None:
        async with await AsyncConnection.connect(url) as connection:
            while True:
                async with connection.transaction():
                    cursor = await connection.execute("SELECT id FROM work ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED")
                    row = await cursor.fetchone()
                    if row is None:
                        return
                    await asyncio.sleep(WAIT)
                    await connection.execute("DELETE FROM work WHERE id = %s", row)

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(WORKERS):
            tasks.create_task(work())
    return count / (time.perf_counter() - begin)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# --- append


def _appends(url: str, effort: Effort) -> list[Figure]:
    log = _filled(url, 1, partitions=64, keys=1)
    made = []
    for appenders in APPENDERS:
        count = effort.messages(APPENDS)
        ours, bare = interleaved(
            [
                partial(_appended, url, appenders, count, partial(_append, log)),
                partial(_appended, url, appenders, count, _insert),
            ],
            effort.repeats,
        )
        name = "appender" if appenders == 1 else "appenders"
        made.append(rate(f"postgres-log append, {appenders} {name}", "transactions/s", ours, bare, APPEND_GOAL))
    return made


_VALUE: Final = bytes(200)


async def _append(log: Log, connection: AsyncConnection[Any], key: bytes) -> None:
    await log.append(connection, [Record(_VALUE, key)])


async def _insert(connection: AsyncConnection[Any], key: bytes) -> None:
    await connection.execute(_BARE, (hash(key) % 64, hash(key) % 65_536, key, "bare", None, _VALUE))


def _appended(
    url: str, appenders: int, count: int, append: Callable[[AsyncConnection[Any], bytes], Awaitable[None]]
) -> float:
    async def task(numbers: list[int]) -> None:
        async with await AsyncConnection.connect(url) as connection:
            for number in numbers:
                async with connection.transaction():
                    await append(connection, b"key-%d" % number)

    async def main() -> float:
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for each in range(appenders):
                tasks.create_task(task(list(range(each, count, appenders))))
        return count / (time.perf_counter() - begin)

    figure = asyncio.run(main())
    with Connection.connect(url, autocommit=True) as connection:
        connection.execute("TRUNCATE bare")
        connection.execute("SELECT lanes.lanes_log_sequence(5000)")
    return figure


# --- light load


def _light(url: str, effort: Effort) -> list[Figure]:
    idle = median(alone(_idle, url) for _ in range(effort.repeats))
    count = max(20, effort.messages(round(LIGHT_RATE * LIGHT_SECONDS)))
    ours: list[Load] = []
    polled: list[Load] = []
    plain: list[Load] = []
    for _ in range(effort.repeats):
        ours.append(alone(_paced, url, count, LIGHT_RATE, by="lanes"))
        plain.append(alone(_paced, url, count, LIGHT_RATE, by="listen"))
        polled.append(alone(_paced, url, count, LIGHT_RATE, by="polled"))
    name = f"postgres-log {LIGHT_RATE}/s"
    stuck = middle(_stuck(url, effort))
    p50, *rest = _rows(name, ours, plain)
    return [
        cost("postgres-log idle", "% of a core", idle, IDLE_GOAL, IDLE_GOAL),
        p50.within(P50_GOAL),
        *rest,
        *_rows(f"{name} polled", polled, plain),
        cost("postgres-log stuck key", "ms, p99 of the others", *stuck).within(STUCK_GOAL),
    ]


def _rows(name: str, ours: list[Load], plain: list[Load]) -> list[Figure]:
    return [
        cost(f"{name} p50", "ms", _of(ours, "p50"), _of(plain, "p50")),
        cost(f"{name} p99", "ms", _of(ours, "p99"), _of(plain, "p99")),
        cost(f"{name} CPU", "µs CPU/message", median(load.cpu for load in ours), median(load.cpu for load in plain)),
    ]


def _of(loads: list[Load], name: str) -> float:
    return 1e3 * median(float(getattr(load, name)) for load in loads)


def _stuck(url: str, effort: Effort) -> list[Pair]:
    count = max(100, effort.messages(round(STUCK_RATE * STUCK_SECONDS)))

    def run(*, hangs: bool) -> float:
        load: Load = alone(_paced, url, count, STUCK_RATE, by="polled", seconds=STUCK_WAIT, hangs=hangs)
        return 1e3 * load.p99

    return pairs(partial(run, hangs=True), partial(run, hangs=False), effort.repeats)


def _made(url: str, partitions: int = 64) -> Log:
    log = Log(f"log-{time.time_ns()}", partitions=partitions)
    with Connection.connect(url) as connection:
        log.create(connection)
    return log


def _idle(url: str) -> float:
    """Return the percent of a core that a consumer of an empty log needs."""

    async def handler(message: Message) -> None:
        raise AssertionError(message)

    async def main() -> float:
        consumer = Consumer(PostgresSource(url, _made(url), subscription="idle"), handler)
        running = asyncio.create_task(consumer.run())
        await asyncio.sleep(SETTLED_IN)
        begin = time.process_time()
        await asyncio.sleep(IDLE)
        used = time.process_time() - begin
        consumer.stop()
        await running
        return 100 * used / IDLE

    return asyncio.run(main())


def _paced(url: str, count: int, rate: int, *, by: str, seconds: float = 0.0, hangs: bool = False) -> Load:
    """Handle messages that another process appends at a steady rate, and return their cost."""
    warm_up = round(rate * WARM_UP)
    log = _made(url)
    ready = get_context("spawn").Event()
    name = None if by == "listen" else log.name
    sending = (url, name, warm_up + count, rate, by == "lanes", ready)
    sender = get_context("spawn").Process(target=_send, args=sending)
    sender.start()
    try:
        if by == "listen":
            return asyncio.run(_by_listen(url, warm_up + count, warm_up, ready))
        return asyncio.run(_by_lanes(url, log, warm_up + count, warm_up, ready, seconds, hangs=hangs))
    finally:
        sender.join()


async def _by_lanes(url: str, log: Log, count: int, warm_up: int, ready: Any, seconds: float, *, hangs: bool) -> Load:
    over = asyncio.Event()
    # All messages of the stuck key but the first wait until the others have ended.
    others = count - (len(range(0, count, STUCK_KEYS)) if hangs else 0)
    watch = Watch(others, min(warm_up, others - 1), over.set)

    async def handle(message: Message) -> None:
        if hangs and message.key == STUCK_KEY:
            await over.wait()
            return
        if seconds:
            await asyncio.sleep(seconds)
        watch.handled(message.value)

    consumer = Consumer(PostgresSource(url, log, subscription="light"), handle)
    running = asyncio.create_task(consumer.run())
    while not consumer.ready or len(consumer.status().partitions) < 64:  # noqa: ASYNC110  # no event tells it
        await asyncio.sleep(0.05)
    ready.set()
    await over.wait()
    consumer.stop()
    await running
    return watch.load()


async def _by_listen(url: str, count: int, warm_up: int, ready: Any) -> Load:
    over = asyncio.Event()
    watch = Watch(count, warm_up, over.set)
    listening = await AsyncConnection.connect(url, autocommit=True)
    reading = await AsyncConnection.connect(url, autocommit=True)
    row = await (await reading.execute("SELECT coalesce(max(id), 0) FROM told")).fetchone()
    last = row[0] if row is not None else 0
    await listening.execute("LISTEN told")
    ready.set()
    async for _ in listening.notifies():
        rows = await (await reading.execute("SELECT id, value FROM told WHERE id > %s ORDER BY id", (last,))).fetchall()
        for last, value in rows:  # noqa: B007
            watch.handled(value)
        if over.is_set():
            break
    await listening.close()
    await reading.close()
    return watch.load()


def _send(url: str, name: str | None, count: int, rate: int, notifies: bool, ready: Any) -> None:
    """Append messages at a steady rate, concurrently with other writers, as soon as the consumer is ready."""
    assert ready.wait(60), "the consumer was not ready"
    time.sleep(0.5)
    asyncio.run(_sending(url, name, count, rate, notifies))


async def _sending(url: str, name: str | None, count: int, rate: int, notifies: bool) -> None:
    async def write() -> None:
        async with await AsyncConnection.connect(url, autocommit=True) as connection:
            while True:
                await connection.execute("INSERT INTO others (value) VALUES (%s)", (_VALUE,))
                await asyncio.sleep(1 / WRITES)

    writers = [asyncio.create_task(write()) for _ in range(WRITERS)]
    log = None if name is None else Log(name)
    async with await AsyncConnection.connect(url) as connection:
        begin, sent = time.monotonic(), 0
        while sent < count:
            for number in range(sent, due(begin, rate, count)):
                key, value = b"key-%d" % (number % STUCK_KEYS), b"%d" % time.time_ns()
                async with connection.transaction():
                    if log is not None:
                        await log.append(connection, [Record(value, key)])
                    else:
                        await connection.execute("INSERT INTO told (value) VALUES (%s)", (value,))
                        await connection.execute("NOTIFY told")
                if log is not None and notifies:
                    await log.notify(connection)
                sent = number + 1
            await asyncio.sleep(pause(begin, rate, sent))
    await _cancel(*writers)
