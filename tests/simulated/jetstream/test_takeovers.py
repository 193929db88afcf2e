"""A takeover of a durable delivers earlier messages first and in order, by every barrier that a server permits.

This file is longer than most, because all its tests share one process and its takeover.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, Final, Literal

import pytest
from nats.aio.msg import Msg

from lanes import SourceError
from lanes.clock import monotonic
from lanes.core.types import Room
from lanes_jetstream.durable.consumer import DurableConsumer
from lanes_jetstream.durable.pulls import DurablePulls
from lanes_jetstream.durable.takeover import RETRY_DELAY, Takeover
from lanes_jetstream.wire.connection import API_TIMEOUT, Connection
from memsource.sim.loop.virtual import until
from tests.simulated.jetstream.server.server import Fate
from tests.simulated.jetstream.stage import Stage, played, refusal

SECOND: Final = 1_000_000_000

ROOM: Final = Room(100, 1_000_000)

CREATE: Final = "CONSUMER.CREATE.S.work"
INFO: Final = "CONSUMER.INFO.S.work"
RESET: Final = "CONSUMER.RESET.S.work"

NAME: Final = "jetstream S/work"


class Process:
    """A process on the durable ``work``: its consumer, pulls and takeover, and the calls of the takeover."""

    def __init__(self, stage: Stage, client: Any, *, shared: bool = False, **arguments: Any) -> None:
        self.stage = stage
        self.connection = Connection(client)
        wanted: dict[str, Any] = {"modify": False, "hold_back": False, **arguments}
        self.durable = DurableConsumer(
            self.connection,
            "S",
            "work",
            filter_subject=None,
            ack_wait=30.0,
            max_ack_pending=1000,
            start={"deliver_policy": "all"},
            **wanted,
        )
        self.pulls = DurablePulls(client, self.durable.next_subject, NAME)
        self.called: list[Any] = []
        self.dropped: SourceError | None = None
        self.takeover = Takeover(
            connection=self.connection,
            durable=self.durable,
            pulls=self.pulls,
            name=NAME,
            resend=self._resend,
            check_dropped=self._check_dropped,
            shared=shared,
        )

    async def _resend(self) -> None:
        self.called.append("resend")

    def _check_dropped(self, stream: Any, state: Any, highest: int) -> None:
        self.called.append((stream.last, state.unacknowledged, highest))
        if self.dropped is not None:
            raise self.dropped

    async def run(self, room: Room = ROOM, highest: int = 0) -> list[int]:
        """Run a takeover. Returns the sequences of the collected messages."""
        return [sequence(raw) for raw in await self.takeover.run(room, highest)]

    async def take(self, count: int) -> list[int]:
        """Pull messages, and return the sequences of those that arrive."""
        await self.pulls.request_exactly(count)
        await until(lambda: len(self.pulls.arrived) >= count, 60.0)
        return [sequence(raw) for raw in self.pulls.take()]


def sequence(raw: Msg) -> int:
    return int(raw.reply.split(".")[5])


async def process(stage: Stage, **arguments: Any) -> Process:
    made = Process(stage, await stage.connect(), **arguments)
    await made.durable.ensure()
    return made


async def left(stage: Stage, count: int, *, stored: int | None = None, acked: tuple[int, ...] = ()) -> None:
    """Let a dead process leave this number of delivered messages, of which some are acknowledged."""
    await stage.stream("S")
    dead = await process(stage)
    await stage.publish(*["S.a"] * (count if stored is None else stored))
    await dead.pulls.renew()
    if count:
        await dead.pulls.request_exactly(count)
    assert await until(lambda: len(dead.pulls.arrived) >= count, 60.0)
    for raw in dead.pulls.take():
        if sequence(raw) in acked:
            await stage.client.request(raw.reply, b"+ACK", timeout=5)
    await dead.pulls.close()
    await dead.connection.client.close()


def consumer(stage: Stage) -> Any:
    return stage.server.api.streams["S"].consumers["work"]


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    found = [record for record in caplog.records if record.name == "lanes.jetstream" and record.levelno >= level]
    return [record.getMessage() for record in found if "created a durable" not in record.getMessage()]


@pytest.fixture(autouse=True)
def all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="lanes.jetstream")


def barrier(what: str, count: int) -> str:
    return f"{NAME}: the early redelivery is {what}; {count} unacknowledged message(s) of an earlier process"


# --- the barrier


def test_a_consumer_without_unacknowledged_messages_needs_no_barrier(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 0, stored=2)
        made = await process(stage)
        assert await made.run() == []
        assert made.called == ["resend", (2, 0, 0)]
        assert made.takeover.count == 1
        assert await made.take(2) == [1, 2]

    played(scene)
    assert lines(caplog) == [barrier("not needed", 0)]


def test_a_shared_consumer_has_no_barrier(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 2)
        made = await process(stage, shared=True)
        assert await made.run() == []
        assert stage.fields("CONSUMER.RESET") == []

    played(scene, version="2.14.0")
    assert lines(caplog) == [barrier("off, because several processes share the consumer", 2)]


@pytest.mark.parametrize("version", ["2.13.9", "2.12.1"])
def test_an_older_server_requeues_the_messages_by_a_shrink_of_ack_wait(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 3, stored=5)
        made = await process(stage)
        assert await made.run() == [1, 2, 3]
        assert stage.fields("CONSUMER.RESET") == []
        assert await made.take(2) == [4, 5]

    played(scene, version=version)
    assert lines(caplog) == [barrier("by a short ack_wait", 3)]


def test_a_newer_server_resets_the_consumer_at_a_start_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 3, stored=4, acked=(1,))
        made = await process(stage)
        assert await made.run() == []
        assert len(stage.fields("CONSUMER.RESET")) == 1
        assert await made.take(3) == [2, 3, 4]
        # A running process may still send acknowledgements of earlier deliveries, which a reset would make void.
        made.pulls.interrupt("ended", "409 Leadership Change")
        assert await made.run(highest=4) == [2, 3, 4]
        assert len(stage.fields("CONSUMER.RESET")) == 1

    played(scene, version="2.14.0")
    assert lines(caplog) == [
        barrier("by RESET", 2),
        f"{NAME}: requesting the messages again, unacknowledged ones first (409 Leadership Change)",
        f"{NAME}: the server answers; the early redelivery is by a short ack_wait; 3 unacknowledged message(s)",
    ]


@pytest.mark.parametrize(("retention", "resets"), [("limits", False), ("workqueue", True)])
def test_a_reset_must_not_repeat_finished_messages(retention: str, resets: bool) -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream("S", retention=retention)
        await stage.publish(*["S.a"] * 3)
        dead = await process(stage)
        await dead.pulls.renew()
        await dead.pulls.request_exactly(3)
        assert await until(lambda: len(dead.pulls.arrived) == 3, 60.0)
        await stage.client.request(dead.pulls.take()[1].reply, b"+ACK", timeout=5)
        await dead.connection.client.close()
        made = await process(stage)
        assert await made.run() == ([] if resets else [1, 3])
        assert len(stage.fields("CONSUMER.RESET")) == resets

    played(scene, version="2.14.0")


@pytest.mark.parametrize("fault", ["refused", "denied"])
def test_a_reset_that_is_not_permitted_is_replaced_by_a_shrink(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 2)
        made = await process(stage)
        if fault == "refused":
            stage.answer(RESET, refusal(400, 7, "no reset"))
        else:
            stage.deny(f"$JS.API.{RESET}")
        assert await made.run() == [1, 2]

    played(scene, version="2.14.0")
    said = "no reset (7)" if fault == "refused" else "grant this permission"
    first, second = lines(caplog)
    assert first.startswith(f"{NAME}: the consumer cannot be reset (")
    assert said in first
    assert second == barrier("by a short ack_wait", 2)


def test_a_reset_without_a_leader_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 2)
        made = await process(stage)
        stage.answer(RESET, refusal(503, 10_008, "no leader"))
        began = monotonic()
        assert await made.run() == []
        assert monotonic() - began == pytest.approx(RETRY_DELAY, abs=0.1)
        assert len(stage.fields("CONSUMER.RESET")) == 2

    played(scene, version="2.14.0")
    assert lines(caplog) == [
        f"{NAME}: takeover not finished (no leader (10008)); retrying every 0.5 s",
        barrier("by RESET", 2),
    ]


# --- hold-back


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0"])
def test_a_takeover_without_a_shrink_waits_until_the_server_redelivers_the_messages(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 2, stored=4)
        made = await process(stage, hold_back=True)
        began = monotonic()
        assert await made.run() == [1, 2]
        assert monotonic() - began == pytest.approx(31.0, abs=0.2)
        assert len(stage.fields("CONSUMER.CREATE")) == 1, "no timer was changed"
        assert stage.fields("CONSUMER.RESET") == []
        assert await made.take(2) == [3, 4]

    played(scene, version=version)
    said = (
        f"{NAME}: the early redelivery is by hold-back; requesting nothing for 31.0 s, until unacknowledged messages "
        "return"
    )
    assert lines(caplog) == [said]


def test_a_hold_back_ends_as_soon_as_nothing_is_unacknowledged() -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 1)
        made = await process(stage, hold_back=True)
        stage.server.later(monotonic() + 3.0, lambda now: stage.server.api.streams["S"].ack(consumer(stage), 1, now))
        stage.network.schedule()
        began = monotonic()
        assert await made.run() == []
        assert monotonic() - began < 5.0

    played(scene)


def test_a_hold_back_begins_again_after_a_lost_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 1)
        made = await process(stage, hold_back=True)
        stage.server.later(monotonic() + 20.0, lambda now: stage.server.stop())
        stage.server.later(monotonic() + 21.0, stage.server.start)
        stage.network.schedule()
        began = monotonic()
        assert await made.run() == [1]
        assert monotonic() - began < 60.0
        assert made.called.count("resend") >= 2

    played(scene)
    assert any("takeover not finished" in line for line in lines(caplog))


def test_an_interruption_ends_a_hold_back(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 1)
        made = await process(stage, hold_back=True)
        running = asyncio.create_task(made.run())
        await asyncio.sleep(5.0)
        made.pulls.interrupt("ended", "409 Server Shutdown")
        assert await running == [1]

    played(scene)
    said = f"{NAME}: takeover not finished ({NAME}: 409 Server Shutdown); retrying every {RETRY_DELAY:g} s"
    assert lines(caplog, logging.WARNING)[1] == said


def test_after_a_hold_back_a_lost_delivery_is_collected_with_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 0, stored=4)
        made = await process(stage, hold_back=True)
        assert await made.run() == []
        assert await made.take(3) == [1, 2, 3]
        made.pulls.interrupt("ended", "409 Server Shutdown")
        lost = iter((False, True))
        stage.server._loses = lambda member, reply: next(lost, False)
        assert await made.run(highest=3) == [1, 2, 3]
        assert await made.take(1) == [4]

    played(scene)
    assert "takeover not finished (jetstream S/work: a delivery between 4 and 6 is missing)" in caplog.text


def test_after_a_reconnect_a_hold_back_asks_for_no_more_than_the_room() -> None:
    """The messages of this process do not return, so new messages would arrive in their place."""

    async def scene(stage: Stage) -> None:
        await left(stage, 0, stored=6)
        made = await process(stage, hold_back=True)
        await made.run()
        assert await made.take(3) == [1, 2, 3]
        made.pulls.interrupt("ended", "409 Server Shutdown")
        collected = await made.run(Room(2, 1000), 3)
        assert collected == [1, 2]
        assert await made.take(1) == [3]

    played(scene)


# --- a shrink that fails


@pytest.mark.parametrize("fault", ["refused", "denied", "unanswered"])
def test_a_shrink_that_fails_for_good_is_replaced_by_a_hold_back(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 2)
        made = await process(stage)
        if fault == "refused":
            stage.answer(CREATE, refusal(400, 7, "no update"))
        elif fault == "denied":
            stage.deny(f"$JS.API.{CREATE}")
        else:
            # Another account may drop a request without a permission.
            stage.meet(f"$JS.API.{CREATE}", *[Fate("drop_request")] * 99)
        began = monotonic()
        assert await made.run() == [1, 2]
        wait = 31.0 + (3 * API_TIMEOUT + 2 * RETRY_DELAY if fault == "unanswered" else 0.0)
        assert monotonic() - began == pytest.approx(wait, abs=1.0)

    played(scene)
    warnings = lines(caplog, logging.WARNING)
    said = {"refused": f"{NAME}: ack_wait cannot be changed (no update (7)); holding back instead"}.get(fault)
    holding = [line for line in warnings if line.endswith("; holding back instead")]
    assert len(holding) == 1
    assert holding[0].startswith(f"{NAME}: ")
    assert said in (None, holding[0])


def test_a_shrink_without_a_leader_is_tried_again() -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 2)
        made = await process(stage)
        stage.answer(CREATE, refusal(503, 10_008, "no leader"))
        began = monotonic()
        assert await made.run() == [1, 2]
        assert monotonic() - began < 3.0

    played(scene)


def test_an_answered_shrink_ends_the_count_of_unanswered_ones() -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 2)
        made = await process(stage)
        for _ in range(2):
            stage.meet(f"$JS.API.{CREATE}", *[Fate("drop_request")] * 2)
            began = monotonic()
            assert await made.run(highest=2) == [1, 2]
            assert monotonic() - began < 20.0, "held back"
            made.pulls.interrupt("ended", "409 Server Shutdown")

    played(scene)


# --- more messages than room


def test_the_server_sorts_the_messages_of_a_takeover_that_do_not_fit_into_the_room() -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 7, stored=9)
        made = await process(stage)
        assert await made.run(Room(3, 1000)) == []
        assert len(stage.fields("CONSUMER.CREATE")) == 1 + 4, "two shrinks and two restorations"
        batches = [each["batch"] for each in stage.fields("CONSUMER.MSG.NEXT")[1:]]
        assert batches == [3, 3, 1]
        assert await made.take(9) == [*range(1, 10)]

    played(scene)


def test_more_messages_than_room_are_sorted_although_a_delivery_of_theirs_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server keeps an unsent message in front of messages that it queues later."""

    async def scene(stage: Stage) -> None:
        await left(stage, 5, stored=6)
        made = await process(stage)
        consumer(stage).losing = 1
        assert await made.run(Room(4, 1000)) == []
        assert await made.take(6) == [*range(1, 7)]

    played(scene)
    assert "takeover not finished (jetstream S/work: only 3 of 5 unacknowledged messages arrived)" in caplog.text


