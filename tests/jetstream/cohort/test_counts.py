"""An owned partition counts its undelivered and missing messages, and doubts an answer that reports too few."""

from __future__ import annotations

from typing import Any

import pytest

from lanes.core.cohort.ledger import Done
from lanes_jetstream.cohort.owned_partition import Backlog, PulledPartition
from tests.jetstream.cohort.stubs import StubInbox, owned_partition, positions

pytestmark = pytest.mark.anyio


def ack(sequence: int, delivery: int, left: int, consumer: str = "c") -> str:
    return f"$JS.ACK.S.{consumer}.1.{sequence}.{delivery}.1700000000.{left}"


async def deliver(side: StubInbox, sequence: int, delivery: int, left: int, consumer: str = "c") -> None:
    await side.deliver(consumer, sequence, delivery, reply=ack(sequence, delivery, left, consumer))


async def idle(side: StubInbox, last: int) -> None:
    await side.say(side.pulls[0], Status="100", Description="Idle Heartbeat", Nats_Last_Consumer=str(last))


# --- runs


async def test_the_average_size_counts_only_the_messages_that_are_delivered() -> None:
    side = StubInbox()
    of = owned_partition(side.pulls[0], Done(4, ()))
    before = side.pulls[0]._average_size
    for delivery, sequence in enumerate((3, 5, 6), start=1):
        await deliver(side, sequence, delivery, 0)
    delivered = of.take(None, None)
    assert delivered is not None
    # Each message has a subject of three bytes and a body of one byte. A finished message does not count.
    assert (delivered.partition, delivered.size, [message.size for message in delivered.run]) == (
        of.partition,
        8,
        [4] * 2,
    )
    assert side.pulls[0]._average_size == pytest.approx(before + (4 - before) * (1 - 0.95**2))
    assert of.take(None, None) is None


async def test_a_partition_returns_at_most_the_requested_number_of_messages() -> None:
    side = StubInbox()
    of = owned_partition(side.pulls[0])
    for number in (1, 2, 3):
        await deliver(side, number, number, 3 - number)
    first = of.take(None, None, 2)
    assert first is not None
    assert [message.position for message in first.run] == [1, 2]
    assert positions(of) == [3]


async def test_a_partition_that_is_not_served_delivers_nothing_and_ignores_arrivals() -> None:
    side = StubInbox()
    of = owned_partition(side.pulls[0])
    await deliver(side, 1, 1, 0)
    of.rest()
    of.rest()
    assert (of.pulls, of.take(None, None)) == (None, None)
    await deliver(side, 2, 2, 0)
    assert of.take(None, None) is None


async def test_a_new_durable_forgets_the_acknowledgements_of_the_previous_one() -> None:
    side = StubInbox(["c", "d"])
    of = owned_partition(side.pulls[0], Done(4, ()))
    await deliver(side, 3, 1, 0)
    assert positions(of) == []
    assert of.again == [ack(3, 1, 0)]
    of.follow(side.pulls[1])
    assert (of.again, of.expected, of.pulls) == ([], 1, side.pulls[1])


async def test_the_time_of_the_last_arrival_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_jetstream.cohort.owned_partition.monotonic", lambda: 77.0)
    side = StubInbox()
    of = owned_partition(side.pulls[0], Done(4, ()))
    of.take(None, None)
    assert (of.seen, of.confirm_at) == (0.0, 0.0)
    await deliver(side, 3, 1, 0)
    of.take(None, None)
    assert of.seen == 77.0, "a finished message is an arrival too"


# --- what waits


def counts(of: PulledPartition) -> tuple[int | None, int | None]:
    return of.waiting, of.lag


async def test_waiting_messages_are_those_of_the_last_report() -> None:
    side = StubInbox()
    of = owned_partition(side.pulls[0])
    assert counts(of) == (None, None)
    await deliver(side, 4, 1, 5)
    assert counts(of) == (None, None)
    of.take(None, None)
    assert counts(of) == (5, 6)
    # An answer of the server counts two deliveries that have not arrived.
    of.backlog.asked(3, 4, 4)
    assert counts(of) == (6, 5)
    of.rest()
    assert counts(of) == (6, 5)


async def test_an_idle_durable_has_no_waiting_message() -> None:
    side = StubInbox()
    of = owned_partition(side.pulls[0])
    await deliver(side, 4, 1, 5)
    of.take(None, None)
    await idle(side, 1)
    assert counts(of) == (0, 1)
    of.rest()
    assert counts(of)[0] == 5, "no request is open, so the last report counts"


async def test_messages_that_arrived_for_a_paused_partition_count_in_the_lag() -> None:
    side = StubInbox()
    of = owned_partition(side.pulls[0])
    await idle(side, 0)
    assert counts(of) == (0, 0)
    of.ledger.delivered(2)
    side.pulls[0].arrived.append(None)  # type: ignore[arg-type]
    assert of.lag == 2


