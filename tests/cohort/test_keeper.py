"""A lease keeper performs each action of its machine, passes the result to the machine, and wakes for each input."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, Final

import anyio
import pytest

from lanes import SourceError
from lanes.cohort.keeper import SLOW, Alarm, LeaseKeeper
from lanes.cohort.leases import Conflict, ConsumerExists, EpochConsumer, UnknownResult
from lanes.core.cohort.actions import (
    Consumer,
    CreateConsumer,
    DeleteConsumer,
    FindConsumers,
    Found,
    LeaseLost,
    LeaseOwned,
    LeaseReleased,
    LeaseRevoked,
    Overlapping,
    Read,
    Refused,
    Taken,
    Unknown,
    Wait,
    Write,
)
from lanes.core.cohort.checkpoint_pace import CheckpointPace
from lanes.core.cohort.ledger import Done
from memsource.sim.loop.event_loop import current
from tests.cohort.members import virtual

PATIENCE: Final = 0.5
DONE: Final = Done(5, (3,))


class Machine:
    """A lease machine whose actions the test gives; ``told`` has its calls, and ``results`` those of its actions."""

    partition = 3
    phase = "testing"

    def __init__(self, *actions: Any) -> None:
        self.actions = list(actions)
        self.told: list[tuple[Any, ...]] = []
        self.results: list[Any] = []
        self.sent: list[tuple[float, float]] = []
        self.events: list[Any] = []
        self.deadline = -math.inf
        self.outlasting = 0.0
        self.obstructed = False
        self.fails: Exception | None = None

    @property
    def idle(self) -> bool:
        return not self.actions

    def next(self, now: float, nonce: str) -> Any:
        self.told.append(("next", now, nonce))
        return self.actions[0] if self.actions else Wait(math.inf)

    def apply(self, action: Any, result: Any, now: float, sent: float) -> None:
        assert action is self.actions.pop(0)
        self.results.append(result)
        self.sent.append((now, sent))
        if self.fails is not None:
            raise self.fails

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in ("planned", "stop", "drained", "checkpoint", "takeover", "seen", "gone", "ended", "hinted"):
            raise AttributeError(name)
        return lambda *arguments, **named: self.told.append((name, *arguments, *named.values()))


class Backend:
    """A store and durables whose answers the test gives; ``asked`` has the calls."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*arguments: Any, **named: Any) -> Any:
            self.asked.append((name, *arguments, *named.items()))
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, float):
                await anyio.sleep(answer)
            return answer

        return call


class Post:
    """A keeper, and its reports."""

    def __init__(self, machine: Machine, backend: Backend | None = None) -> None:
        self.machine = machine
        self.clock = current().time
        self.happened: list[Any] = []
        self.changes = 0
        self.overdue: list[int] = []
        self.pace = CheckpointPace()
        store: Any = backend or Backend()
        stub: Any = machine
        self.keeper = LeaseKeeper(
            stub,
            store,
            store,
            named=lambda: "cohort c, member a",
            happened=lambda number, event: self.happened.append((number, event)),
            changed=self.changed,
            clock=self.clock,
            nonce=lambda: "nonce",
            patience=PATIENCE,
            drain_within=7.0,
            overdue=self.overdue.append,
            pace=self.pace,
        )

    def changed(self) -> None:
        self.changes += 1

    async def until_idle(self) -> None:
        await self.keeper.serve(lambda: True)

    def events(self, *events: Any) -> None:
        """Let the machine report events with the next input."""
        self.machine.events += events
        self.keeper.ended()


WRITE: Final = Write("l.3", b"x", 4, 10.0, None)
CREATE: Final = CreateConsumer(7, 1, "n", 42)

FOUND: Final = [EpochConsumer(3, 7, 1, "n", 42, 10)]


