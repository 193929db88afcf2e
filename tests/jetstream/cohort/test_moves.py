"""Partitions move between members on a real server after a drain and in order; other partitions stay."""

from __future__ import annotations

import anyio
import pytest

import lanes
from lanes import Nak
from lanes_jetstream.cohort.view import CohortView
from lanes_jetstream.wire.connection import Connection
from tests.jetstream.cohort_workload import (
    FAST,
    LEASE,
    CohortStream,
    Deadlines,
    Gate,
    Log,
    draining,
    members,
    owned,
    settled,
)
from tests.jetstream.conftest import MakeCohortStream
from tests.jetstream.workload import until

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
async def test_members_join_and_leave_without_loss_or_repeat(
    make_cohort_stream: MakeCohortStream, retention: str
) -> None:
    """No message is lost or handled twice, and each key keeps its order, with each retention."""
    stream = await make_cohort_stream(retention=retention)
    log = Log()
    a, b, c = (lanes.Consumer(stream.source(name), log.handler(name), settings=FAST) for name in "abc")
    keys = [stream.key(partition, number) for partition in range(4) for number in range(3)]
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
        await stream.publish(*keys, times=5)
        running.join(b, c)
        await stream.publish(*keys, times=5)
        await settled(a, b, c, partitions=4)
        await stream.publish(*keys, times=5)
        await log.handled(stream.published)
        await running.leave(a)
        await settled(b, c, partitions=4)
        await stream.publish(*keys, times=5)
        await log.handled(stream.published)
    assert log.violations == []
    assert log.repeats == []
    assert {run.member for run in log.runs} == {"a", "b", "c"}
    assert len(await stream.durables()) == 4


async def test_a_partition_is_drained_before_the_next_owner_starts(cohort_stream: CohortStream) -> None:
    """Three messages run; none of their partition starts elsewhere before the third has settled."""
    stream, log = cohort_stream, Log()
    held = [stream.key(partition, number) for partition in range(4) for number in range(3)]
    gate = Gate(*held)
    a = lanes.Consumer(stream.source("a"), log.handler("a", gate), settings=FAST)
    b = lanes.Consumer(stream.source("b"), log.handler("b"), settings=FAST)
    async with members() as running:
        await running.hold(a, stream, gate, *held)
        running.join(b)
        moving = await draining(a, 2)
        await stream.publish(*[key for key in held if stream.partition(key) in moving])
        for left in range(11, -1, -1):
            gate.let_one_through()
            await until(lambda left=left: gate.waiting == left)  # type: ignore[misc]
            still = {run.partition for runs in log.running.values() for run in runs if run.member == "a"}
            assert not still & {run.partition for run in log.of("b")}
        await log.handled(stream.published)
        await settled(a, b, partitions=4)
    for partition in moving:
        last = max(ended for run, _, ended in log.ended if run.member == "a" and run.partition == partition)
        assert all(run.started > last for run in log.of("b") if run.partition == partition)
    assert {run.partition for run in log.of("b")} == moving
    assert log.violations == []
    assert log.repeats == []


async def test_a_move_drains_only_the_moving_partitions(cohort_stream: CohortStream) -> None:
    """The other partitions continue, even while a handler delays the move."""
    stream, log = cohort_stream, Log()
    gate = Gate(*stream.a_key_each())
    a = lanes.Consumer(stream.source("a"), log.handler("a", gate), settings=FAST)
    b = lanes.Consumer(stream.source("b"), log.handler("b"), settings=FAST)
    async with members() as running:
        await running.hold(a, stream, gate, *stream.a_key_each())
        running.join(b)
        stay = {0, 1, 2, 3} - await draining(a, 2)
        epochs = {name: part.epoch for name, part in a.status().partitions.items() if not part.draining}
        await stream.publish(*[stream.key(partition, 1) for partition in stay], times=3)
        await until(lambda: len([run for run in log.runs if run.partition in stay]) == 8)
        assert gate.waiting == 4
        gate.open()
        await settled(a, b, partitions=4)
        assert owned(a) == stay
        assert {name: part.epoch for name, part in a.status().partitions.items()} == epochs
    assert log.violations == []
    assert log.repeats == []


