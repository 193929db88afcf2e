"""Partitions move between real members, and are lost and acquired again, without lost messages, in virtual time."""

from __future__ import annotations

import dataclasses
import math
from typing import Final, Literal

import pytest

from lanes import Retry
from lanes.cohort.membership import CohortSettings
from memsource.jetstream.epoch_consumers import Retention
from memsource.jetstream.link import LinkFault
from memsource.memory.topic import Record
from tests.cohort.stage import PATIENT, Stage, staged

RETENTIONS: Final[tuple[Retention, ...]] = ("limits", "workqueue", "interest")
LEASE: Final = CohortSettings().lease


def _position(record: Record) -> int:
    return record.position


@pytest.mark.parametrize("retention", RETENTIONS)
def test_a_moved_partition_is_drained_before_its_next_owner_starts(retention: Retention) -> None:
    async def scene(stage: Stage) -> None:
        _, first = stage.join()
        await stage.owns(first, 0)
        held = await stage.hold(0, 0, 0)
        _, second = stage.join()
        stage.broker.rebalance(stage.world.now)
        (partition,) = first.announced.values()
        await stage.wait(lambda: partition.draining, "it is asked for")
        later = stage.publish(0)
        for position in held:
            await stage.pass_time(4 * LEASE)
            assert (stage.starts("w-2"), second.owned) == ([], [])
            stage.closed.discard(position)
        await stage.owns(second, 0)
        await stage.wait(lambda: stage.starts("w-2") == later, "the next owner handles the later messages")
        await stage.world.settled()
        assert stage.ends() == held + later

    staged(scene, retention=retention)


def test_a_moved_partition_starts_at_its_next_owner_after_the_last_retry_has_failed() -> None:
    async def scene(stage: Stage) -> None:
        _, first = stage.join()
        await stage.owns(first, 0)
        held = await stage.hold(0, 0, 0)
        _, second = stage.join()
        stage.broker.rebalance(stage.world.now)
        stage.failing.add(held[2])
        stage.closed.difference_update(held[:2])
        await stage.pass_time(4 * LEASE)
        assert (stage.starts("w-2"), second.owned) == ([], [])
        stage.closed.clear()
        await stage.owns(second, 0)
        # Only the failed message without a dead letter runs again there.
        await stage.wait(lambda: stage.starts("w-2") == held[2:], "the third message runs again")
        stage.failing.clear()

    staged(scene, settings=dataclasses.replace(PATIENT, retry=Retry(attempts=1)))


@pytest.mark.parametrize("retention", RETENTIONS)
def test_a_partition_of_a_member_that_is_cut_off_starts_at_its_next_owner_after_the_lease(retention: Retention) -> None:
    async def scene(stage: Stage) -> None:
        _, first = stage.join()
        await stage.owns(first, 0)
        held = await stage.hold(0, 0, 0)
        first.link.cut = True
        _, second = stage.join()
        (partition,) = first.announced.values()
        while not stage.starts("w-2"):
            deadline = partition.deadline
            assert (not second.owned) or stage.world.now >= deadline
            await stage.pass_time(0.1)
        assert stage.world.now >= partition.deadline
        assert first.owned == []
        first.link.cut = False
        stage.closed.clear()
        await stage.world.settled()
        assert sorted(stage.starts("w-2")) == held
        assert sorted(stage.ends()) == held

    staged(scene, retention=retention)


@pytest.mark.parametrize("retention", RETENTIONS)
def test_a_dead_owner_does_not_block_a_partition(retention: Retention) -> None:
    async def scene(stage: Stage) -> None:
        worker, first = stage.join()
        await stage.owns(first, 0, 1)
        _, second = stage.join()
        await stage.wait(lambda: len(second.owned) == 1, "both own one")
        (dead,) = first.owned
        held = await stage.hold(dead, dead)
        began = stage.world.now
        stage.crash(worker)
        stage.closed.clear()
        await stage.owns(second, 0, 1)
        assert stage.world.now - began <= LEASE + 1.0
        await stage.world.settled()
        assert stage.starts("w-2") == held

    staged(scene, partitions=2, retention=retention)


def test_a_move_drains_only_the_moving_partitions() -> None:
    async def scene(stage: Stage) -> None:
        _, first = stage.join()
        await stage.owns(first, 0, 1, 2, 3)
        kept = {number: partition for (number, _), partition in first.announced.items()}
        _, second = stage.join()
        await stage.wait(lambda: len(second.owned) == 2, "two partitions have moved")
        stays = sorted(first.owned)
        assert sorted(second.owned) == sorted({0, 1, 2, 3} - set(stays))
        # The partition was kept: the assignment is the same, and no other token was given out.
        for number in stays:
            assert kept[number].live
            assert [at for at, _ in first.announced].count(number) == 1
        positions = stage.publish(*stays)
        await stage.world.settled()
        assert sorted(stage.starts("w-1")) == positions

    run = staged(scene, partitions=4)
    assert run.happened["drained"] == 2 + 4  # those that moved, and all of them at the end


