"""A client's thread calls the event loop in order, and the loop's commands to the thread get their answers."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from anyio.lowlevel import checkpoint

from lanes_kafka import bridge as bridge_module
from lanes_kafka.bridge import Answer, Bridge
from lanes_kafka.client.mailbox import Command, Expire, Mailbox

pytestmark = pytest.mark.anyio


class Loop:
    """An event loop that runs calls only in ``turn``.

    Attributes:
        waiting: Calls that have woken the loop.
        ended: Whether the loop refuses calls.
    """

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.ended = False

    def enter(self, call: Callable[[], None]) -> None:
        if self.ended:
            raise RuntimeError("the loop is closed")
        self.waiting.append(call)

    def turn(self) -> None:
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            call()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    loop = Loop()
    monkeypatch.setattr(bridge_module, "entry_of_loop", lambda: loop.enter)
    return loop


async def test_calls_run_on_the_loop_in_order_after_one_wake_up(loop: Loop) -> None:
    seen: list[int] = []
    bridge = Bridge()
    for number in range(3):
        bridge.post(lambda number=number: seen.append(number))  # type: ignore[misc]
    assert seen == [] and len(loop.waiting) == 1
    loop.turn()
    assert seen == [0, 1, 2]
    bridge.post(lambda: seen.append(3))
    assert len(loop.waiting) == 1, "a later call wakes the loop again"
    loop.turn()
    assert seen == [0, 1, 2, 3]


async def test_a_call_that_is_posted_by_a_call_runs_too(loop: Loop) -> None:
    seen: list[str] = []
    bridge = Bridge()

    def first() -> None:
        seen.append("first")
        bridge.post(lambda: seen.append("second"))

    bridge.post(first)
    loop.turn()
    assert seen == ["first", "second"]


async def test_a_call_that_an_ended_event_loop_refuses_is_kept(loop: Loop) -> None:
    seen: list[int] = []
    bridge = Bridge()
    assert bridge.is_alive()
    loop.turn()
    loop.ended = True
    assert not bridge.is_alive()
    bridge.post(lambda: seen.append(1))
    loop.ended = False
    # A refused wake-up does not count as one under way.
    bridge.post(lambda: seen.append(2))
    loop.turn()
    assert seen == [1, 2]


async def test_an_answer_ends_the_wait_of_its_command_with_a_value_or_an_error() -> None:
    bridge = Bridge()
    good, bad = Answer[int](bridge), Answer[int](bridge)
    good.give(7)
    bad.fail(ValueError("no"))
    assert await good.wait() == 7
    with pytest.raises(ValueError, match=r"^no$"):
        await bad.wait()
    assert not good.given_up


async def test_only_the_first_answer_to_a_command_counts() -> None:
    bridge = Bridge()
    first, second = Answer[int](bridge), Answer[int](bridge)
    first.give(1)
    first.fail(ValueError("too late"))
    first.give(2)
    second.fail(ValueError("first"))
    second.give(3)
    assert await first.wait() == 1
    with pytest.raises(ValueError, match=r"^first$"):
        await second.wait()


async def test_a_cancelled_wait_gives_the_command_up() -> None:
    answer = Answer[int](Bridge())
    assert not answer.given_up
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer.wait)
            await checkpoint()
            scope.cancel()
    assert answer.given_up


# --- the mailbox


def mailbox() -> tuple[Mailbox, list[tuple[Command, float | None]]]:
    performed: list[tuple[Command, float | None]] = []

    def perform(command: Command, *, until: float | None) -> None:
        performed.append((command, until))

    return Mailbox(perform), performed


def test_commands_are_performed_in_the_order_of_the_queue() -> None:
    box, performed = mailbox()
    first, second = Expire(), Expire()
    assert not box
    for command in (first, None, second):
        box.put(command)
    assert box
    box.serve()
    assert performed == [(first, None), (None, None), (second, None)] and not box
    box.serve()
    assert len(performed) == 3


def test_a_wait_performs_one_command_with_the_end_of_the_callback() -> None:
    box, performed = mailbox()
    first, second = Expire(), Expire()
    box.put(first)
    box.put(second)
    # A time that has passed does not hide a command that has arrived.
    assert box.wait(-1.0, until=9.0) and performed == [(first, 9.0)]
    assert box.wait(0.0) and performed[1:] == [(second, None)]
    assert not box.wait(0.0, until=9.0) and not box.wait(-1.0) and len(performed) == 2