def test_more_messages_than_room_need_a_shrink() -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 4)
        made = await process(stage, hold_back=True)
        said = (
            rf"^{NAME}: an earlier run left 4 messages unacknowledged, and max_in_flight=3 .* max_in_flight to 4 once"
        )
        with pytest.raises(SourceError, match=said):
            await made.run(Room(3, 1000))

    played(scene)


def test_the_largest_room_so_far_bounds_a_takeover() -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 0, stored=4)
        made = await process(stage)
        await made.run(Room(4, 1000))
        assert await made.take(4) == [1, 2, 3, 4]
        made.pulls.interrupt("ended", "409 Server Shutdown")
        assert await made.run(Room(1, 1000), 4) == [1, 2, 3, 4]

    played(scene)


def test_messages_that_were_acknowledged_meanwhile_are_not_awaited() -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 3, stored=3)
        made = await process(stage)
        stage.answer(INFO, lambda answer: answer, lambda answer: {**answer, "num_ack_pending": 9})
        began = monotonic()
        assert await made.run() == [1, 2, 3]
        assert monotonic() - began < 5.0

    played(scene)


def test_a_message_whose_delivery_is_lost_is_requeued_with_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 3)
        made = await process(stage)
        consumer(stage).losing = 1
        assert await made.run() == [1, 2, 3]

    played(scene)
    assert lines(caplog) == [barrier("by a short ack_wait", 3)] * 2


