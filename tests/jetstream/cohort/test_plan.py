"""Real members follow the plan of the cohort, and a change of members moves as few partitions as possible."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import lanes
from lanes.core.cohort.plan import plan
from tests.jetstream.cohort_workload import FAST, CohortStream, Log, members, owned, settled
from tests.jetstream.conftest import MakeCohortStream
from tests.jetstream.workload import until

pytestmark = pytest.mark.anyio


MANY = 64


class Member:
    """A consumer and its partition events."""

    def __init__(self, stream: CohortStream, name: str, log: Log, **arguments: Any) -> None:
        self.name = name
        self.told: list[lanes.GroupEvent] = []
        self.consumer = lanes.Consumer(
            stream.source(name, **arguments), log.handler(name), settings=FAST, on_event=self.told.append
        )

    @property
    def tokens(self) -> dict[str, int]:
        """The fencing token of each owned partition."""
        return {name: partition.epoch for name, partition in self.consumer.status().partitions.items()}

    def heard(self) -> Counter[str]:
        """Partition events since the last call, counted."""
        counted: Counter[str] = Counter(event.name for event in self.told if event.partition is not None)
        self.told.clear()
        return counted


async def owners(stream: CohortStream) -> list[str | None]:
    """The planned owner of each partition, from the bucket."""
    return list(((await stream.read("plan")) or {})["owners"])


async def test_a_member_above_its_target_is_reported_until_another_takes_the_rest(
    make_cohort_stream: MakeCohortStream,
) -> None:
    stream, log = await make_cohort_stream(partitions=6), Log()
    a, b = Member(stream, "a", log, consumer_target=2), Member(stream, "b", log)
    async with members() as running:
        running.join(a.consumer)
        await settled(a.consumer, partitions=6)
        await until(lambda: a.consumer.status().under_provisioned)
        alone = a.consumer.status()
        assert (alone.consumer_target, alone.target_honoured) == (2, True)
        running.join(b.consumer)
        await until(lambda: (len(owned(a.consumer)), len(owned(b.consumer))) == (2, 4))
        await until(lambda: not a.consumer.status().under_provisioned)
        assert b.consumer.status().target_honoured is None
        await stream.publish(*stream.a_key_each())
        await log.handled(6)
    names = [event.name for event in a.told if event.name in ("under_provisioned", "provisioned")]
    assert names[:2] == ["under_provisioned", "provisioned"]
    assert log.violations == []


async def test_a_join_moves_only_its_share(make_cohort_stream: MakeCohortStream) -> None:
    """Only the new member gains partitions, no more than its share; the others keep their ownership."""
    stream, log = await make_cohort_stream(partitions=MANY), Log()
    keys = stream.a_key_each()
    *incumbents, newcomer = (Member(stream, name, log) for name in "abcd")
    async with members() as running:
        running.join(*(each.consumer for each in incumbents))
        await settled(*(each.consumer for each in incumbents), partitions=MANY)
        await stream.publish(*keys)
        await log.handled(MANY)
        before = {each.name: each.tokens for each in incumbents}
        for each in incumbents:
            each.heard()
        running.join(newcomer.consumer)
        await settled(*(each.consumer for each in (*incumbents, newcomer)), partitions=MANY)
        assert len(newcomer.tokens) == MANY // 4
        assert newcomer.heard() == {"assigned": MANY // 4}
        for each in incumbents:
            assert each.tokens.items() <= before[each.name].items()
            assert each.heard() == {"revoked": len(before[each.name]) - MANY // 4}
        assert Counter(await owners(stream)) == dict.fromkeys("abcd", MANY // 4)
        await stream.publish(*keys)
        await log.handled(2 * MANY)
    assert log.violations == []
    assert log.repeats == []
    assert len(log.of("d")) == MANY // 4


async def test_a_leave_moves_only_the_partitions_of_the_leaver(make_cohort_stream: MakeCohortStream) -> None:
    """The partitions of the leaver are divided among the others, who keep their own."""
    stream, log = await make_cohort_stream(partitions=MANY), Log()
    keys = stream.a_key_each()
    leaver, *survivors = (Member(stream, name, log) for name in "abcd")
    everybody = [leaver.consumer, *(each.consumer for each in survivors)]
    async with members() as running:
        running.join(*everybody)
        await settled(*everybody, partitions=MANY)
        await stream.publish(*keys)
        await log.handled(MANY)
        before = {each.name: each.tokens for each in survivors}
        for each in survivors:
            each.heard()
        await running.leave(leaver.consumer)
        await settled(*(each.consumer for each in survivors), partitions=MANY)
        for each in survivors:
            gained = len(each.tokens) - len(before[each.name])
            assert 5 <= gained <= 6
            assert before[each.name].items() <= each.tokens.items()
            assert each.heard() == {"assigned": gained}
        assert set(await owners(stream)) == {"b", "c", "d"}
        await stream.publish(*keys)
        await log.handled(2 * MANY)
    assert log.violations == []
    assert log.repeats == []
    assert len(log.of("a")) == MANY // 4


async def test_a_member_owns_by_its_weight(make_cohort_stream: MakeCohortStream) -> None:
    """Each heartbeat has the member's weight; the planner reads them and follows the pure plan."""
    stream, log = await make_cohort_stream(partitions=8), Log()
    a, b, c = (Member(stream, name, log, weight=weight) for name, weight in (("a", 3), ("b", 1), ("c", 4)))

    async def shares(*wanted: int) -> None:
        await until(lambda: tuple(len(owned(each.consumer)) for each in (a, b, c)) == wanted)

    async with members() as running:
        running.join(a.consumer, b.consumer)
        await until(lambda: a.consumer.ready and b.consumer.ready)
        await shares(6, 2, 0)
        before = await owners(stream)
        kept = a.tokens | b.tokens
        running.join(c.consumer)
        await shares(3, 1, 4)
        assert await owners(stream) == list(plan(before, {"a": 3, "b": 1, "c": 4}).owners)
        assert (a.tokens | b.tokens).items() <= kept.items()
        assert ((await stream.read("m.c")) or {})["weight"] == 4
        await running.leave(c.consumer)
        await shares(6, 2, 0)
        await stream.publish(*stream.a_key_each())
        await log.handled(8)
    assert Counter(run.member for run in log.runs) == {"a": 6, "b": 2}
    assert log.violations == []