@pytest.mark.parametrize("last", [2, 4])
async def test_missing_deliveries_wait_until_a_message_arrives(last: int) -> None:
    side = StubInbox(["c", "d"])
    of = owned_partition(side.pulls[0])
    await deliver(side, 4, 1, 5)
    of.take(None, None)
    await idle(side, last)
    assert positions(of) == []
    assert of.missing == of.waiting == last - 1
    assert side.pulls[0].check() == ("gap", f"delivery {last} missing")
    of.follow(side.pulls[1])
    assert of.waiting == last - 1
    await deliver(side, 4, 1, 7, "d")
    of.take(None, None)
    assert (of.missing, of.waiting) == (0, 7)


async def test_a_heartbeat_before_the_arrivals_are_taken_shows_no_loss() -> None:
    side = StubInbox()
    of = owned_partition(side.pulls[0])
    await deliver(side, 4, 1, 1)
    await deliver(side, 5, 2, 0)
    await idle(side, 2)
    assert of.take(None, None, 1) is not None
    assert side.pulls[0].check() is None
    assert positions(of) == [5]
    assert (side.pulls[0].check(), of.missing) == (None, 0)


async def test_a_known_interruption_is_not_replaced_by_a_missing_delivery() -> None:
    side = StubInbox()
    of = owned_partition(side.pulls[0])
    await idle(side, 3)
    side.pulls[0].interrupt("ended", "409 Server Shutdown")
    of.take(None, None)
    assert side.pulls[0].check() == ("ended", "409 Server Shutdown")
    assert of.missing == 0


# --- the backlog


def shown(backlog: Backlog) -> tuple[Any, ...]:
    return backlog.left, backlog.delivery, backlog.missed, backlog.reached, backlog.doubted


def test_a_new_backlog_is_unknown() -> None:
    backlog = Backlog()
    assert shown(backlog) == (None, 0, 0, 0, False)
    backlog.delivered(3, 9, 7)
    assert shown(backlog) == (9, 3, 0, 0, False)
    assert repr(backlog) == "<Backlog: 9 left after delivery 3, 0 missed>"
    backlog.begin()
    assert shown(backlog) == (None, 0, 0, 0, False)


def test_an_answer_that_reports_too_few_messages_is_doubted_until_a_second_one() -> None:
    backlog = Backlog()
    backlog.delivered(1, 10, 7)
    backlog.asked(1, 10, 7)
    assert not backlog.doubted
    backlog.asked(1, 9, 7)
    assert (backlog.doubted, backlog.missed, backlog.left) == (True, 0, 9)
    backlog.asked(1, 9, 8)
    assert (backlog.doubted, backlog.missed, backlog.reached) == (False, 1, 7)
    backlog.asked(1, 12, 8)
    assert (backlog.doubted, backlog.left) == (False, 12)


def test_a_delivery_ends_the_doubt_about_an_answer() -> None:
    backlog = Backlog()
    backlog.delivered(1, 10, 7)
    backlog.asked(1, 9, 7)
    backlog.delivered(2, 9, 8)
    assert shown(backlog) == (9, 2, 0, 0, False)
    backlog.asked(2, 8, 8)
    backlog.begin()
    assert not backlog.doubted


def test_an_answer_is_newer_than_a_delivery_with_its_number() -> None:
    backlog = Backlog()
    backlog.delivered(2, 5, 7)
    backlog.asked(2, 8, 7)
    assert backlog.left == 8
    backlog.delivered(2, 5, 7)
    assert backlog.left == 8
    backlog.asked(1, 99, 7)
    assert (backlog.left, backlog.delivery) == (8, 2), "an older answer counts for nothing"


def test_the_first_loss_names_the_sequence_to_check_from() -> None:
    backlog = Backlog()
    backlog.delivered(1, 10, 100)
    backlog.delivered(2, 9, 101)
    assert (backlog.missed, backlog.reached) == (0, 0)
    backlog.delivered(3, 7, 105)
    assert (backlog.missed, backlog.reached) == (1, 101)
    backlog.delivered(4, 4, 109)
    assert (backlog.missed, backlog.reached) == (3, 101)


def test_new_messages_are_no_loss_and_hide_none_that_is_later() -> None:
    backlog = Backlog()
    backlog.delivered(1, 2, 1)
    backlog.delivered(2, 20, 2)
    backlog.delivered(3, 18, 3)
    assert backlog.missed == 1


def test_a_new_partition_has_no_pull_requests() -> None:
    side = StubInbox()
    of = owned_partition(side.pulls[0])
    fresh = PulledPartition(3, of.partition, Done(0, ()))
    assert (fresh.pulls, fresh.again, fresh.missing, fresh.lag, fresh.waiting) == (None, [], 0, None, None)
