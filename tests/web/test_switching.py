"""During a request the threads of the process take short turns, so that a busy event loop does not delay the answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from lanes.web.board import Board
from lanes.web.switching import SHORT, ShortTurns
from memsource.memory.source import MemorySource
from tests.components import wait_until
from tests.fakes.support import acknowledge, consumer_of, published
from tests.web.conftest import Ports, ask


@pytest.fixture(autouse=True)
def before() -> Iterator[float]:
    interval = sys.getswitchinterval()
    yield interval
    sys.setswitchinterval(interval)


def test_the_turns_are_short_during_a_request_and_long_afterwards(
    ports: Ports, before: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def reason(board: Board) -> None:
        seen.append(sys.getswitchinterval())

    monkeypatch.setattr("lanes.web.routes.reason_not_live", reason)
    port = ports.open(consumer_of(MemorySource(published("a")), acknowledge))
    assert ask(port, "/live").status == 200
    assert seen == [pytest.approx(SHORT)] and before > SHORT
    wait_until(lambda: sys.getswitchinterval() == before, "the end of the short turns")


def test_the_last_of_several_requests_ends_the_short_turns(before: float) -> None:
    turns = ShortTurns()
    turns.begin()
    turns.begin()
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(SHORT)
    turns.end()
    assert sys.getswitchinterval() == before


def test_an_interval_that_the_program_sets_meanwhile_stays() -> None:
    turns = ShortTurns()
    turns.begin()
    sys.setswitchinterval(0.02)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(0.02)


def test_a_shorter_interval_of_the_program_stays() -> None:
    sys.setswitchinterval(0.0001)
    shorter = sys.getswitchinterval()
    turns = ShortTurns()
    turns.begin()
    assert sys.getswitchinterval() == shorter
    turns.end()
    assert sys.getswitchinterval() == shorter


@pytest.mark.parametrize("microseconds", [4_299, 5_000, 7_001, 20_003])
def test_many_requests_do_not_change_the_interval(microseconds: int) -> None:
    sys.setswitchinterval((microseconds + 0.5) / 1e6)
    begun = sys.getswitchinterval()
    turns = ShortTurns()
    for _ in range(10):
        turns.begin()
        turns.end()
    assert sys.getswitchinterval() == begun