@pytest.mark.parametrize("retention", ["limits", "interest"])
def test_a_gained_partition_delivers_its_whole_backlog(retention: Retention) -> None:
    async def scene(stage: Stage) -> None:
        _, first = stage.join()
        await stage.owns(first, 0, 1)
        await stage.hold(1)
        # Further messages of the held key wait; the last message has another key, and is finished.
        stage.publish(1, 1, key=f"key {len(stage.broker.records) - 1}")
        done = stage.publish(1, key="another")
        await stage.wait(lambda: stage.ends() == done, "the later messages are done")
        stage.publish(0)
        _, second = stage.join()
        await stage.pass_time(2.0)
        stage.closed.clear()
        await stage.wait(lambda: len(second.owned) == 1, "one partition has moved")
        await stage.world.settled()
        assert sorted(stage.ends()) == [record.position for record in sorted(stage.broker.records, key=_position)]

    staged(scene, partitions=2, retention=retention)


def test_with_one_partition_all_other_members_are_standbys() -> None:
    async def scene(stage: Stage) -> None:
        joined = [stage.join() for _ in range(3)]
        await stage.wait(lambda: sum(len(source.owned) for _, source in joined) == 1, "one member owns the partition")
        await stage.wait(lambda: all(worker.consumer.ready for worker, _ in joined), "all members are ready")
        (owner,) = [pair for pair in joined if pair[1].owned]
        others = [source for worker, source in joined if worker is not owner[0]]
        assert [worker.consumer.active for worker, _ in joined] == [pair is owner for pair in joined]
        assert [source.membership.standby for source in others] == [True, True]
        assert not owner[1].membership.standby
        stage.stop(owner[0])
        await stage.wait(lambda: any(source.owned for source in others), "a standby owns the partition")

    staged(scene)


def test_a_reconnect_keeps_the_partitions() -> None:
    async def scene(stage: Stage) -> None:
        _, first = stage.join()
        await stage.owns(first, 0, 1)
        await stage.hold(0, 1)
        before = dict(first.announced)
        stage.broker.restart(stage.world.now)
        names = {number: stage.broker.stream.names(number) for number in (0, 1)}
        await stage.wait(
            lambda: all(stage.broker.stream.names(number)[0].sub == 1 for number in (0, 1)),
            "the member has taken over from itself",
        )
        stage.closed.clear()
        stage.publish(0, 1)
        await stage.world.settled()
        assert first.announced == before
        # The same epoch with another sub-number, and no waiting message began again.
        for number, (name,) in names.items():
            assert [each.epoch for each in stage.broker.stream.names(number)] == [name.epoch]
        assert sorted(stage.starts()) == sorted({*stage.starts()})

    staged(scene, partitions=2)


@pytest.mark.parametrize("seconds", [LEASE / 4, 3 * LEASE])
def test_an_outage_of_the_bucket_does_not_overlap_owners(seconds: float) -> None:
    async def scene(stage: Stage) -> None:
        joined = [stage.join()[1] for _ in range(2)]
        await stage.wait(lambda: [len(source.owned) for source in joined] == [1, 1], "both own one")
        tokens = sorted(token for source in joined for _, token in source.announced)
        for source in joined:
            source.link.cut = True
        await stage.pass_time(seconds)
        owned = [len(source.owned) for source in joined]
        assert owned == ([1, 1] if seconds < LEASE / 2 else [0, 0])
        for source in joined:
            source.link.cut = False
        stage.publish(0, 1)
        await stage.world.settled()
        await stage.wait(
            lambda: sorted(n for source in joined for n in source.owned) == [0, 1], "all partitions are owned"
        )
        again = sorted(token for source in joined for _, token in source.announced)
        assert (again == tokens) == (seconds < LEASE / 2)

    staged(scene, partitions=2)


@pytest.mark.parametrize("retention", RETENTIONS)
def test_epochs_rise_after_the_bucket_is_lost(retention: Retention) -> None:
    async def scene(stage: Stage) -> None:
        worker, first = stage.join()
        await stage.owns(first, 0)
        stage.publish(0)
        await stage.world.settled()
        ((_, old),) = first.announced
        partition = first.announced[0, old]
        # The cut-off member does not learn of the loss, and relies on its lease until the deadline.
        first.link.cut = True
        lost = stage.world.now
        stage.broker.lose(0, lost)
        _, second = stage.join()
        while first.owned:
            assert second.owned == []
            await stage.pass_time(0.1)
        stage.crash(worker)
        await stage.owns(second, 0)
        assert partition.deadline <= stage.world.now <= lost + 3 * LEASE
        ((_, new),) = second.announced
        assert new > max(token for _, token in first.announced)
        stage.publish(0)
        await stage.world.settled()

    staged(scene, retention=retention)


