"""Messages that arrive one by one are read together, and no other message waits."""

from __future__ import annotations

from queue import Empty
from typing import Any

import pytest

from lanes_kafka.client.read_rest import REST, SMALL
from lanes_kafka.client.thread import BATCH
from tests.kafka.test_thread_turns import Admin, Stand, committing, raws, runs


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(monkeypatch, {}).open().reading()


def test_the_thread_rests_after_the_second_of_two_close_small_reads(reading: Stand) -> None:
    reading.demand(2, messages=1_000)
    reading.client.answers = [raws(0, 5), []]
    reading.turn()
    reading.now += REST
    reading.client.answers = [raws(0, 6), []]
    reading.turn()
    assert runs(reading) == [(0, [5], 2), (0, [6], 2)] and reading.queue.waits == []
    reading.forget()
    reading.now += REST / 2
    reading.turn()
    assert reading.client.consumed == [] and reading.queue.waits == [pytest.approx(REST / 2)]
    reading.now += REST
    reading.client.answers = [raws(0, 7), raws(0, 8)]
    reading.turn()
    assert runs(reading) == [(0, [7, 8], 2)]


def test_the_end_of_a_rest_reads_all_that_has_arrived_by_one_call(
    reading: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(timeout: float) -> None:
        reading.now += timeout
        raise Empty

    monkeypatch.setattr(reading.queue, "get", get)
    reading.demand(2, messages=1_000)
    reading.client.answers = [raws(0, 5), [], raws(0, 6), []]
    reading.turn(2)
    reading.forget()
    reading.client.answers = [raws(0, 7, 8)]
    reading.turn()
    assert runs(reading) == [(0, [7, 8], 2)] and reading.client.consumed == [(998, 0.0)]


def test_a_command_ends_the_wait_of_a_rest_and_not_the_rest(reading: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    reading.demand(2, messages=1_000)
    reading.client.answers = [raws(0, 5), [], raws(0, 6), []]
    reading.turn(2)
    reading.forget()
    monkeypatch.setattr(reading.queue, "empty", lambda: True)  # the command arrives during the wait
    committing(reading, 7)
    reading.turn()
    assert reading.client.consumed == [] and reading.client.commits == [(0, 7, True)]


def test_a_command_that_outlasts_a_rest_is_followed_by_no_read_of_the_former_credit(
    reading: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading.demand(2, messages=1_000)
    reading.client.answers = [raws(0, 5), [], raws(0, 6), []]
    reading.turn(2)
    reading.forget()
    monkeypatch.setattr(reading.queue, "empty", lambda: True)  # the command arrives during the wait
    committing(reading, 7)
    get = reading.queue.get

    def slow(timeout: float) -> Any:
        reading.now += 2 * REST
        return get(timeout)

    monkeypatch.setattr(reading.queue, "get", slow)
    reading.turn()
    assert reading.client.consumed == [] and reading.client.commits == [(0, 7, True)]


def test_the_thread_does_not_rest_after_reads_with_a_pause_between_them(reading: Stand) -> None:
    reading.demand(2, messages=1_000)
    for offset in (5, 6, 7):
        reading.client.answers = [raws(0, offset), []]
        reading.turn()
        reading.now += 2 * REST
    assert [run for run, _ in reading.client.consumed] == [1, 999, 1, 998, 1, 997] and reading.queue.waits == []


def test_the_thread_does_not_rest_after_a_large_read_or_while_the_client_has_more(reading: Stand) -> None:
    reading.demand(2, messages=10 * BATCH)
    reading.client.answers = [raws(0, 5), [], raws(0, 6), raws(0, *range(7, 7 + SMALL)), raws(0, 500), []]
    reading.turn(3)
    assert reading.queue.waits == [] and len(reading.client.consumed) == 6


def test_the_thread_does_not_rest_while_the_client_may_have_more(reading: Stand) -> None:
    for number in (2, 3, 4):
        reading.demand(number, messages=2, received=2 * (number - 2))
        reading.client.answers = [raws(0, 10 * number), raws(0, 10 * number + 1)]
        reading.turn()
    assert len(runs(reading)) == 3 and reading.queue.waits == []


def test_a_commit_is_made_during_a_rest(reading: Stand) -> None:
    Admin.made[0].topics = {"t": None}
    reading.demand(2, messages=1_000)
    reading.client.answers = [raws(0, 5), [], raws(0, 6), []]
    reading.turn(2)
    committing(reading, 7)
    reading.turn()
    Admin.made[0].answer("id-A")
    reading.turn()
    assert reading.client.commits == [(0, 7, True)] and reading.now < reading.thread._rest.until
