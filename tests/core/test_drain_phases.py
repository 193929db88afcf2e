"""A drain passes through its phases only by the transitions of its table, within its timeouts."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.core import drain as phases
from lanes.core import effects as fx
from lanes.core.drain import OVER, TRANSITIONS, IllegalEvent, Limits, PartitionDrain
from lanes.core.engine import Engine
from lanes.core.types import ABANDON, ACK, NEVER, Partition
from tests.core.builders import assigned, deliver, effects, new_engine, take, take_all

LIMITS = Limits(grace=2.0, settle=5.0, last=30.0)
KEYS = (b"a", b"b", b"c")

# A second copy, so that a mistake in the table is found.
LEGAL = {
    ("idle", "begun"): "ending",
    ("ending", "ended"): "settling",
    ("ending", "late"): "cancelling",
    ("ending", "lost"): "lost",
    ("cancelling", "ended"): "settling",
    ("cancelling", "late"): "settling",
    ("cancelling", "lost"): "lost",
    ("settling", "settled"): "keeping",
    ("settling", "late"): "releasing",
    ("settling", "lost"): "lost",
    ("keeping", "kept"): "releasing",
    ("keeping", "late"): "releasing",
    ("keeping", "lost"): "lost",
    ("releasing", "released"): "handed over",
    ("releasing", "refused"): "unreleased",
    ("releasing", "lost"): "lost",
    ("unreleased", "lost"): "lost",
    # The task under way at the loss ends later.
    ("lost", "ended"): "lost",
    ("lost", "late"): "lost",
    ("lost", "settled"): "lost",
    ("lost", "kept"): "lost",
    ("lost", "released"): "lost",
    ("lost", "refused"): "lost",
    ("lost", "lost"): "lost",
}
PHASES = ("idle", "ending", "cancelling", "settling", "keeping", "releasing", "unreleased", "handed over", "lost")
EVENTS = ("begun", "ended", "late", "settled", "kept", "released", "refused", "lost", "no such event")


def drain_of(
    engine: Engine, partition: Partition, *, phase: str = phases.IDLE, close_prefix: bool = False
) -> PartitionDrain:
    return PartitionDrain(engine, partition, LIMITS, close_prefix=close_prefix, phase=phase)


def begun(engine: Engine, partition: Partition, *, close_prefix: bool = False, timeout: float = 10.0) -> PartitionDrain:
    """A drain that begins at 100."""
    drain = drain_of(engine, partition, close_prefix=close_prefix)
    drain.begin(100.0, timeout)
    return drain


def positions(drain: PartitionDrain) -> tuple[list[int], list[int]]:
    return [m.position for m in drain.abandoned], [m.position for m in drain.zombies]


# --- the table


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_drain_accepts_exactly_the_legal_events_of_each_phase(phase: str, event: str) -> None:
    engine = new_engine()
    drain = drain_of(engine, assigned(engine, floor=0), phase=phase)
    following = LEGAL.get((phase, event))
    if following is None:
        text = f"drain of S/0: {event!r} is not allowed while {phase}; a bug of lanes, please report it"
        with pytest.raises(IllegalEvent, match=re.escape(text)):
            drain.tell(event, 0.0)
        assert drain.phase == phase
    else:
        drain.tell(event, 0.0)
        assert drain.phase == following


def test_the_transition_table_of_a_drain_has_exactly_the_legal_pairs() -> None:
    assert TRANSITIONS == LEGAL
    assert sorted(OVER) == ["handed over", "lost", "unreleased"]


def test_a_drain_cannot_begin_twice() -> None:
    engine = new_engine()
    drain = begun(engine, assigned(engine))
    with pytest.raises(IllegalEvent, match="'begun' is not allowed while ending"):
        drain.begin(0.0, 1.0)


def test_the_repr_of_a_drain_shows_its_phase() -> None:
    engine = new_engine()
    assert repr(begun(engine, assigned(engine))) == "<PartitionDrain of S/0, ending>"


# --- the steps of the engine


def test_running_handlers_may_end_before_the_handover() -> None:
    engine = new_engine(concurrency=1)
    partition = assigned(engine, floor=0)
    deliver(engine, partition, 0)
    deliver(engine, partition, 1, key=b"other")
    running = take(engine)
    drain = begun(engine, partition)
    assert (positions(drain), effects(engine)) == (([1], []), [])
    engine.finish(running, ACK, 0.0)
    assert [type(effect) for effect in effects(engine)] == [fx.Drained]
    lived = partition.live
    drain.tell("ended", 101.0)
    assert (positions(drain), lived, partition.live) == (([], []), True, False)
    left = [drain.left]
    commit = engine.collect(0.0, everything=True)
    left.append(drain.left)
    engine.settled(commit)
    # The message is finished, then in a commit, then confirmed.
    assert [*left, drain.left] == [True, True, False]
    drain.tell("settled", 102.0)
    assert partition.commits is not None
    assert (partition.commits.over, engine.owns(partition)) == (False, True)
    drain.tell("kept", 103.0)
    assert (partition.commits.over, engine.owns(partition)) == (True, True)
    drain.tell("released", 104.0)
    assert (drain.phase, engine.owns(partition)) == ("handed over", False)


def test_a_handler_that_runs_too_long_does_not_count() -> None:
    engine = new_engine(concurrency=1)
    partition = assigned(engine)
    deliver(engine, partition, 0)
    running = take(engine)
    drain = begun(engine, partition)
    drain.tell("late", 110.0)
    drain.tell("late", 112.0)
    assert (drain.phase, positions(drain)) == ("settling", ([], [0]))
    assert not drain.left
    effects(engine)
    engine.finish(running, ACK, 0.0)
    assert [type(effect) for effect in effects(engine)] == [fx.Zombie]
    assert not drain.left


def test_no_message_starts_to_close_the_prefix_after_handlers_were_cancelled() -> None:
    engine = new_engine(concurrency=2)
    partition = assigned(engine, floor=0)
    run = [deliver(engine, partition, number, key=key)[0] for number, key in enumerate([b"a", b"a", b"b", b"b"])]
    assert take_all(engine) == [0, 2]
    drain = begun(engine, partition, close_prefix=True)
    # 1 is below 2, which has started.
    assert positions(drain) == ([3], [])
    engine.finish(run[2], ACK, 0.0)
    drain.tell("late", 110.0)
    assert positions(drain) == ([1], [])
    engine.finish(run[0], ABANDON, 0.0)
    assert (take_all(engine), [type(effect) for effect in effects(engine)]) == ([], [fx.Drained])
    drain.tell("ended", 111.0)
    assert positions(drain) == ([], [])


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_idle_partition_is_drained_when_its_drain_begins(interrupted: bool) -> None:
    engine = new_engine()
    partition = assigned(engine)
    if interrupted:
        deliver(engine, partition, 0)
        engine.finish(take(engine), ABANDON, 0.0)
        assert fx.Drained in map(type, effects(engine))
        assert partition.draining
    drain = begun(engine, partition)
    assert [type(effect) for effect in effects(engine)] == [fx.Drained]
    assert drain.phase == "ending"


def test_a_drain_has_something_left_until_every_acknowledgement_is_sent() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 0)
    engine.finish(take(engine), ACK, 0.0)
    drain = begun(engine, partition)
    drain.tell("ended", 100.0)
    left = drain.left
    engine.settled(engine.collect(0.0))
    assert (left, drain.left) == (True, False)


def test_no_commit_begins_after_the_last_one() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    deliver(engine, partition, 0)
    engine.finish(take(engine), ACK, 0.0)
    drain = begun(engine, partition)
    drain.tell("ended", 100.0)
    engine.unsettled(engine.collect(0.0, everything=True))
    drain.tell("late", 105.0)
    assert (drain.phase, drain.left) == ("releasing", True)
    assert engine.collect(1e9, everything=True) == []


# --- the times


def test_the_time_for_handlers_may_only_become_shorter() -> None:
    engine = new_engine()
    drain = begun(engine, assigned(engine))
    assert drain.until == 110.0
    drain.hasten(101.0, 20.0)
    assert drain.until == 110.0
    drain.hasten(101.0, 3.0)
    assert drain.until == 104.0
    drain.tell("late", 104.5)
    assert drain.until == 106.5
    drain.hasten(105.0, 0.5)
    assert drain.until == 106.5


@pytest.mark.parametrize(
    ("timeout", "ended", "until"),
    [(10.0, 101.0, 110.0), (10.0, 108.0, 113.0), (NEVER, 101.0, 131.0)],
    ids=["what is left", "not less than this", "without a limit"],
)
def test_the_settlement_of_a_drain_may_use_the_time_that_the_handlers_left(
    timeout: float, ended: float, until: float
) -> None:
    engine = new_engine()
    drain = begun(engine, assigned(engine), timeout=timeout)
    drain.tell("ended", ended)
    assert drain.until == until
    drain.tell("settled", ended + 1.0)
    assert drain.until == until
    drain.tell("kept", ended + 2.0)
    assert drain.until == NEVER


def test_after_a_cancellation_the_settlement_gets_no_time_of_the_handlers() -> None:
    engine = new_engine()
    drain = PartitionDrain(engine, assigned(engine), Limits(grace=20.0, settle=5.0, last=30.0), close_prefix=False)
    drain.begin(100.0, 0.0)
    drain.tell("late", 100.0)
    drain.tell("ended", 100.5)
    assert drain.until == 105.5


# --- every path


@given(st.data())
def test_every_path_through_a_drain_ends_fenced_and_in_time(data: st.DataObject) -> None:
    engine = new_engine(concurrency=2)
    floor = data.draw(st.sampled_from([None, 0]))
    partition = assigned(engine, floor=floor)
    for number, key in enumerate(data.draw(st.lists(st.sampled_from(KEYS), max_size=6))):
        deliver(engine, partition, number, key=key)
    running = []
    for _ in range(data.draw(st.integers(0, 4))):
        if (message := engine.take()) is not None:
            running.append(message)
            if data.draw(st.booleans()):
                engine.finish(running.pop(), ACK, 0.0)
    drain = drain_of(engine, partition, close_prefix=data.draw(st.booleans()) and floor is not None)
    now = 100.0
    drain.begin(now, timeout := data.draw(st.sampled_from([0.0, 1.0, 10.0])))
    told: list[str] = []
    while drain.phase not in OVER:
        if data.draw(st.booleans()) and running:
            before = (partition.live, partition.finished[:])
            engine.finish(running.pop(), ACK, now)
            # After the fence no outcome counts.
            assert before[0] or partition.finished == before[1]
        now += data.draw(st.floats(0.0, 1.0)) * (min(drain.until, now + 1.0) - now)
        legal = sorted(event for phase, event in TRANSITIONS if phase == drain.phase)
        event = data.draw(st.sampled_from(legal))
        if event == "late":
            now = drain.until
        elif event == "lost":
            engine.lose(partition)
        drain.tell(event, now)
        told.append(event)
        # No phase repeats.
        assert len(told) <= 5
        assert partition.live == (drain.phase in ("ending", "cancelling"))
        if drain.phase == "releasing":
            assert partition.commits is None or partition.commits.over
            assert now <= 100.0 + timeout + LIMITS.grace + LIMITS.settle
            assert told[-1] in ("kept", "late")
        assert engine.owns(partition) == (drain.phase not in ("handed over", "lost"))
    assert (drain.phase == "handed over") == (told[-1] == "released")
    if drain.phase == "unreleased":
        engine.lose(partition)
        drain.tell("lost", now)
    assert engine.collect(1e9, everything=True) == []
    if drain.phase == "lost":
        for late in ("ended", "late", "settled", "kept", "released", "refused", "lost"):
            drain.tell(late, now)
            assert drain.phase == "lost"
    for message in running:
        engine.finish(message, ACK, now)
    assert (engine.flow.in_flight, engine.chains.fenced, engine.collect(1e9, everything=True)) == (0, set(), [])
