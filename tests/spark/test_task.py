"""A task of Spark as a plain generator: its order, its rows, its errors and its end; no Spark and no JVM run."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

import lanes
from lanes.errors import ConfigError
from lanes_spark import run_task
from lanes_spark.task.job import begin
from lanes_spark.task.task import AHEAD
from memsource import MemoryBroker, MemoryDeadLetters
from tests.fakes.support import acknowledge
from tests.spark.rows import ONCE, SCHEMA, Seen, batches, expected, job, rows

COUNT = 400


def handlers(seen: Seen) -> dict[str, tuple[Any, lanes.Settings]]:
    async def awaited(message: lanes.Message) -> None:
        if message.position % 5 == 0:
            await anyio.lowlevel.checkpoint()
        seen.note(message)

    def plain(message: lanes.Message) -> None:
        seen.note(message)

    async def batch(messages: list[lanes.Message]) -> None:
        for message in messages:
            seen.note(message)

    return {
        "async": (awaited, lanes.Settings()),
        "in threads": (plain, lanes.Settings(concurrency=4)),
        "inline": (plain, lanes.Settings(sync_handlers="inline")),
        "batch": (batch, lanes.Settings(batch=16)),
    }


def summary(out: list[Any]) -> dict[str, int]:
    """Return the counts of the last row; earlier rows have no counts."""
    counted = [one for batch in out for one in batch.to_pylist() if one["delivered"] is not None]
    assert counted == out[-1].to_pylist()
    return {name: count for name, count in counted[0].items() if name != "result"}


def results(out: list[Any]) -> list[dict[str, Any]]:
    return [one["result"] for batch in out for one in batch.to_pylist() if one["result"] is not None]


@pytest.mark.parametrize("kind", ["async", "in threads", "inline", "batch"])
def test_every_message_is_handled_once_and_in_order_within_a_key(kind: str) -> None:
    seen = Seen()
    handler, settings = handlers(seen)[kind]
    out = list(run_task(batches(rows(COUNT)), job(handler, settings=settings)))
    assert seen.by_key == expected(rows(COUNT))
    assert summary(out) == {"delivered": COUNT, "finished": COUNT, "dead_lettered": 0}


def test_a_task_without_rows_reports_zero_messages() -> None:
    out = list(run_task(batches(rows(3)[:0]), job(lambda message: None)))
    assert summary(out) == {"delivered": 0, "finished": 0, "dead_lettered": 0}
    assert summary(list(run_task([next(batches(rows(1))).slice(0, 0)], job(lambda message: None))))["delivered"] == 0


def test_messages_in_flight_are_bounded() -> None:
    size, bound = 20, 30
    finished, most = 0, 0
    reached = 0

    async def handler(message: lanes.Message) -> None:
        nonlocal finished
        await anyio.lowlevel.checkpoint()
        finished += 1

    def counted() -> Iterator[Any]:
        nonlocal most, reached
        for number, batch in enumerate(batches(rows(1_000), size=size)):
            most = max(most, number * size - finished)
            yield batch

    settings = lanes.Settings(concurrency=bound, max_in_flight=bound)
    list(run_task(counted(), job(handler, settings=settings)))
    assert finished == 1_000
    assert size < most <= AHEAD * size + bound


def test_bytes_in_flight_are_bounded() -> None:
    running = most = 0

    async def handler(message: lanes.Message) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await anyio.sleep(0.001)
        running -= 1

    large = [one | {"value": b"x" * 1_000, "headers": None} for one in rows(60, keys=1_000)]
    list(run_task(batches(large), job(handler, settings=lanes.Settings(max_in_flight_bytes=5_000))))
    # One received batch may overshoot.
    assert 2 <= most <= 10


def test_a_key_that_moved_to_another_partition_is_handled_in_order() -> None:
    seen = Seen()

    async def handler(message: lanes.Message) -> None:
        # Later messages take less time, so concurrent handlers would end in the wrong order.
        for _ in range(40 - message.position):
            await anyio.lowlevel.checkpoint()
        seen.note(message)

    one = rows(1)[0] | {"key": b"moved"}
    moved = [one | {"partition": number // 10, "offset": number % 10, "era": number // 10} for number in range(40)]
    list(run_task(batches(moved, size=15, schema=pa.schema([*SCHEMA, ("era", pa.int32())])), job(handler)))
    assert [call[:2] for call in seen.calls] == [(each["partition"], each["offset"]) for each in moved]


# --- what comes back

RESULTS = pa.schema([("position", pa.int64()), pa.field("text", pa.string(), nullable=False)])


def test_results_of_handlers_become_rows() -> None:
    def handler(message: lanes.Message) -> Any:
        one = {"position": message.position, "text": message.value.decode()}
        return {0: None, 1: one, 2: [one, one]}[message.partition.id.number]

    out = list(run_task(batches(rows(30)), job(handler, results=RESULTS)))
    wanted = [
        {"position": one["offset"], "text": one["value"].decode()} for one in rows(30) for _ in range(one["partition"])
    ]
    assert sorted(results(out), key=str) == sorted(wanted, key=str)
    assert summary(out)["finished"] == 30


def test_results_of_handlers_are_not_kept_in_messages() -> None:
    """Only the source sets the token of a message."""
    handled: list[lanes.Message] = []

    def handler(message: lanes.Message) -> dict[str, object]:
        handled.append(message)
        return {"position": message.position, "text": ""}

    out = list(run_task(batches(rows(6)), job(handler, results=RESULTS)))
    assert len(results(out)) == 6 and [message.token for message in handled] == [None] * 6


def test_only_counted_results_of_a_batch_become_rows() -> None:
    calls = 0
    broker = MemoryBroker()

    async def handler(messages: list[lanes.Message]) -> list[object]:
        nonlocal calls
        calls += 1
        returned: list[object] = [{"position": message.position, "text": f"call {calls}"} for message in messages]
        if calls == 1:
            # All messages have one lane: those after the failure run again, and return another row.
            returned[2] = lanes.Nak(delay=0)
        elif messages[-1].position == 8:
            # The message returned a row in its first call, which did not count.
            raise lanes.Term("no")
        return returned

    settings = lanes.Settings(batch=5, concurrency=1)
    task = job(handler, settings=settings, results=RESULTS, dead_letters=lambda: MemoryDeadLetters(broker))
    out = list(run_task(batches(rows(5, partitions=1, keys=1)), task))
    assert [(one["position"], one["text"]) for one in results(out)] == [
        (0, "call 1"),
        (2, "call 1"),
    ]
    assert [letter.position for letter in broker.dead_letters] == [4, 6, 8]


def test_a_message_with_a_dead_letter_has_no_row_of_results() -> None:
    broker = MemoryBroker()

    async def handler(message: lanes.Message) -> dict[str, object]:
        if message.position == 4:
            raise ValueError("no")
        return {"position": message.position, "text": ""}

    task = job(handler, results=RESULTS, settings=ONCE, dead_letters=lambda: MemoryDeadLetters(broker))
    out = list(run_task(batches(rows(6, partitions=1)), task))
    assert sorted(one["position"] for one in results(out)) == [0, 2, 6, 8, 10]
    assert summary(out) == {"delivered": 6, "finished": 6, "dead_lettered": 1}
    (letter,) = broker.dead_letters
    assert (letter.source, letter.partition, letter.position, letter.error_type) == ("orders", 0, 4, "ValueError")
    assert letter.timestamp == 1_700_000_002.0


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ("text", "returned a str at orders/0 position 0"),
        (
            {"position": "x", "text": ""},
            "orders/0 position 0 does not fit.*'position' is int64, and the value is a str",
        ),
        ({"position": 2**70, "text": ""}, "'position' is int64, and the value is a int"),
        ({"position": 1, "text": b"\xff"}, "'text' is string, and the value is a bytes"),
        ({"position": 1, "text": None}, "the column 'text' is null or missing"),
        ({"position": 1}, "the column 'text' is null or missing"),
        ({"position": 1, "text": "", "more": 1}, "the column 'more', which is not among position, text"),
    ],
)
def test_a_row_that_does_not_fit_stops_the_task_and_names_the_message(returned: object, named: str) -> None:
    task = job(lambda message: returned, results=RESULTS)
    with pytest.raises(lanes.LanesError, match=named):
        list(run_task(batches(rows(1)), task))


# --- failures, and what is left behind


def test_retries_are_those_of_a_live_consumer() -> None:
    seen = Seen()

    async def handler(message: lanes.Message) -> None:
        seen.note(message)
        if message.position == 2 and message.attempt < 3:
            raise lanes.Nak(delay=0)

    list(run_task(batches(rows(10, partitions=1, keys=1)), job(handler)))
    assert [position for _, position, _ in seen.calls] == [0, 2, 2, 2, *range(4, 20, 2)]


def test_a_message_that_is_given_up_fails_the_task() -> None:
    def handler(message: lanes.Message) -> None:
        raise ValueError("no")

    with pytest.raises(lanes.HandlerHalted, match="position 0 with ValueError: no"):
        list(run_task(batches(rows(500)), job(handler, settings=ONCE)))


@pytest.mark.timeout(20)
def test_an_error_of_spark_is_raised_and_ends_the_task() -> None:
    """Spark may run the next attempt at once, so the task cancels its handlers and drains nothing."""
    running = threading.Event()

    async def handler(message: lanes.Message) -> None:
        running.set()
        await anyio.sleep_forever()

    def broken() -> Iterator[Any]:
        yield from batches(rows(10))
        assert running.wait(10)
        raise OSError("the socket is gone")

    before = threading.enumerate()
    with pytest.raises(OSError, match="the socket is gone"):
        list(run_task(broken(), job(handler)))
    assert threading.enumerate() == before


# --- resources


@pytest.mark.parametrize("end", ["well", "failing", "given up", "setup"])
def test_async_setup_and_teardown_are_of_a_task_and_of_its_loop(end: str) -> None:
    happened: list[tuple[str, int]] = []

    async def setup() -> None:
        happened.append(("setup", threading.get_ident()))
        if end == "setup":
            raise ValueError("no database")

    async def teardown() -> None:
        await anyio.lowlevel.checkpoint()
        happened.append(("teardown", threading.get_ident()))

    async def handler(message: lanes.Message) -> dict[str, object]:
        if happened[-1][0] != "handler":
            happened.append(("handler", threading.get_ident()))
        if end == "failing":
            raise ValueError("no")
        return {"position": 0, "text": ""}

    task = job(handler, setup=setup, teardown=teardown, settings=ONCE, results=RESULTS)
    generator = run_task(batches(rows(6_000), size=1_000), task)
    if end == "given up":
        next(iter(generator))
        generator.close()  # type: ignore[attr-defined]
    elif end == "well":
        list(generator)
    else:
        with pytest.raises(ValueError if end == "setup" else lanes.HandlerHalted):
            list(generator)
    names = [name for name, _ in happened]
    assert names == (["setup", "teardown"] if end == "setup" else ["setup", "handler", "teardown"])
    assert len({thread for _, thread in happened}) == 1


def test_plain_setup_and_teardown_are_of_the_worker_process() -> None:
    happened: list[str] = []

    def made(name: str) -> Callable[[], Any]:
        def handler(message: lanes.Message) -> None:
            pass

        return lambda: job(
            handler,
            name=name,
            setup=lambda: happened.append(f"setup {name}"),
            teardown=lambda: happened.append(f"teardown {name}"),
        )

    first = begin("a", made("a"))
    assert begin("a", made("a")) is first
    begin("b", made("b"))
    begin("a", made("a"))
    begin("c", lambda: job(lambda message: None, name="c"))
    assert happened == ["setup a", "teardown a", "setup b", "teardown b", "setup a", "teardown a"]


def test_a_setup_that_failed_is_tried_again_by_the_next_task() -> None:
    tries = 0

    def setup() -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ValueError("no database")

    def load() -> Any:
        return job(lambda message: None, name="tried", setup=setup)

    # If this test ran in this process before, its job is still the newest one.
    begin("another", lambda: job(lambda message: None, name="another"))
    with pytest.raises(ValueError, match="no database"):
        begin("tried", load)
    assert begin("tried", load).name == "tried"
    assert tries == 2


async def async_hook() -> None:
    pass


def acknowledge_plainly(message: lanes.Message) -> None:
    pass


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (
            {"settings": lanes.Settings(poison="block")},
            'poison="block" on Spark: a task cannot unblock a blocked key',
        ),
        ({"settings": lanes.Settings(poison="block_and_dlq")}, 'poison="block_and_dlq" on Spark'),
        (
            {"handler": acknowledge_plainly, "settings": lanes.Settings(sync_handlers="processes", processes=1)},
            'sync_handlers="processes" on Spark',
        ),
        ({"settings": lanes.Settings(poison="skip")}, 'poison="skip" needs dead letters'),
        (
            {"dead_letters": MemoryDeadLetters(MemoryBroker())},
            "dead_letters=MemoryDeadLetters on Spark: every task needs its own clients; pass a function",
        ),
        ({"results": "position long"}, "results='position long' is not a pyarrow.Schema"),
        ({"results": pa.schema([])}, "give one or more columns with different names"),
        ({"setup": "connect"}, "setup='connect' is not callable"),
        ({"setup": async_hook, "teardown": list}, "only one of setup and teardown is async"),
        ({"handler": None}, "handler is None, which is not callable"),
    ],
)
def test_settings_that_cannot_work_in_a_task_are_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace("(", r"\(")):
        job(**{"handler": acknowledge, **wrong})


def test_a_task_runs_without_spark() -> None:
    script = (
        "import sys, lanes_spark, lanes_spark.driver.replay, lanes_spark.plan\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('pyspark', 'pandas')]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)