def test_a_new_message_ends_the_collection() -> None:
    """The server delivers new messages after all messages of an earlier process."""

    async def scene(stage: Stage) -> None:
        await left(stage, 2, stored=3)
        made = await process(stage)
        stage.answer(INFO, lambda answer: {**answer, "num_ack_pending": 4})
        began = monotonic()
        assert await made.run() == [1, 2, 3]
        assert monotonic() - began < RETRY_DELAY, "nothing waits for a fourth message"

    played(scene)


def test_new_messages_that_arrive_before_an_unexpired_one_are_collected_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A late in-progress acknowledgement of a dead process extends a message beyond the hold-back."""

    async def scene(stage: Stage) -> None:
        await left(stage, 3, stored=6)
        made = await process(stage, hold_back=True)
        stage.server.later(monotonic() + 20.0, lambda now: consumer(stage).data.extend(2, now))
        stage.network.schedule()
        assert await made.run(Room(3, 1000)) == [1, 2, 3, 4]
        assert await made.take(2) == [5, 6]

    played(scene)
    said = f"{NAME}: takeover not finished ({NAME}: new messages arrived before an unacknowledged message)"
    assert said in caplog.text


# --- passes


def test_a_paused_consumer_is_awaited(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 1)
        made = await process(stage)
        stage.answer(INFO, *[lambda answer: {**answer, "paused": True}] * 3)
        began = monotonic()
        assert await made.run() == [1]
        assert monotonic() - began == pytest.approx(3 * RETRY_DELAY + 0.4, abs=0.2)
        assert made.called.count("resend") == 4

    played(scene)
    retries = [f"{NAME}: takeover not finished (consumer S/work is paused; resume it); retrying every 0.5 s"]
    assert lines(caplog, logging.WARNING) == retries, "logged once"
    assert [line for line in lines(caplog, logging.DEBUG) if "not finished" in line] == retries * 3


def test_each_new_failure_of_a_pass_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 0)
        made = await process(stage)
        for text in ("one", "two", "two"):
            stage.answer(INFO, refusal(503, 1, text))
        await made.run()
        made.pulls.interrupt("ended", "409 Server Shutdown")
        stage.answer(INFO, refusal(503, 1, "two"))
        await made.run()

    played(scene)
    told = [line for line in lines(caplog, logging.WARNING) if "not finished" in line]
    assert [line.partition("(")[2][:3] for line in told] == ["one", "two", "two"], "a later takeover logs it again"


@pytest.mark.parametrize("retryable", [True, False])
def test_dropped_messages_are_checked_in_each_pass(retryable: bool) -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 1)
        made = await process(stage)
        made.dropped = SourceError("messages were dropped", retryable=retryable)
        running = asyncio.create_task(made.run(highest=1))
        await asyncio.sleep(2 * RETRY_DELAY + 0.1)
        if not retryable:
            with pytest.raises(SourceError, match="messages were dropped"):
                await running
            assert made.called == ["resend", (1, 1, 1)]
            return
        assert made.called.count((1, 1, 1)) == 3
        made.dropped = None
        assert await running == [1]

    played(scene)


def test_a_deleted_consumer_or_stream_ends_the_source() -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 1)
        made = await process(stage)
        stage.server.delete_consumer("S", "work")
        with pytest.raises(SourceError, match=r"^consumer S/work was deleted; prevent the deletion"):
            await made.run()
        await stage.api("STREAM.DELETE.S")
        with pytest.raises(SourceError, match=r"^stream 'S' was deleted during the run"):
            await made.run()

    played(scene)


def test_a_denied_request_ends_the_source_with_the_permission() -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 1)
        made = await process(stage)
        stage.deny(f"$JS.API.{INFO}")
        with pytest.raises(
            SourceError,
            match=rf"^{NAME}: the given connection: permissions .*; grant this permission, then start again$",
        ):
            await made.run()

    played(scene)


@pytest.mark.parametrize("permitted", [True, False])
def test_a_consumer_that_a_dead_process_left_shrunk_is_restored_first(permitted: bool) -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 0)
        made = await process(stage)
        metadata = {"lanes-managed": "1", "lanes-original-ack-wait": str(30 * SECOND)}
        consumer(stage).config = consumer(stage).config | {"ack_wait": 1_000_000, "metadata": metadata}
        if permitted:
            await made.run()
            assert consumer(stage).config["ack_wait"] == 30 * SECOND
            return
        stage.deny(f"$JS.API.{CREATE}")
        with pytest.raises(
            SourceError,
            match=r"^consumer S/work has an ack_wait of 1 ms .*grant this permission\); .* ack_wait to 30 s",
        ):
            await made.run()

    played(scene)


def test_a_closed_connection_ends_the_source() -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 0)
        made = await process(stage)
        made.takeover.check_connection()
        await made.connection.client.close()
        with pytest.raises(SourceError, match=rf"^{NAME}: the connection is closed permanently"):
            made.takeover.check_connection()
        with pytest.raises(SourceError, match=r"closed permanently"):
            await made.run()
        broken = Process(stage, await stage.connect())
        client: Any = broken.connection.client
        await client.close()
        client._err = OSError("no route")
        with pytest.raises(SourceError, match=rf"^{NAME} \(no route\): the connection is closed permanently"):
            broken.takeover.check_connection()

    played(scene)


def test_a_takeover_waits_for_the_connection() -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 1)
        made = await process(stage)
        stage.server.stop()
        await asyncio.sleep(0.05)
        running = asyncio.create_task(made.run())
        await asyncio.sleep(20.0)
        assert made.called == []
        stage.server.start(monotonic())
        assert await running == [1]

    played(scene)


def test_an_interruption_during_a_pass_begins_another_one() -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 0)
        made = await process(stage)
        check = made.takeover.check_dropped

        def interrupted(*arguments: Any) -> None:
            check(*arguments)
            if len(made.called) < 5:
                made.pulls.interrupt("ended", "409 Server Shutdown")

        made.takeover.check_dropped = interrupted
        await made.run()
        assert made.called.count("resend") == 3
        assert made.takeover.count == 1

    played(scene)


# --- reasons


@pytest.mark.parametrize(("kind", "pause"), [("crowded", RETRY_DELAY), ("ended", 0.0)])
def test_only_a_crowded_consumer_is_given_a_pause(kind: Literal["crowded", "ended"], pause: float) -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 0)
        made = await process(stage)
        await made.run()
        made.pulls.interrupt(kind, kind)
        began = monotonic()
        await made.run()
        assert monotonic() - began == pytest.approx(pause, abs=0.1)

    played(scene)


def test_a_takeover_after_a_cancelled_one_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 0)
        made = await process(stage)
        await made.run()
        await made.pulls.renew()
        await made.run()

    played(scene)
    said = f"{NAME}: requesting the messages again, unacknowledged ones first (the last takeover was not finished)"
    assert lines(caplog, logging.WARNING) == [said]


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_missing_delivery_while_another_process_waits_is_a_second_process(waiting: int) -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 0)
        made = await process(stage)
        await made.run()
        if waiting:
            inbox = stage.client.new_inbox()
            await stage.client.subscribe(inbox)
            request = json.dumps({"batch": 1, "expires": 60 * SECOND}).encode()
            await stage.client.publish("$JS.API.CONSUMER.MSG.NEXT.S.work", request, reply=inbox)
        made.pulls.interrupt("gap", "delivery 2 missing")
        if waiting:
            with pytest.raises(SourceError, match=r"^consumer S/work is pulled by another client"):
                await made.run()
        else:
            await made.run()

    played(scene)


@pytest.mark.parametrize(("after", "stops"), [(29.0, False), (31.0, True)])
def test_requests_of_an_earlier_connection_may_take_deliveries_for_a_while(after: float, stops: bool) -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 0)
        made = await process(stage)
        await made.run()
        made.pulls.interrupt("unanswered", "no responders")
        await made.run()
        await asyncio.sleep(after)
        for expected in (False, stops):
            made.pulls.interrupt("gap", "delivery missing")
            if expected:
                with pytest.raises(SourceError, match=r"^consumer S/work is pulled by another client"):
                    await made.run()
            else:
                await made.run()

    played(scene)