@pytest.mark.parametrize(
    ("action", "answers", "asked", "result"),
    [
        (Read("l.3"), [(b"x", 4)], [("read", "l.3")], (b"x", 4)),
        (Read("l.3"), [UnknownResult()], [("read", "l.3")], Unknown),
        (WRITE, [9], [("write", "l.3", b"x", ("revision", 4), ("ttl", 10.0), ("fence", None))], 9),
        (
            Write("s.3", b"y", None, None, ("l.3", 9)),
            [Conflict()],
            [("write", "s.3", b"y", ("revision", None), ("ttl", None), ("fence", ("l.3", 9)))],
            Refused,
        ),
        (FindConsumers(), [(FOUND, 77)], [("found", 3)], Found((Consumer(7, 1, "n", 42, 10),), 77, 0)),
        (FindConsumers(marked=True), [([], 77), 30], [("found", 3), ("marked",)], Found((), 77, 30)),
        (FindConsumers(marked=True), [([], 77), None], [("found", 3), ("marked",)], Found((), 77, 0)),
        (CREATE, [None], [("create", 3, 7, 1, ("nonce", "n"), ("start", 42))], None),
        (CREATE, [ConsumerExists("why", nonce="m")], [("create", 3, 7, 1, ("nonce", "n"), ("start", 42))], Taken("m")),
        (CREATE, [ConsumerExists("y", nonce=None)], [("create", 3, 7, 1, ("nonce", "n"), ("start", 42))], Overlapping),
        (DeleteConsumer(7, 1), [None], [("delete", 3, 7, 1)], None),
        (DeleteConsumer(7, 1), [UnknownResult()], [("delete", 3, 7, 1)], Unknown),
    ],
)
def test_the_keeper_performs_each_action_and_gives_its_result_to_the_lease_machine(
    action: Any, answers: list[Any], asked: list[Any], result: Any
) -> None:
    async def test() -> None:
        machine, backend = Machine(action), Backend(*answers)
        await Post(machine, backend).until_idle()
        assert (backend.asked, machine.results) == (asked, [result])
        assert machine.told[0][2] == "nonce"

    virtual(test)


@pytest.mark.parametrize("action", [Read("l.3"), CREATE])
def test_an_action_is_cancelled_at_the_end_of_the_lease_so_that_the_loss_is_reported_in_time(action: Any) -> None:
    async def test() -> None:
        machine = Machine(action)
        machine.deadline = current().time() + 0.3
        began = current().time()
        await Post(machine, Backend(60.0)).until_idle()
        ((ended, sent),) = machine.sent
        assert sent == began
        assert ended == pytest.approx(began + 0.3)
        assert machine.results == [Unknown]

    virtual(test)


@pytest.mark.parametrize(("deadline", "ends"), [(-math.inf, PATIENCE), (60.0, PATIENCE), (-1.0, PATIENCE)])
def test_only_requests_about_durables_have_a_time_limit(deadline: float, ends: float) -> None:
    """A store has its own timeout. The deadline of a lease that is over bounds nothing."""

    async def test() -> None:
        for action, seconds in ((CREATE, ends), (Read("l.3"), 20.0), (WRITE, 20.0)):
            machine = Machine(action)
            machine.deadline = current().time() + deadline
            began = current().time()
            await Post(machine, Backend(20.0)).until_idle()
            assert current().time() - began == pytest.approx(seconds)

    virtual(test)


