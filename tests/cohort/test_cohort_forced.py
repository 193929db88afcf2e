"""A partition that is not drained in time under ``overdue="force"`` repeats only running messages."""

from __future__ import annotations

import dataclasses
from typing import Final

import pytest

from lanes.cohort.membership import CohortSettings
from memsource.jetstream.epoch_consumers import Retention
from tests.cohort.stage import PATIENT, Stage, staged

FORCED: Final = CohortSettings(drain_within=3.0, overdue="force")
SETTINGS: Final = dataclasses.replace(PATIENT, grace=0.5)


@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
def test_a_forced_partition_repeats_only_running_messages(retention: Retention) -> None:
    async def scene(stage: Stage) -> None:
        stage.cleanup = SETTINGS.grace / 2
        _, first = stage.join()
        await stage.owns(first, 0)
        stuck = stage.publish(0)
        stage.closed.update(stuck)
        # The stuck message blocks its key and the floor; the other messages are finished.
        queued = stage.publish(0, 0, key=f"key {len(stage.broker.records) - 1}")
        finished = stage.publish(*[0] * 20)
        await stage.wait(lambda: sorted(stage.ends()) == finished, "all but one key is finished")
        _, second = stage.join()
        stage.broker.rebalance(stage.world.now)
        (partition,) = first.announced.values()
        await stage.wait(lambda: partition.draining, "the second member is planned as owner")
        began = stage.world.now
        await stage.owns(second, 0)
        assert FORCED.drain_within <= stage.world.now - began < FORCED.drain_within + FORCED.lease / 2
        stage.closed.clear()
        await stage.world.settled()
        assert stage.starts("w-2") == stuck + queued
        assert sorted(stage.ends()) == sorted(stuck + queued + finished)

    run = staged(scene, retention=retention, cohort=FORCED, settings=SETTINGS)
    assert run.happened["lost"] == 0, "the partition is released without an abandoned handler"


def test_an_uncancellable_handler_keeps_its_partition_until_the_lease_ends() -> None:
    async def scene(stage: Stage) -> None:
        _, first = stage.join()
        await stage.owns(first, 0)
        stuck = stage.publish(0)
        stage.closed.update(stuck)
        stage.deaf.update(stuck)
        finished = stage.publish(*[0] * 5)
        await stage.wait(lambda: sorted(stage.ends()) == finished, "all but one are finished")
        _, second = stage.join()
        stage.broker.rebalance(stage.world.now)
        (partition,) = first.announced.values()
        while not second.owned:
            assert stage.world.now < partition.deadline or not first.owned
            await stage.pass_time(0.1)
        # The message still runs at the first member, and no other member got the lease before the deadline.
        assert stage.starts("w-1") == [*stuck, *finished]
        assert stage.world.now >= partition.deadline
        await stage.wait(lambda: stage.starts("w-2") == stuck, "the stuck message runs at the second member")
        stage.closed.clear()
        await stage.world.settled()
        assert stage.starts("w-2") == stuck

    staged(scene, cohort=FORCED, settings=SETTINGS)
