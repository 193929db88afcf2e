"""A member's periodic check finds dropped messages and deleted durables; no server runs."""

from __future__ import annotations

from typing import Any

import anyio.lowlevel
import pytest
from nats.aio.client import Client

import lanes
from lanes.core.cohort.actions import LeaseLost
from lanes_jetstream.cohort import watch as cohort_watch
from lanes_jetstream.cohort.watch import CohortWatch
from lanes_jetstream.wire.answers import ApiError
from lanes_jetstream.wire.connection import Connection, NoAnswer
from lanes_jetstream.wire.stream import OutOfRange
from tests.cohort.stub_cohort import taken_over
from tests.jetstream.cohort.stubs import Held

pytestmark = pytest.mark.anyio


class Checked:
    """A member with one partition, and a server whose answers the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out_of_range: OutOfRange = "fail") -> None:
        self.held = Held()
        self.held.tell((3, taken_over(7)))
        self.held.partitions.next_events()
        self.owned = self.held.partitions.by_number[3]
        self.asked: list[str] = []
        self.info: dict[str, Any] = {"delivered": {"consumer_seq": 2}, "num_pending": 9}
        self.wrong: dict[str, Exception] = {}
        self.first = 1
        self.config: dict[str, Any] = {"name": "S"}
        self.watch = CohortWatch(
            connection=Connection(Client()),
            stream="S",
            name="test",
            partitions=self.held.partitions,
            out_of_range=out_of_range,
            wake=self.held.side.inbox.wake.set,
        )
        monkeypatch.setattr(self.watch.connection, "api", self.api)

    async def api(self, subject: str, request: object = None) -> dict[str, Any]:
        self.asked.append(subject)
        error = self.wrong.get(subject.partition(".")[0])
        if error is not None:
            raise error
        if subject == "STREAM.INFO.S":
            return {"created": "now", "state": {"first_seq": self.first, "last_seq": 99}, "config": self.config}
        assert subject == "CONSUMER.INFO.S.c-p3-e7-0"
        return self.info

    async def dropped(self, first: int) -> None:
        """Check once, then find in two checks that all nine undelivered messages were dropped."""
        self.owned.backlog.delivered(2, 9, 8)
        self.info = {"delivered": {"consumer_seq": 2}, "num_pending": 0}
        self.first = first
        for _ in range(3):
            await self.watch._check()


async def test_messages_dropped_from_the_beginning_stop_the_member(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Checked(monkeypatch)
    await looked.dropped(10)
    with pytest.raises(
        lanes.SourceError, match=r"'S' begins at sequence 10, so 9 messages of cohort partition 3 were dr"
    ):
        raise looked.watch.failure or AssertionError
    assert looked.held.side.inbox.wake.is_set()


async def test_a_drop_is_found_while_a_request_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Checked(monkeypatch)
    assert looked.owned.pulls is not None
    looked.owned.backlog.delivered(2, 9, 8)
    # Room became free between two checks: the server would deliver the backlog, and there is none.
    looked.owned.pulls.outstanding = 1
    await looked.dropped(10)
    assert isinstance(looked.watch.failure, lanes.SourceError)
    assert len([one for one in looked.asked if one.startswith("CONSUMER.INFO")]) == 2


async def test_a_drop_is_skipped_with_out_of_range_earliest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked = Checked(monkeypatch, "earliest")
    await looked.dropped(10)
    await looked.watch._check()
    assert looked.watch.failure is None
    assert caplog.text.count("dropped before they were delivered") == 1


async def test_messages_deleted_between_others_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked = Checked(monkeypatch)
    await looked.dropped(9)
    assert looked.watch.failure is None
    assert (
        "9 messages of cohort partition 3 were deleted one by one or by subject before they were delivered"
        in caplog.text
    )


async def test_a_stream_that_drops_single_messages_is_not_checked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked = Checked(monkeypatch)
    looked.config = {"name": "S", "max_msgs_per_subject": 1}
    await looked.dropped(10)
    assert looked.watch.failure is None
    assert caplog.text == ""


async def test_only_a_durable_that_is_silent_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Checked(monkeypatch)
    backlog, pulls = looked.owned.backlog, looked.owned.pulls
    assert pulls is not None
    for delivery in (1, 2, 3):
        backlog.delivered(delivery, 4 - delivery, 8)
        await looked.watch._check()
    assert looked.asked == []
    # A request is open, nothing was delivered since, and the backlog is empty.
    backlog.delivered(4, 0, 9)
    pulls.outstanding = 1
    for _ in range(3):
        await looked.watch._check()
    assert looked.asked == []
    pulls.outstanding = 0
    await looked.watch._check()
    assert looked.asked == ["CONSUMER.INFO.S.c-p3-e7-0"]


@pytest.mark.parametrize("who", ["CONSUMER", "STREAM"])
@pytest.mark.parametrize(
    "error",
    [ApiError(10014, "consumer not found", 404), ApiError(10059, "stream not found", 404), NoAnswer("no"), OSError()],
    ids=["consumer", "stream", "silence", "broken"],
)
async def test_an_unanswered_check_is_skipped(monkeypatch: pytest.MonkeyPatch, error: Exception, who: str) -> None:
    monkeypatch.setattr(cohort_watch, "CHECK_INTERVAL", 0.0)
    looked = Checked(monkeypatch)
    looked.held.side.inbox.wake.clear()
    looked.owned.backlog.delivered(2, 9, 8)
    looked.info = {"delivered": {"consumer_seq": 2}, "num_pending": 0}
    looked.first = 10
    looked.wrong = {who: error}
    looked.watch.start()
    while len([subject for subject in looked.asked if subject.startswith(who)]) < 3:
        await anyio.lowlevel.checkpoint()
    assert [looked.watch.failure] == [None]
    looked.wrong = {}
    await looked.held.side.inbox.wake.wait()
    assert looked.watch.failure is not None
    await looked.watch.stop()


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ([ApiError(10014, "consumer not found", 404)], "gone"),
        ([NoAnswer("no"), ApiError(10008, "temporarily unavailable", 503)], "takeover"),
        ([ApiError(10023, "insufficient resources", 503), ApiError(10014, "consumer not found", 404)], "gone"),
        ([ApiError(10059, "stream not found", 404)], "takeover"),
        ([lanes.SourceError("the connection is closed")], "takeover"),
    ],
    ids=["gone", "no_leader", "then_gone", "stream", "closed"],
)
async def test_only_a_missing_consumer_loses_the_partition(
    monkeypatch: pytest.MonkeyPatch, errors: list[Exception], told: str
) -> None:
    monkeypatch.setattr(cohort_watch, "_RETRY_DELAY", 0.0)
    looked = Checked(monkeypatch)
    answers = list(errors)

    async def api(subject: str) -> dict[str, Any]:
        assert subject == "CONSUMER.INFO.S.c-p3-e7"
        if answers:
            raise answers.pop(0)
        return {}

    monkeypatch.setattr(looked.watch.connection, "api", api)
    await looked.watch._resolve(looked.owned, "c-p3-e7")
    assert [(what, number) for what, number, _ in looked.held.stub.told] == [(told, 3)]
    assert answers == []


@pytest.mark.parametrize("missing", [True, False])
async def test_a_late_answer_about_a_former_ownership_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    looked = Checked(monkeypatch)
    former = looked.owned

    async def api(subject: str) -> dict[str, Any]:
        # While the request is under way, the partition is lost and acquired again.
        looked.held.tell((3, LeaseLost("the lease was not renewed in time")))
        looked.held.partitions.next_events()
        looked.held.partitions.step()
        looked.held.tell((3, taken_over(9)))
        if missing:
            raise ApiError(10014, "consumer not found", 404)
        return {}

    monkeypatch.setattr(looked.watch.connection, "api", api)
    await looked.watch._resolve(former, "c-p3-e7")
    assert looked.held.stub.told == [("ended", 3, "")]
    assert looked.held.partitions.by_number[3] is not former