def test_an_entry_that_no_member_wrote_is_an_error_with_the_names() -> None:
    async def test() -> None:
        machine = Machine(Read("l.3"))
        machine.fails = ValueError("the key 'l.3' holds nonsense")
        machine.events = [LeaseLost("why")]
        post = Post(machine, Backend((b"", 1)))
        with pytest.raises(SourceError, match=r"^cohort c, member a: the key 'l.3' holds nonsense$") as raised:
            await post.until_idle()
        assert raised.value.__cause__ is machine.fails
        assert post.happened == [(3, LeaseLost("why"))], "a loss is reported even then"

    virtual(test)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda keeper: keeper.planned(mine=True), ("planned", True)),
        (lambda keeper: keeper.stop(), ("stop",)),
        (lambda keeper: keeper.checkpoint(DONE), ("checkpoint", DONE)),
        (lambda keeper: keeper.takeover(DONE), ("takeover", DONE)),
        (lambda keeper: keeper.seen([(1, 2)]), ("seen", [(1, 2)])),
        (lambda keeper: keeper.gone("why"), ("gone", "why")),
        (lambda keeper: keeper.ended(), ("ended",)),
    ],
)
def test_each_call_of_the_keeper_reaches_the_lease_machine_and_ends_its_wait(
    call: Callable[[Any], None], told: tuple[Any, ...]
) -> None:
    async def test() -> None:
        machine = Machine(Wait(math.inf))
        post = Post(machine)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post.keeper.serve, lambda: False)
            await anyio.sleep(1.0)
            assert len(machine.told) == 1
            machine.events = [LeaseReleased()]
            call(post.keeper)
            assert post.happened == [(3, LeaseReleased())], "events of the call are reported at once"
            await anyio.sleep(0.001)
            assert machine.told[1] == (*told, 1.0)
            assert machine.told[2][0] == "next"
            tasks.cancel_scope.cancel()

    virtual(test)


def test_a_hint_is_for_a_member_that_does_not_own_the_partition() -> None:
    async def test() -> None:
        machine = Machine(Wait(math.inf))
        post = Post(machine)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post.keeper.serve, lambda: False)
            await anyio.sleep(1.0)
            machine.deadline = 60.0
            post.keeper.hint()
            await anyio.sleep(1.0)
            assert [each for each in machine.told if each[0] == "hinted"] == []
            machine.deadline = -math.inf
            post.keeper.hint()
            await anyio.sleep(1.0)
            hinted = [each[1] for each in machine.told if each[0] == "hinted"]
            assert hinted == [pytest.approx(2.0), pytest.approx(2.01), pytest.approx(2.05)]
            tasks.cancel_scope.cancel()

    virtual(test)


# --- checkpoints


def test_a_checkpoint_is_made_once_at_the_pace_of_the_member() -> None:
    async def test() -> None:
        machine, asked = Machine(Wait(math.inf)), 0

        def ledger() -> Done:
            nonlocal asked
            asked += 1
            return DONE

        post = Post(machine)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post.keeper.serve, lambda: False)
            await anyio.sleep(1.0)
            for _ in range(3):
                post.keeper.checkpoint_soon(2, ledger)
            await anyio.sleep(0.049)
            assert asked == 0, "the ledger is read when it is due"
            await anyio.sleep(1.0)
            post.keeper.checkpoint_soon(2, lambda: None)
            await anyio.sleep(1.0)
            written = [each for each in machine.told if each[0] == "checkpoint"]
            assert (asked, written) == (1, [("checkpoint", DONE, pytest.approx(1.05))])
            tasks.cancel_scope.cancel()

    virtual(test)


def test_a_due_checkpoint_lets_deletions_go_first() -> None:
    """A server that is slower than the pace would otherwise get checkpoints alone."""

    async def test() -> None:
        machine, backend = Machine(DeleteConsumer(6, 0), DeleteConsumer(6, 1)), Backend(0.1, 0.1)
        post = Post(machine, backend)
        async with anyio.create_task_group() as tasks:
            post.keeper.checkpoint_soon(0, lambda: DONE)
            tasks.start_soon(post.keeper.serve, lambda: False)
            await anyio.sleep(1.0)
            tasks.cancel_scope.cancel()
        assert [name for name, *_ in backend.asked] == ["delete", "delete"]
        (written,) = [each for each in machine.told if each[0] == "checkpoint"]
        assert written[2] >= 0.2

    virtual(test)


