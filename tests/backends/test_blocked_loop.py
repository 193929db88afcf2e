"""A handler that blocks the event loop does not delay the answer to a signal, on real brokers."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import count

import anyio
import nats
import pytest
from confluent_kafka import Producer
from nats.js.api import StreamConfig, SubjectTransform

from lanes.process import EXIT_AT_ONCE, EXIT_DRAINED, GRACE
from tests.conftest import Spawn
from tests.kafka.workload import Topic

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

MESSAGES = 48
LONG = 8.0
"""Seconds for which each of the 48 handlers holds the loop in the slow tests: more than six minutes in all."""
_numbers = count()

Job = Callable[..., subprocess.Popen[str]]


@pytest.fixture(params=["kafka", "jetstream", "cohort"])
def job(request: pytest.FixtureRequest, spawn: Spawn) -> Iterator[Job]:
    """Start ``blocking_process`` on a source with 48 keys."""
    kind, name = request.param, f"BLOCKED{os.getpid()}x{next(_numbers)}"
    if kind == "kafka":
        server = request.getfixturevalue("kafka")
        topic = Topic(server.admin_url, name, 2)
        topic.create()
        producer = Producer({"bootstrap.servers": server.url})
        for number in range(MESSAGES):
            producer.produce(name, b"", key=str(number))
        producer.flush(30)
        yield lambda held="line": spawn("-m", "tests.backends.blocking_process", kind, server.url, name, str(held))
        topic.delete()
    else:
        url = request.getfixturevalue("nats_server").url
        anyio.run(_make_stream, url, name)
        yield lambda held="line": spawn("-m", "tests.backends.blocking_process", kind, url, name, str(held))
        anyio.run(_delete_stream, url, name)


async def _make_stream(url: str, name: str) -> None:
    client = await nats.connect(url)
    divide = SubjectTransform(src=f"{name}.*", dest=f"{name}.{{{{partition(4,1)}}}}.{{{{wildcard(1)}}}}")
    await client.jetstream().add_stream(StreamConfig(name, subjects=[f"{name}.*"], subject_transform=divide))
    for number in range(MESSAGES):
        await client.jetstream().publish(f"{name}.{number}", b"")
    await client.close()


async def _delete_stream(url: str, name: str) -> None:
    client = await nats.connect(url)
    await client.jetstream().delete_stream(name)
    await client.close()


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert line, f"the process has ended: {process.stderr.read()}"
    return line.strip()


def end_of_handler(process: subprocess.Popen[str]) -> float:
    """Wait until the handler has returned, and return the time at which it returned, of the same clock as here."""
    word, at = says(process).split()
    assert word == "ended"
    return float(at)


def answer(process: subprocess.Popen[str], number: signal.Signals, text: str) -> float:
    """Send a signal, and return the time of the answer."""
    assert process.stderr is not None
    process.send_signal(number)
    while text not in (line := process.stderr.readline()):
        assert line, "the process has ended without an answer"
    return time.monotonic()


def test_one_signal_takes_effect_after_the_handler(job: Job) -> None:
    process = job()
    assert says(process) == "running"
    process.send_signal(signal.SIGINT)
    assert process.stdin is not None and process.stderr is not None
    missing = {"lanes: SIGINT: draining", "has been holding the event loop"}
    while missing:
        line = process.stderr.readline()
        assert line, f"the process has ended without {missing}"
        missing = {text for text in missing if text not in line}
    answered = time.monotonic()
    process.stdin.write("go on\n")
    process.stdin.flush()
    assert answered < end_of_handler(process)
    # The process prints nothing more: no other handler begins.
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (EXIT_DRAINED, "")
    assert "charge at" in err and "held the event loop for" in err


def test_two_signals_end_the_process(job: Job) -> None:
    process = job()
    assert says(process) == "running"
    answer(process, signal.SIGINT, "lanes: SIGINT: draining")
    assert process.stderr is not None
    # Signals within one second count as one.
    select.select([], [], [], 1.1)
    answered = answer(process, signal.SIGINT, "lanes: SIGINT: stopping at once")
    # The handler would hold the process for ever.
    assert process.wait(timeout=30) == EXIT_AT_ONCE
    assert time.monotonic() - answered < GRACE + 10


@pytest.mark.slow
def test_one_signal_ends_a_process_that_each_message_blocks_for_long(job: Job) -> None:
    process = job(LONG)
    assert says(process) == "running"
    answered = answer(process, signal.SIGINT, "lanes: SIGINT: draining")
    ended = end_of_handler(process)
    assert answered < ended + 0.2
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (EXIT_DRAINED, "")
    # Less than one of the other 47 handlers would take.
    assert time.monotonic() - ended < LONG
    assert "has been holding the event loop for 1." in err
    found = re.search(r"held the event loop for ([0-9.]+) s", err)
    # The thread asks for a turn ten times a second.
    assert found is not None and abs(float(found[1]) - LONG) < 0.5


@pytest.mark.slow
def test_two_signals_end_a_process_that_each_message_blocks_for_long(job: Job) -> None:
    process = job(LONG)
    assert says(process) == "running"
    answer(process, signal.SIGINT, "lanes: SIGINT: draining")
    select.select([], [], [], 1.1)
    sent = time.monotonic()
    answer(process, signal.SIGINT, "lanes: SIGINT: stopping at once")
    assert process.wait(timeout=30) == EXIT_AT_ONCE
    assert time.monotonic() - sent < 3.0
    assert process.stdout is not None
    assert "ended" not in process.stdout.read()
