"""Static members: restarts, two members with the same instance id, and rebuilt clients."""

from __future__ import annotations

import pytest

import lanes
from lanes_kafka.client import rebuilds as client_rebuilds
from tests.kafka.conftest import MakeTopic
from tests.kafka.members import Story, Work, group
from tests.kafka.workload import produce, until

pytestmark = pytest.mark.anyio


def static(name: str) -> dict[str, str]:
    return {"group.instance.id": name}


@pytest.mark.parametrize("protocol", ["eager", pytest.param("cooperative", marks=pytest.mark.slow), "848"])
async def test_the_restart_of_a_static_member_moves_no_partition(protocol: str, topic: MakeTopic) -> None:
    events = topic(2)
    story = Story()
    work = Work(story)
    async with group(events, protocol, work) as members:
        leaving = members.start("leaving", config=static("one"))
        members.start("staying", config=static("two"))
        await members.owning(leaving=1, staying=1)
        (its,) = story.owned("leaving")
        before = len(story.events)
        await leaving.consumer.drain()
        members.start("back", config=static("one"))
        await members.owning(back=1)
        for number in range(2):
            produce(events, 5, partition=number)
        await until(lambda: len(work.ended) == 10)
        assert story.owned("back") == {its}
        assert {each.what for each in story.events[before:] if each.member == "staying"} <= {"start", "end", "commit"}
    assert set(work.ended.values()) == {1}


@pytest.mark.parametrize("protocol", ["eager", pytest.param("cooperative", marks=pytest.mark.slow), "848"])
async def test_a_second_member_with_the_same_instance_id_is_an_error_that_names_the_id(
    protocol: str, topic: MakeTopic
) -> None:
    events = topic(1)
    produce(events, 1, keys=[b"key"])
    story = Story()
    work = Work(story)
    work.hold(b"key")
    work.stubborn.add(b"key")
    async with group(events, protocol, work) as members:
        first = members.start("first", config=static("twin"), settings=lanes.Settings(drain_timeout=0.5, grace=0.2))
        await until(lambda: bool(story.of("start", "first")))
        zombie = work.held(b"key")
        work.hold(b"key")
        second = members.start("second", config=static("twin"))
        # The classic protocol ends the old member, and KIP-848 the new one.
        loser, winner = (second, first) if protocol == "848" else (first, second)
        if loser is first:
            # The member was fenced without a callback.
            await until(lambda: bool(story.of("lost", "first") and story.of("start", "second")))
            zombie.set()
        await loser.ended.wait()
        zombie.set()
        assert isinstance(loser.failure, lanes.SourceError)
        assert "only one member may have group.instance.id='twin'" in str(loser.failure)
        work.let_go(b"key")
        await until(lambda: members.committed() == [1])
        assert winner.failure is None
        assert {each.position for each in story.of("commit", loser.name)} <= {0}
    assert work.ended[0, 0] == (1 if loser is second else 2)


@pytest.mark.parametrize("rebuilds", [1, 2])
async def test_a_fenced_client_is_rebuilt_a_limited_number_of_times(
    rebuilds: int, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_rebuilds, "FIRST_PAUSE", 0.01)
    events = topic(1)
    story = Story()
    work = Work(story)
    async with group(events, "eager", work) as members:
        first = members.start("first", config=static("twin"), rebuilds=rebuilds)
        await members.owning(first=1)
        for attempt in range(1, rebuilds + 1):
            rival = members.start(f"rival {attempt}", config=static("twin"))
            # The rebuilt client fences the rival.
            await until(lambda rival=rival: rival.failure is not None)  # type: ignore[misc]
            assert first.failure is None and len(first.clients) == 1 + attempt
            await until(lambda: bool(story.owned("first")))
        produce(events, 5)
        await until(lambda: len(story.of("end", "first")) == 5)
        last = members.start("last", config=static("twin"))
        await until(lambda: first.ended.is_set())
        assert isinstance(first.failure, lanes.SourceError) and "group.instance.id='twin'" in str(first.failure)
        assert len(first.clients) == 1 + rebuilds and last.failure is None


async def test_a_taken_instance_id_is_awaited_under_848(topic: MakeTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("FIRST_PAUSE", "LONGEST_PAUSE"):
        monkeypatch.setattr(client_rebuilds, pause, 0.05)
    events = topic(1)
    story = Story()
    work = Work(story)
    async with group(events, "848", work) as members:
        first = members.start("first", config=static("twin"))
        await members.owning(first=1)
        second = members.start("second", config=static("twin"), rebuilds=1_000)
        await until(lambda: len(second.clients) > 2)
        assert story.owned("first") == {0}
        await first.consumer.drain()
        await members.owning(second=1)
        produce(events, 5)
        await until(lambda: len(story.of("end", "second")) == 5)
    assert first.failure is None and second.failure is None
