"""The watch for freezes alone: a clock of the test decides which times between two looks are a freeze."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest

from lanes.clock import monotonic
from lanes.workers import freezes
from lanes.workers.freezes import FreezeWatch, StartLooks


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freezes, "SHORTEST", 0.3)


class Time:
    """A clock that stands still. ``reads`` is the number of its calls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now


def watch_of(clock: Time, noticed: list[float], limit: float = 5.0) -> FreezeWatch:
    return FreezeWatch(clock, lambda: limit, lambda: noticed.append(clock.now))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("gap", "limit", "freeze"),
    [
        pytest.param(5.01, 5.0, True, id="above"),
        pytest.param(5.0, 5.0, False, id="at the limit"),
        pytest.param(0.29, -1.0, False, id="a limit below the shortest freeze"),
        pytest.param(0.31, -1.0, True, id="the shortest freeze"),
        pytest.param(1e9, math.inf, False, id="no limit"),
    ],
)
async def test_only_a_freeze_above_the_limit_is_noticed(gap: float, limit: float, freeze: bool) -> None:
    clock, noticed = Time(), list[float]()
    watch = watch_of(clock, noticed, limit)
    clock.now = gap
    assert watch.look(clock()) is freeze
    assert noticed == ([gap] if freeze else [])
    # The next look is soon.
    assert watch.look(clock()) is freeze
    assert (watch.number, watch.seconds) == ((1, gap) if freeze else (0, 0.0))


@pytest.mark.anyio
async def test_an_opened_watch_is_not_held_by_the_former_freeze() -> None:
    clock = Time()
    watch = watch_of(clock, [])
    clock.now = 10.0
    assert watch.look(clock())
    clock.now = 20.0
    # A freeze while the partitions were confirmed.
    assert not watch.open(1, clock())
    assert watch.held
    assert watch.open(2, clock())
    assert not watch.look(clock())


class Raced(FreezeWatch):
    """A watch in which another thread looks while ``open`` reads the number of freezes. ``other``: its look."""

    other: Callable[[], None] | None = None

    @property
    def number(self) -> int:
        found, look, self.other = self._number, self.other, None
        if look is not None:
            look()
        return found

    @number.setter
    def number(self, number: int) -> None:
        self._number = number


@pytest.mark.anyio
async def test_a_freeze_that_another_thread_notices_during_open_is_kept() -> None:
    clock = Time()
    watch = Raced(clock, lambda: 5.0, lambda: None)
    clock.now = 10.0
    assert watch.look(clock())
    thread = threading.Thread(target=watch.look, args=(30.0,))

    def look() -> None:
        thread.start()
        # Without a lock the thread notices the freeze here. With the lock it waits for the end of ``open``.
        thread.join(0.2)

    watch.other = look
    watch.open(1, 14.0)
    thread.join()
    assert watch.held
    assert watch.number == 2


@pytest.mark.anyio
async def test_the_clock_is_not_read_for_each_message() -> None:
    clock = Time()
    looks = StartLooks(watch_of(clock, []), clock)
    clock.reads = 0

    def start(count: int, within: float) -> int:
        before = clock.reads
        for _ in range(count):
            clock.now += within / count
            looks.until -= 1
            if looks.until <= 0:
                looks.look()
        return clock.reads - before

    assert start(100, 0.1) >= 99
    for _ in range(10):
        assert not looks.woken(clock.now)
        assert start(1, 0.001) == 0
    assert start(10, 0.01) == 10
    clock.now += 1.0
    assert start(100_000, 1.0) < 12_000


@pytest.mark.anyio
async def test_a_thread_that_sees_the_new_time_sees_the_flag() -> None:
    """Whichever thread looks first after a freeze, no thread starts a handler."""
    watch = FreezeWatch(monotonic, lambda: 0.05, lambda: None)
    for _ in range(20):
        number, held = watch.number, list[bool]()
        barrier = threading.Barrier(4)

        def look(barrier: threading.Barrier = barrier, held: list[bool] = held) -> None:
            barrier.wait()
            held.append(watch.look(monotonic()))

        threads = [threading.Thread(target=look) for _ in range(4)]
        watch._seen -= 1.0
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert held == [True] * 4
        assert watch.number > number
        assert watch.open(watch.number, monotonic())
