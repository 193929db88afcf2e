"""A member shares its room among its partitions.

All partitions can request, and busy partitions get most; no server runs.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.core.types import Room
from lanes_jetstream.cohort.pulls import ConsumerPulls
from lanes_jetstream.wire.turns import AGAIN, BRIEF, EXPIRES, Turns
from tests.jetstream.cohort.stubs import StubInbox

LARGE = 1 << 30


def at_once(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


class Clocked(StubInbox):
    """A server that ends each request at its expiry.

    Partitions in ``backlog`` have messages without end, and each message occupies the room for ``work`` seconds.
    """

    def __init__(self, partitions: int, backlog: int, *, work: float) -> None:
        super().__init__([f"c{number}" for number in range(partitions)])
        self.now = 100.0
        self.served = dict.fromkeys(self.pulls, self.now)
        self.longest = dict.fromkeys(self.pulls, 0.0)
        self.handled = 0
        self._backlog = self.pulls[:backlog]
        self._work = work
        self._running: list[float] = []
        self._open: list[tuple[float, ConsumerPulls, int]] = []

    async def run(self, seconds: float, room: int) -> None:
        end = self.now + seconds
        while self.now < end:
            self._running = [until for until in self._running if until > self.now]
            for at, each, count in [one for one in self._open if one[0] <= self.now]:
                self._open.remove((at, each, count))
                each.outstanding -= count
            left = Room(room - len(self._running), LARGE)
            if left.messages > 0:
                await self._ask(left)
            self.now += 0.005

    async def _ask(self, room: Room) -> None:
        before = {each: each.reserved for each in self.pulls}
        await Turns("test", len(self.pulls)).pull(self.pulls, set(self._backlog), room, self.now)
        for each in self.pulls:
            asked = each.reserved - before[each]
            if not asked:
                continue
            self.longest[each] = max(self.longest[each], self.now - self.served[each])
            self.served[each] = self.now
            if each in self._backlog:
                each.outstanding -= asked
                self.handled += asked
                self._running += [self.now + self._work] * asked
            else:
                self._open.append((self.now + each.expires, each, asked))


@given(
    st.integers(1, 3_000), st.integers(1, 64), st.integers(0, 64), st.lists(st.integers(0, 63), max_size=64), st.data()
)
def test_the_requests_of_all_partitions_fit_into_the_room(
    messages: int, owned: int, elsewhere: int, busy: list[int], data: st.DataObject
) -> None:
    side = StubInbox([f"c{number}" for number in range(owned)])
    for each, taken in zip(side.pulls, data.draw(st.lists(st.integers(0, 40), max_size=owned)), strict=False):
        each.outstanding = taken
    before = sum(each.reserved for each in side.pulls)
    room = Room(messages, LARGE)
    at_once(Turns("test", owned + elsewhere).pull(side.pulls, {side.pulls[n] for n in busy if n < owned}, room, 0.0))
    assert sum(each.reserved for each in side.pulls) <= max(messages, before)


@given(st.integers(1, 64), st.integers(0, 64), st.integers(0, 63))
def test_a_new_partition_finds_room(owned: int, elsewhere: int, busy: int) -> None:
    """Each partition of the cohort can request messages at once, also while other partitions are busy."""
    partitions = owned + elsewhere
    side = StubInbox([f"c{number}" for number in range(partitions)])
    room = Room(partitions * 4, LARGE)
    pulling = side.pulls[:owned]
    # The other partition was busy until a moment ago.
    pulling[-1].outstanding = partitions * 2
    for _ in range(3):
        at_once(Turns("test", partitions).pull(pulling, set(pulling[: busy + 1]), room, 0.0))
    at_once(Turns("test", partitions).pull(side.pulls, set(pulling[: busy + 1]), room, 0.0))
    assert all(each.reserved for each in side.pulls)


def test_one_busy_partition_gets_most_of_the_room() -> None:
    side = StubInbox([f"c{number}" for number in range(64)])
    at_once(Turns("test", 64).pull(side.pulls, set(), Room(2_000, LARGE), 0.0))
    at_once(Turns("test", 64).pull(side.pulls, {side.pulls[5]}, Room(2_000, LARGE), 0.0))
    assert side.pulls[5].reserved > 1_500


@given(st.integers(1, 64), st.integers(1, 400), st.data())
def test_every_partition_has_a_request_if_there_is_room(owned: int, messages: int, data: st.DataObject) -> None:
    """Even while others still hold most of the room for earlier requests."""
    side = StubInbox([f"c{number}" for number in range(owned)])
    for each, taken in zip(side.pulls, data.draw(st.lists(st.integers(0, 40), max_size=owned)), strict=False):
        each.outstanding = taken
    busy = {each for each in side.pulls if data.draw(st.booleans())}
    enough = messages - sum(each.reserved for each in side.pulls) >= sum(not each.reserved for each in side.pulls)
    at_once(Turns("test", owned).pull(side.pulls, busy, Room(messages, LARGE), 0.0))
    assert all(each.reserved for each in side.pulls) or not enough


def test_partitions_without_a_request_share_the_rest() -> None:
    side = StubInbox([f"c{number}" for number in range(10)])
    side.pulls[0].outstanding = 388
    at_once(Turns("test", 10).pull(side.pulls, set(), Room(400, LARGE), 0.0))
    assert all(each.reserved for each in side.pulls)


@pytest.mark.parametrize("work", [0.01, 0.1])
@pytest.mark.parametrize(("room", "busy"), [(1, 0), (1, 1), (3, 2), (10, 1), (30, 30), (63, 5)])
def test_partitions_take_turns_in_scarce_room(room: int, busy: int, work: float) -> None:
    side = Clocked(64, busy, work=work)
    at_once(side.run(10.0, room))
    idle = side.pulls[busy:]
    # Busy partitions take turns with messages that occupy the room, idle ones with requests that stay empty.
    turn = len(idle) * (BRIEF + 0.005) / room + busy * (work + 0.005) / min(room, max(1, busy))
    longest = max(max(side.longest[each], side.now - side.served[each]) for each in side.pulls)
    assert longest <= AGAIN + 2 * turn + 0.1
    # Most of the time, idle partitions leave the room to those with messages.
    assert busy == 0 or room == 1 or side.handled >= 10.0 / (work + 0.005) * min(room, busy) / 4


def test_long_requests_end_soon_after_the_room_becomes_scarce() -> None:
    side = Clocked(64, 0, work=0.0)
    at_once(side.run(0.01, 200))
    assert {each.expires for each in side.pulls} == {EXPIRES}
    at_once(side.run(20.0, 4))
    assert {each.expires for each in side.pulls} == {BRIEF}
    assert max(side.longest.values()) <= EXPIRES + AGAIN + 64 * 0.025 / 4 + 0.1