@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
async def test_a_move_repeats_no_finished_message(make_cohort_stream: MakeCohortStream, retention: str) -> None:
    """With a stuck key, the next owner repeats the unfinished messages above it, but no finished message."""
    stream, log = await make_cohort_stream(retention=retention), Log()
    stuck = stream.a_key_each()
    others = [stream.key(partition, 1) for partition in range(4)]

    async def fail(message: lanes.Message) -> None:
        if (message.key or b"").decode() in stuck:
            raise Nak(delay=60)

    a = lanes.Consumer(stream.source("a"), log.handler("a", fail), settings=FAST)
    b = lanes.Consumer(stream.source("b"), log.handler("b"), settings=FAST)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
        await stream.publish(*stuck, *others, *stuck)
        await stream.publish(*others, times=10)
        await log.handled(44)
        await until(lambda: len(log.runs) == 48)
        running.join(b)
        await settled(a, b, partitions=4)
        moved = owned(b)
        await until(lambda: len(log.of("b")) == 4)
        await running.leave(a)
        await log.handled(stream.published)
    assert len(moved) == 2
    assert log.violations == []
    assert log.repeats == []
    assert {(run.key or b"").decode() for run in log.of("b")} == set(stuck)


async def test_a_gained_partition_delivers_its_whole_backlog(cohort_stream: CohortStream) -> None:
    """Messages from before and during the move are all handled, in order."""
    stream, log = cohort_stream, Log()
    stream.lease = LEASE
    keys = stream.a_key_each()
    await stream.publish(*keys, times=25)
    a = lanes.Consumer(stream.source("a"), log.handler("a"), settings=FAST)
    gate = Gate(*keys)
    b = lanes.Consumer(stream.source("b"), log.handler("b", gate), settings=FAST)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
        await log.handled(stream.published)
        running.join(b)
        await settled(a, b, partitions=4)
        gained = [key for key in keys if stream.partition(key) in owned(b)]
        await stream.publish(*keys, times=50)
        await until(lambda: gate.waiting == 2)
        await running.crash(b)
        # Unfinished messages of the earlier owner come first.
        await settled(a, partitions=4)
        await stream.publish(*gained)
        await log.handled(stream.published)
    assert len(gained) == 2
    assert log.violations == []
    assert len(log.done) == stream.published


async def test_members_without_a_partition_are_standbys(make_cohort_stream: MakeCohortStream) -> None:
    stream = await make_cohort_stream(partitions=1)
    log = Log()
    events: dict[str, list[lanes.GroupEvent]] = {"a": [], "b": []}
    a, b = (
        lanes.Consumer(stream.source(name), log.handler(name), settings=FAST, on_event=events[name].append)
        for name in "ab"
    )
    async with members() as running:
        running.join(a, b)
        await until(lambda: a.ready and b.ready and len(owned(a) | owned(b)) == 1)
        standby, owner = (a, b) if owned(b) else (b, a)
        assert standby.ready
        assert not standby.active
        await stream.publish(*stream.a_key_each(), times=10)
        await log.handled(10)
        assert not owned(standby)
        assert len({run.member for run in log.runs}) == 1
        await running.leave(owner)
        await until(lambda: owned(standby) == {0})
        await stream.publish(*stream.a_key_each(), times=10)
        await log.handled(20)
    assert log.violations == []
    assert log.repeats == []
    *waiting, taken = (e for e in events["a" if standby is a else "b"] if e.name in ("assigned", "standby"))
    assert taken.name == "assigned"
    # Once for each plan: a member that is delayed long enough misses one plan and is in the next one.
    generations = [event.generation or 0 for event in waiting]
    assert [event.name for event in waiting] == ["standby"] * len(waiting)
    assert generations == sorted({*generations}) != []