@pytest.mark.parametrize("finished", [False, True], ids=["held", "finished"])
@pytest.mark.parametrize("retention", RETENTIONS)
def test_a_partition_that_drains_while_the_bucket_is_lost_has_one_owner(retention: Retention, finished: bool) -> None:
    """Without a handover, messages run again under a higher token, and only after the loss here."""

    async def scene(stage: Stage) -> None:
        _, first = stage.join()
        await stage.owns(first, 0, 1)
        old = dict(list(first.announced))
        held = await stage.hold(0, 1)
        _, second = stage.join()
        await stage.wait(lambda: any(part.draining for part in first.announced.values()), "one partition must move")
        deadlines = {number: partition.deadline for (number, _), partition in first.announced.items()}
        stage.broker.lose(0, stage.world.now)
        if finished:
            stage.closed.clear()
        while first.owned:
            assert second.owned == []
            await stage.pass_time(0.1)
        lost = stage.world.now
        assert lost <= max(deadlines.values())
        stage.closed.clear()
        await stage.wait(lambda: len(first.owned) == len(second.owned) == 1, "each member owns one partition")
        assert stage.world.now - lost <= 3 * LEASE
        new = {number: token for source in (first, second) for number, token in source.announced}
        assert all(new[number] > old[number] for number in (0, 1))
        later = stage.publish(0, 1)
        await stage.world.settled()
        assert sorted(stage.ends()) == held + later
        assert len(stage.starts()) == (4 if finished else 6)

    staged(scene, partitions=2, retention=retention)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["request lost", "reply lost"])
def test_an_unknown_result_of_a_write_is_resolved(kind: Literal["request lost", "reply lost"]) -> None:
    """A lost answer to any write of an acquisition, a renewal or a release loses no message."""

    async def scene(stage: Stage, number: int) -> None:
        worker, first = stage.join()
        first.link.faults.extend([*[None] * number, LinkFault(kind)])
        await stage.owns(first, 0)
        positions = stage.publish(0, 0)
        await stage.pass_time(LEASE)
        assert first.owned == [0], "an answer to a renewal is lost, but the lease is kept"
        _, second = stage.join()
        stage.stop(worker)
        await stage.owns(second, 0)
        stage.publish(0)
        await stage.world.settled()
        assert sorted(stage.starts("w-1")) == positions
        assert len(stage.starts("w-2")) == 1

    for number in range(30):
        staged(lambda stage, number=number: scene(stage, number))  # type: ignore[misc]


def test_a_member_frozen_past_its_lease_uses_no_former_ownership() -> None:
    async def scene(stage: Stage) -> None:
        worker, first = stage.join()
        await stage.owns(first, 0)
        _, second = stage.join()
        await stage.wait(lambda: second.membership.generation > 0, "the new member is a standby")
        held = await stage.hold(0)
        queued = stage.publish(0, 0, key=f"key {len(stage.broker.records) - 1}")
        await stage.pass_time(0.5)
        (old,) = first.announced.values()
        acknowledged = stage.broker.stream.stale
        stage.freeze(worker, 4 * LEASE)
        await stage.owns(second, 0)
        assert first.owned == [0], "the frozen member has received no event"
        stage.closed.clear()
        await stage.world.settled()
        await stage.wait(lambda: not old.live, "it wakes")
        await stage.pass_time(LEASE)
        assert stage.starts("w-1") == held
        assert sorted(stage.starts("w-2")) == sorted(held + queued)
        assert stage.broker.stream.stale == acknowledged, "the frozen member has sent no request"
        assert (first.owned, first.membership.deadline(0)) == ([], -math.inf)

    staged(scene)


def test_a_late_renewal_loses_the_partition_on_both_sides() -> None:
    async def scene(stage: Stage) -> None:
        _, source = stage.join()
        await stage.owns(source, 0)
        tokens = [token for _, token in source.announced]
        (tenancy,) = source._partitions.by_number.values()
        tenancy.partition.deadline = stage.world.now
        await stage.wait(lambda: len(source.announced) == 2, "the partition is lost and owned again")
        assert max(token for _, token in source.announced) > tokens[0]
        before = stage.publish(0, 0)
        await stage.world.settled()
        assert stage.ends() == before

    staged(scene)
