"""The demo replaces a process that cannot ask the group's coordinator, and continues."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from demo.brokers import coordinator
from demo.brokers.coordinator import Coordinator
from demo.errors import NoAnswer
from demo.membership import Member
from tests.components import KafkaServer

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

# Answers the first question with its own process id; `others` is the code for each further question.
_ONCE = """
import json, os, sys, threading
json.loads(sys.stdin.readline())
for count, line in enumerate(sys.stdin):
    if count:
        {others}
    members = {{"m-1": [str(os.getpid()), [["S", 0]]]}}
    print(json.dumps({{"asked": 1.0, "answered": 2.0, "state": "STABLE", "members": members}}), flush=True)
"""


def asker(others: str) -> Coordinator:
    return Coordinator("127.0.0.1:1", "g", [sys.executable, "-c", _ONCE.format(others=others)])


@pytest.fixture
async def real(kafka: KafkaServer) -> AsyncIterator[Coordinator]:
    asking = Coordinator(kafka.url, "group-of-nobody")
    yield asking
    await asking.close()


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ("os.abort()", "the asking process has ended"),
        ("os._exit(0)", "the asking process has ended"),
        ("print('{', end='', flush=True); os.abort()", "the asking process has ended"),
        ("print(json.dumps({'error': '_TIMED_OUT: late'}), flush=True); continue", "_TIMED_OUT: late"),
    ],
    ids=["abort", "exit", "torn", "error"],
)
async def test_a_process_that_has_no_answer_is_replaced(others: str, said: str) -> None:
    asking = asker(others)
    first = await asking.group()
    assert first.members == {"m-1": Member(str(asking.pid), frozenset({("S", 0)}))}
    with pytest.raises(NoAnswer, match=rf"127\.0\.0\.1:1 does not report the state of the group \({said}"):
        await asking.group()
    second = await asking.group()
    assert second.members["m-1"].id == str(asking.pid) != first.members["m-1"].id
    await asking.close()
    with pytest.raises(NoAnswer):
        await asking.group()


async def test_a_process_that_is_stuck_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = asker("threading.Event().wait()")
    first = await asking.group()
    with monkeypatch.context() as soon:
        soon.setattr(coordinator, "_WITHIN", 0.0)
        soon.setattr(coordinator, "_MARGIN", 0.1)
        with pytest.raises(NoAnswer, match="or is stuck"):
            await asking.group()
    assert (await asking.group()).members["m-1"].id != first.members["m-1"].id
    await asking.close()


async def test_a_late_answer_to_an_abandoned_question_is_dropped() -> None:
    asking = asker("threading.Event().wait(0.2)")
    first = await asking.group()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asking.group(), 0.05)
    assert (await asking.group()).members["m-1"].id != first.members["m-1"].id
    await asking.close()


async def test_a_broker_is_asked_and_the_process_may_be_killed(real: Coordinator) -> None:
    assert (await real.group()).members == {}
    os.kill(real.pid, signal.SIGABRT)
    with pytest.raises(NoAnswer):
        await real.group()
    assert (await real.group()).members == {}
    # The group does not exist.
    await real.delete()