@pytest.mark.parametrize(
    ("event", "written"),
    [
        (LeaseLost("why"), False),
        (LeaseReleased(), False),
        (LeaseOwned(8, 0, 8, DONE, False), False),
        (LeaseOwned(7, 1, 7, DONE, True), True),
        (LeaseRevoked(), True),
    ],
)
def test_the_ledger_of_a_former_ownership_is_not_written(event: Any, written: bool) -> None:
    async def test() -> None:
        machine = Machine(Wait(math.inf))
        post = Post(machine)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post.keeper.serve, lambda: False)
            post.events(LeaseOwned(7, 0, 7, DONE, False))
            post.keeper.checkpoint_soon(0, lambda: DONE)
            post.events(event)
            await anyio.sleep(1.0)
            assert any(each[0] == "checkpoint" for each in machine.told) == written
            tasks.cancel_scope.cancel()

    virtual(test)


@pytest.mark.parametrize("end", [LeaseLost("why"), DONE])
def test_a_partition_whose_checkpoint_no_longer_waits_leaves_the_pace_of_the_others(end: Any) -> None:
    async def test() -> None:
        post = Post(Machine())
        alone = post.pace.begin(4, 1_000)
        post.keeper.checkpoint_soon(1_000, lambda: DONE)
        if end is DONE:
            post.keeper.checkpoint(DONE)
        else:
            post.events(end)
        assert post.pace.begin(4, 1_000) == pytest.approx(alone)

    virtual(test)


def test_an_immediate_checkpoint_replaces_the_one_that_waits() -> None:
    async def test() -> None:
        machine = Machine(Wait(math.inf))
        post = Post(machine)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post.keeper.serve, lambda: False)
            post.keeper.checkpoint_soon(0, lambda: Done(9, ()))
            post.keeper.checkpoint(DONE)
            await anyio.sleep(1.0)
            assert [each[1] for each in machine.told if each[0] == "checkpoint"] == [DONE]
            tasks.cancel_scope.cancel()

    virtual(test)


# --- drains


def test_the_drain_of_a_revoked_partition_is_reported_once() -> None:
    async def test() -> None:
        post = Post(Machine())
        post.events(LeaseOwned(7, 0, 7, DONE, False), LeaseRevoked())
        post.keeper.drained(DONE, ended=False)
        post.keeper.drained(Done(9, ()))
        assert [each for each in post.machine.told if each[0] == "drained"] == [("drained", DONE, 0.0, False)]

    virtual(test)


def test_a_drain_that_ends_before_its_revocation_answers_the_revocation() -> None:
    async def test() -> None:
        post = Post(Machine())
        post.events(LeaseOwned(7, 0, 7, DONE, False))
        post.keeper.drained(DONE)
        assert all(each[0] != "drained" for each in post.machine.told)
        post.events(LeaseOwned(7, 1, 7, DONE, True))
        post.events(LeaseRevoked())
        assert post.machine.told[-1] == ("drained", DONE, 0.0, True)

    virtual(test)


@pytest.mark.parametrize("between", [LeaseLost("why"), LeaseOwned(8, 0, 8, DONE, False)])
def test_a_drain_of_a_former_ownership_does_not_answer_a_later_revocation(between: Any) -> None:
    async def test() -> None:
        post = Post(Machine())
        post.events(LeaseOwned(7, 0, 7, DONE, False))
        post.keeper.drained(DONE)
        post.events(between)
        post.events(LeaseRevoked())
        assert all(each[0] != "drained" for each in post.machine.told)

    virtual(test)


@pytest.mark.parametrize("drained", [True, False])
def test_a_partition_that_is_not_drained_in_time_is_reported_once(drained: bool) -> None:
    async def test() -> None:
        machine = Machine(Wait(math.inf))
        post = Post(machine)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post.keeper.serve, lambda: False)
            await anyio.sleep(1.0)
            post.events(LeaseRevoked())
            await anyio.sleep(6.9)
            if drained:
                post.keeper.drained(DONE)
            assert post.overdue == []
            await anyio.sleep(0.2)
            assert post.overdue == ([] if drained else [3])
            await anyio.sleep(60.0)
            assert len(post.overdue) == (not drained)
            tasks.cancel_scope.cancel()

    virtual(test)