async def test_an_overdue_drain_keeps_the_partition_by_default(
    cohort_stream: CohortStream, caplog: pytest.LogCaptureFixture
) -> None:
    """The next owner waits, a warning reports the wait, and no handler is cancelled."""
    stream, log = cohort_stream, Log()
    stream.lease = LEASE
    gate = Gate(*stream.a_key_each())
    deadlines = Deadlines(gate)
    settings = lanes.Settings(drain_timeout=0.3, grace=0.2)
    a = lanes.Consumer(stream.source("a", drain_within=0.3), log.handler("a", deadlines), settings=settings)
    b = lanes.Consumer(stream.source("b"), log.handler("b"), settings=FAST)
    async with members() as running:
        await running.hold(a, stream, gate, *stream.a_key_each())
        running.join(b)
        moving = await draining(a, 2)
        await until(lambda: caplog.text.count("is not drained after 0.3 s; the next owner waits") == 2)
        # Two more renewals, a second apart, are longer than any wait above.
        for _ in range(2):
            renewed = min(deadlines.partitions[number].deadline for number in moving)
            await until(lambda then=renewed: min(deadlines.partitions[n].deadline for n in moving) > then)  # type: ignore[misc]
        assert gate.waiting == 4
        assert await draining(a, 2) == moving
        gate.open()
        await settled(a, b, partitions=4)
    assert owned(b) == set()
    assert {run.member for run in log.runs} == {"a"}
    assert log.repeats == []


async def test_an_overdue_drain_is_forced(cohort_stream: CohortStream) -> None:
    """Cancelled messages run again at the next owner; finished messages after them do not."""
    stream, log = cohort_stream, Log()
    stuck = stream.a_key_each()
    gate = Gate(*stuck)
    events: list[lanes.GroupEvent] = []

    async def slowly(message: lanes.Message) -> None:
        """A handler that cleans up for a while after its cancellation."""
        try:
            await gate(message)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.1)
            raise

    a = lanes.Consumer(
        stream.source("a", drain_within=0.3, overdue="force"), log.handler("a", slowly), on_event=events.append
    )
    b = lanes.Consumer(stream.source("b"), log.handler("b"), settings=FAST)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
        await stream.publish(*stuck)
        await stream.publish(*(stream.key(partition, 1) for partition in range(4)), times=5)
        await until(lambda: gate.waiting == 4)
        await log.handled(20)
        running.join(b)
        moving = await draining(a, 2)
        await until(lambda: gate.waiting == 2)
        await log.handled(22)
        await settled(a, b, partitions=4)
        assert sorted(run.key.decode() for run in log.of("b")) == sorted(stuck[partition] for partition in moving)
        gate.open()
        await log.handled(24)
    assert {run.partition for run in log.of("b")} == moving
    assert "lost" not in [event.name for event in events]
    assert log.violations == []
    assert log.repeats == []


async def test_a_handler_that_ignores_cancellation_holds_the_partition_until_the_lease_ends(
    make_cohort_stream: MakeCohortStream,
) -> None:
    """The move is forced, and finished messages do not run again."""
    stream = await make_cohort_stream(partitions=1)
    stream.lease = LEASE
    log, gate = Log(), Gate(stream.key(0))
    deadlines = Deadlines(gate)

    async def deaf(message: lanes.Message) -> None:
        with anyio.CancelScope(shield=True):
            await deadlines(message)

    settings = lanes.Settings(grace=0.1)
    a = lanes.Consumer(stream.source("a", drain_within=0.2, overdue="force"), log.handler("a", deaf), settings=settings)
    b = lanes.Consumer(stream.source("b"), log.handler("b"), settings=FAST)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=1)
        await stream.publish(stream.key(0), stream.key(0, 1), stream.key(0, 2))
        await log.handled(2)
        running.join(b)
        await until(lambda: b.ready)
        (partition,) = deadlines.partitions.values()
        view = CohortView(Connection(stream.client), stream.name, "lanes")
        assert await view.drain("a")
        await until(lambda: bool(log.of("b")))
        still, deadline = gate.waiting, partition.deadline
        gate.open()
        await log.handled(3)
    (run,) = log.of("b")
    assert (run.key.decode(), still) == (stream.key(0), 1)
    assert run.started >= deadline