def test_a_change_of_the_deadline_or_an_event_is_reported_once() -> None:
    async def test() -> None:
        post = Post(Machine())
        post.keeper.ended()
        assert post.changes == 0
        post.machine.deadline = 5.0
        post.keeper.ended()
        post.keeper.ended()
        assert post.changes == 1
        post.events(LeaseRevoked(), LeaseReleased())
        assert (post.changes, post.machine.events) == (2, [])
        assert repr(post.keeper) == "<LeaseKeeper of 3: testing>"

    virtual(test)


# --- warnings


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(("silent", "said"), [(SLOW - 1, 0), (SLOW, 1), (3 * SLOW, 1)])
def test_a_server_that_is_slow_for_five_requests_about_durables_is_logged_once(
    silent: int, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        requests = [DeleteConsumer(7, number) for number in range(silent)]
        await Post(Machine(*requests), Backend(*[20.0] * silent)).until_idle()

    virtual(test)
    assert len(warnings(caplog)) == said
    for line in warnings(caplog):
        assert line.startswith("cohort c, member a: partition 3 makes no progress, because 5 requests in a row")
        assert "no answer within 0.5 s" in line


def test_an_answer_between_slow_requests_restarts_the_count_of_slow_requests(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        answers: list[Any] = [*[20.0] * (SLOW - 1), None, *[20.0] * (SLOW - 1)]
        actions: list[Any] = [DeleteConsumer(7, number) for number in range(len(answers))]
        # Requests to the store say nothing about the durables.
        actions.insert(2, Read("l.3"))
        answers.insert(2, (None, 0))
        await Post(Machine(*actions), Backend(*answers)).until_idle()

    virtual(test)
    assert warnings(caplog) == []


def test_an_awaited_lease_and_a_foreign_durable_are_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        machine = Machine(*[DeleteConsumer(7, number) for number in range(7)], CREATE)
        post = Post(machine, Backend(*[None] * 7, ConsumerExists("consumer S/other", nonce=None)))
        states = iter([(30.0, False), (30.0, False), (0.0, False), (30.0, True), (30.0, True), (0.0, False)])
        apply = machine.apply

        def changing(*arguments: Any) -> None:
            apply(*arguments)
            machine.outlasting, machine.obstructed = next(states, (0.0, len(machine.results) == 8))

        machine.apply = changing  # type: ignore[method-assign,assignment]
        await post.until_idle()

    virtual(test)
    waits = "cohort c, member a: partition 3 waits for 30 s, because the cohort's bucket was lost"
    blocked = "cohort c, member a: partition 3 cannot have a durable yet, because a foreign durable is in the way ("
    begins = [waits, waits, f"{blocked})", f"{blocked}consumer S/other)"]
    assert [line.startswith(begin) for line, begin in zip(warnings(caplog), begins, strict=True)] == [True] * 4


# --- the alarm


def test_an_alarm_that_is_woken_before_the_wait_ends_the_wait_at_once() -> None:
    async def test() -> None:
        clock = current().time
        alarm = Alarm(clock)
        assert repr(alarm) == "<Alarm: waiting, 0 looks due>"
        alarm.arm()
        alarm.wake()
        assert repr(alarm) == "<Alarm: woken, 0 looks due>"
        assert not await alarm.wait(math.inf)
        alarm.arm()
        assert not await alarm.wait(clock() + 2.0)
        assert clock() == 2.0
        alarm.arm()
        assert not await alarm.wait(clock() - 1.0)
        assert clock() == 2.0

    virtual(test)


def test_a_hint_ends_the_wait_at_once_and_two_more_waits_after_10_and_50_ms() -> None:
    async def test() -> None:
        clock = current().time
        alarm = Alarm(clock)
        alarm.arm()
        alarm.hint()
        times = []
        for _ in range(3):
            assert await alarm.wait(math.inf)
            times.append(clock())
            alarm.arm()
        assert times == [0.0, pytest.approx(0.01), pytest.approx(0.05)]
        assert not await alarm.wait(clock() + 1.0)

    virtual(test)
