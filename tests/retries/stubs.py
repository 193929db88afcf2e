"""The retry loops of the adapters and of the cohort, each over a stub whose operation fails pass after pass.

This file is longer than most, because it has a stub for each retry loop, and all stubs share one base.

A ``StubbedLoop`` calls the loop itself; only its collaborators are stubs. An event strikes during one pass. The loop
must then begin no further pass, and end as ``events`` says. Time passes by the pauses of the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, Final

import anyio
import nats.errors
import pytest
from confluent_kafka import KafkaError, KafkaException

from lanes import ConfigError, SourceError
from lanes.cohort.leases import ConsumerExists, UnknownResult
from lanes.cohort.membership import Membership
from lanes.cohort.roster import _TRIES, Roster
from lanes.core.types import Room
from lanes.runtime.confirmation import Confirmation
from lanes_jetstream.cohort.lease_store import JetStreamLeaseStore
from lanes_jetstream.cohort.watch import CohortWatch
from lanes_jetstream.durable.consumer import DurableConsumer
from lanes_jetstream.durable.source import DurableSource
from lanes_jetstream.durable.takeover import Takeover
from lanes_jetstream.wire import codes
from lanes_jetstream.wire.answers import ApiError
from lanes_jetstream.wire.connection import CREATE_PAUSES, Connection, NoAnswer, NotPermitted
from lanes_jetstream.wire.stream import find_or_create
from lanes_kafka.cli.doctor import _Doctor
from lanes_kafka.client.thread import ClientThread
from lanes_kafka.client.topics import Topics
from lanes_spark.driver.batch import BatchRun
from memsource.sim.loop.choosers import Fifo
from memsource.sim.loop.virtual import run

PASSES: Final = (1, 2, 4)
_LONG: Final = 1_000.0


def stub(**parts: Any) -> Any:
    """An object with these attributes."""
    return SimpleNamespace(**parts)


Ending = type[BaseException] | None
"""The error with which a loop ends; None = it returns."""


class StubbedLoop:
    """One run of a loop. ``begun``: number of passes. ``later``: what the loop did after its end, if that is wrong."""

    place: ClassVar[str]
    events: ClassVar[dict[str, Ending]]
    most: ClassVar[int] = 6
    """The pass that succeeds in a run without an event."""

    further: ClassVar[dict[str, int]] = {}
    """Passes that begin after an event; an absent event has none."""

    def __init__(self, event: str | None, at: int) -> None:
        self.event, self.at = event, at
        self.begun = 0
        self.ahead = 0.0  # seconds by which the clock has jumped
        self.permanent = False
        self.later: list[str] = []

    def clock(self) -> float:
        return self.ahead

    def pause(self, seconds: float) -> None:
        self.ahead += seconds

    def begin(self) -> bool:
        """Begin a pass, and return whether its operation fails."""
        self.begun += 1
        if self.event is not None and self.begun == self.at:
            getattr(self, self.event)()
        return self.event is not None or self.begun < self.most

    # --- events that most loops know

    def time(self) -> None:
        """The time of the loop passes during the pass."""
        self.ahead += _LONG

    def refusal(self) -> None:
        """The operation fails for good."""
        self.permanent = True

    async def loop(self) -> None:
        """Call the loop."""
        raise NotImplementedError

    def patches(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the clock of the loop's module."""

    def _monotonic(self, patch: pytest.MonkeyPatch, module: str) -> None:
        patch.setattr(f"{module}.monotonic", lambda: anyio.current_time() + self.ahead)

    def _time(self, patch: pytest.MonkeyPatch, module: str) -> None:
        patch.setattr(f"{module}.time", stub(monotonic=self.clock, sleep=self.pause))


class Resolution(StubbedLoop):
    """No server answers for the consumer of a cohort partition."""

    place = "lanes_jetstream.cohort.watch:CohortWatch._resolve"
    events: ClassVar[dict[str, Ending]] = {"loss": None, "gone": None}

    def loss(self) -> None:
        self.numbers.clear()

    def gone(self) -> None:
        self.permanent = True

    async def api(self, _: str) -> None:
        if self.begin():
            raise ApiError(codes.CONSUMER_NOT_FOUND, "gone") if self.permanent else NoAnswer("no answer")

    async def loop(self) -> None:
        owned: Any = stub(number=3)
        self.numbers = {3: owned}
        told: list[str] = []
        partitions = stub(
            by_number=self.numbers, lose=lambda *_: told.append("lost"), take_over=lambda *_: told.append("taken over")
        )
        watch: Any = stub(partitions=partitions, connection=stub(api=self.api), stream="S", name="test")
        await CohortWatch._resolve(watch, owned, "c")
        expected = {"loss": [], "gone": ["lost"], None: ["taken over"]}[self.event]
        if told != expected:
            self.later.append(f"the partition was {told}, not {expected}")


class Start(StubbedLoop):
    """The consumer is not found at the start."""

    place = "lanes_jetstream.durable.source:DurableSource._find_consumer"
    events: ClassVar[dict[str, Ending]] = {"time": SourceError, "refusal": SourceError}

    def patches(self, patch: pytest.MonkeyPatch) -> None:
        self._monotonic(patch, "lanes_jetstream.durable.source")

    async def ensure(self, key: None) -> None:
        if self.begin():
            raise SourceError("no leader", retryable=not self.permanent)

    async def loop(self) -> None:
        durable = stub(ensure=self.ensure)
        source: Any = stub(durable=durable, shared=True, start_timeout=60.0, _name="test")
        await DurableSource._find_consumer(source)


class StreamStart(StubbedLoop):
    """A stream has no leader at the start."""

    place = "lanes_jetstream.wire.stream:find_or_create"
    events: ClassVar[dict[str, Ending]] = {"time": ApiError, "refusal": ApiError}

    def patches(self, patch: pytest.MonkeyPatch) -> None:
        self._monotonic(patch, "lanes_jetstream.wire.stream")

    async def find(self, *_: object) -> dict[str, Any]:
        if self.begin():
            raise ApiError(1, "no leader", 400 if self.permanent else 503)
        return {}

    async def loop(self) -> None:
        connection: Any = stub(find=self.find, servers="test")
        await find_or_create(connection, "S", {}, what="S", remedy="none", patience=60.0)


class Creation(StubbedLoop):
    """The server fails to create a stream or a consumer."""

    place = "lanes_jetstream.wire.connection:Connection.api"
    events: ClassVar[dict[str, Ending]] = {"disconnection": ApiError, "refusal": ApiError}
    most = len(CREATE_PAUSES) + 1

    def disconnection(self) -> None:
        self.client.is_connected = False

    async def answer(self, *_: object) -> dict[str, Any]:
        if self.begin():
            raise ApiError(1 if self.permanent else next(iter(codes.NOT_CREATED)), "not created")
        return {}

    async def loop(self) -> None:
        self.client = stub(is_connected=True)
        connection: Any = stub(_api=self.answer, client=self.client, servers="test")
        await Connection.api(connection, "STREAM.CREATE.S")


class Passes(StubbedLoop):
    """The takeover of a durable fails, at a request of each pass."""

    place = "lanes_jetstream.durable.takeover:Takeover.run"
    events: ClassVar[dict[str, Ending]] = {"closing": SourceError, "denial": SourceError, "refusal": SourceError}

    def closing(self) -> None:
        self.client.is_connected, self.client.is_closed = False, True

    def denial(self) -> None:
        pass

    async def renew(self) -> None:
        if self.begin():
            if self.event == "denial" and self.begun == self.at:
                raise NotPermitted("not permitted")
            if self.permanent:
                raise ApiError(1, "refused", 400)
            raise nats.errors.TimeoutError

    async def nothing(self, *_: object) -> Any:
        return None

    async def loop(self) -> None:
        self.client = stub(is_connected=True, is_closed=False, last_error=None)
        durable = stub(
            check_stream=self.nothing,
            refresh=self.nothing,
            restore=self.nothing,
            second_puller="",
            failure_text=str,
        )
        pulls = stub(interruption=None, renew=self.renew, check=lambda: None)
        parts: dict[str, Any] = {
            "connection": stub(client=self.client, flush=self.nothing),
            "durable": durable,
            "pulls": pulls,
            "resend": self.nothing,
            "check_dropped": lambda *_: None,
        }
        takeover = Takeover(name="test", shared=True, **parts)
        takeover._barrier = self.nothing  # type: ignore[method-assign, assignment]
        await takeover.run(Room(1, 1), 0)


class Reconnection(StubbedLoop):
    """The client of a durable is not connected."""

    place = "lanes_jetstream.durable.takeover:Takeover._until_connected"
    events: ClassVar[dict[str, Ending]] = {"closing": SourceError}

    def closing(self) -> None:
        self.is_closed = True

    @property
    def is_connected(self) -> bool:
        return not self.begin()

    async def loop(self) -> None:
        self.is_closed, self.last_error = False, None
        takeover: Any = stub(connection=stub(client=self), name="test")
        takeover.check_connection = lambda: Takeover.check_connection(takeover)
        await Takeover._until_connected(takeover)


class StoreReconnection(Reconnection):
    """The client of the lease store is not connected."""

    place = "lanes_jetstream.cohort.lease_store:JetStreamLeaseStore._ask"
    events: ClassVar[dict[str, Ending]] = {"closing": SourceError, "timeout": UnknownResult}

    def timeout(self) -> None:
        pass

    async def request(self, *_: object, **__: object) -> object:
        raise nats.errors.TimeoutError

    async def loop(self) -> None:
        self.is_closed, self.last_error = False, None
        contact = stub(answered=lambda: None)
        connection = stub(client=self, servers="test", contact=contact, unanswered=lambda *_: None)
        # The time ends during the pause after pass ``at``.
        timeout = (self.at - 0.5) * 0.05 if self.event == "timeout" else _LONG
        store: Any = stub(_connection=connection, _timeout=timeout, _bucket="b")
        try:
            await JetStreamLeaseStore._ask(store, "s", b"", "read")
        except UnknownResult:
            # The request itself has no answer, which ends no wait.
            if self.event is not None:
                raise


class Leave(StubbedLoop):
    """The bucket of a cohort does not answer while a member leaves. Only a success or a cancellation ends the loop."""

    place = "lanes.cohort.membership:Membership._until_heard"
    events: ClassVar[dict[str, Ending]] = {"refusal": SourceError}

    async def leave(self) -> None:
        if self.begin():
            raise SourceError("no bucket") if self.permanent else UnknownResult("no answer")

    async def loop(self) -> None:
        member: Any = stub(_name="test")
        await Membership._until_heard(member, self.leave)


class Attendance(StubbedLoop):
    """The bucket of a cohort does not answer while a member renews its heartbeat."""

    place = "lanes.cohort.membership:Membership._attend"
    events: ClassVar[dict[str, Ending]] = {"stop": None, "refusal": SourceError}

    def stop(self) -> None:
        self.member._stopping = True

    async def look(self) -> None:
        if self.begin():
            raise SourceError("no bucket") if self.permanent else UnknownResult("no answer")
        self.member._stopping = True

    async def left(self, _: object) -> None:
        self.leaves += 1

    async def loop(self) -> None:
        self.leaves = 0
        roster = stub(beat_at=_LONG, look=self.look, look_at=0.0, leave=None)
        alarm = stub(arm=lambda: None, wait=lambda _: anyio.sleep(0.1))
        self.member: Any = stub(
            _roster=roster,
            _alarm=alarm,
            _stopping=False,
            _clock=self.clock,
            _name="test",
            _planned=lambda: None,
            _joined=anyio.Event(),
            _until_heard=self.left,
        )
        await Membership._attend(self.member)
        if self.leaves != 1:
            self.later.append(f"the member left {self.leaves} times")


class DurableInTheWay(StubbedLoop):
    """Another durable is in the way of a new one."""

    place = "lanes.cohort.roster:Roster._create_consumer"
    events: ClassVar[dict[str, Ending]] = {"refusal": SourceError, "found": None}
    most = _TRIES

    def found(self) -> None:
        self.is_found = True

    async def create(self, *_: object, **__: object) -> None:
        if self.begin():
            raise SourceError("refused") if self.permanent else ConsumerExists("in the way", nonce="")

    async def listed(self, *_: object) -> tuple[bool, list[object]]:
        return self.is_found, []

    async def loop(self) -> None:
        self.is_found = False
        consumers = stub(create=self.create, found=self.listed)
        roster: Any = stub(_consumers=consumers, _start=None, cohort="c")
        await Roster._create_consumer(roster, 0)


class Joining(StubbedLoop):
    """Another process has the heartbeat of a member that joins."""

    place = "lanes.cohort.roster:Roster.join"
    events: ClassVar[dict[str, Ending]] = {"time": ConfigError, "renewal": ConfigError}

    def renewal(self) -> None:
        self.revision += 1

    async def read(self, _: str) -> Any:
        # The first read is no pass, because no pause precedes it.
        self.reads += 1
        value = b"other" if self.reads == 1 or self.begin() else b""
        return stub(value=value, revision=self.revision)

    async def beat(self) -> None:
        self.beats += 1

    async def loop(self) -> None:
        self.revision = 7
        self.reads = self.beats = 0
        roster: Any = stub(
            _store=stub(read=self.read),
            _key="k",
            _clock=self.clock,
            _ttl=30.0,
            _is_mine=lambda _: False,
            _decode=lambda *_: stub(lease=0),
            _used_twice=lambda: ConfigError("twice"),
            beat=self.beat,
        )
        await Roster.join(roster)
        if self.beats != 1:
            self.later.append(f"{self.beats} heartbeats")


class Asking(StubbedLoop):
    """The broker does not confirm one of two partitions after a freeze."""

    place = "lanes.runtime.confirmation:Confirmation._confirm"
    events: ClassVar[dict[str, Ending]] = {"loss": None, "freeze": None, "refusal": SourceError}
    further: ClassVar[dict[str, int]] = {"freeze": 1}

    def loss(self) -> None:
        del self.partitions[1]

    def freeze(self) -> None:
        self.ahead += _LONG
        self.watch.look(self.ahead)

    def freeze_limit(self) -> float:
        return 10.0

    async def confirm(self, partitions: list[object]) -> list[object]:
        self.asked.append(len(partitions))
        if self.event == "freeze" and self.begun >= self.at:
            # A second freeze puts every partition in doubt again.
            self.begun += 1
            return partitions
        if not self.begin():
            return partitions
        if self.permanent:
            raise SourceError("no broker")
        return [each for each in partitions if each == "confirmed"]

    async def loop(self) -> None:
        self.partitions = {0: "confirmed", 1: "not confirmed"}
        self.asked: list[int] = []
        context: Any = stub(
            clock=self.clock,
            engine=stub(partitions=self.partitions),
            name="test",
            start_soon=lambda *_: None,
            look_for_due=lambda: None,
        )
        workers: Any = stub(hold=lambda: None, wake=lambda: None)
        source: Any = self
        confirmation = Confirmation(context, source, lambda: workers)
        self.watch = confirmation.watch
        self.ahead += _LONG
        self.watch.look(self.ahead)
        await confirmation._confirm()
        if self.watch.held:
            self.later.append("handlers stay held")
        if self.event == "freeze" and self.asked[-1] != 2:
            self.later.append(f"asked for {self.asked[-1]} partitions after the second freeze, not 2")


class AckWait(StubbedLoop):
    """A server does not show a change of ack_wait."""

    place = "lanes_jetstream.durable.consumer:DurableConsumer._update"
    events: ClassVar[dict[str, Ending]] = {"time": NoAnswer, "refusal": ApiError}

    def patches(self, patch: pytest.MonkeyPatch) -> None:
        self._monotonic(patch, "lanes_jetstream.durable.consumer")

    async def refresh(self) -> None:
        if not self.begin():
            self.durable.config = {"ack_wait": 1}
        elif self.permanent:
            raise ApiError(1, "refused", 400)

    async def api(self, *_: object) -> None:
        pass

    async def loop(self) -> None:
        connection = stub(api=self.api)
        self.durable: Any = stub(
            _connection=connection, stream="S", _name="c", config={"ack_wait": 2}, refresh=self.refresh
        )
        await DurableConsumer._update(self.durable, {"ack_wait": 1})


class SecondProcess(StubbedLoop):
    """Another process consumes the durable of a source that starts."""

    place = "lanes_jetstream.durable.source:DurableSource._refuse_second_process"
    events: ClassVar[dict[str, Ending]] = {"time": ConfigError, "refusal": ApiError}

    def patches(self, patch: pytest.MonkeyPatch) -> None:
        self._monotonic(patch, "lanes_jetstream.durable.source")

    async def ask(self) -> bool:
        fails = self.begin()
        if self.permanent:
            raise ApiError(1, "refused", 400)
        return fails

    async def refresh(self) -> object:
        return stub(waiting_pulls=0)

    async def loop(self) -> None:
        durable = stub(refresh=self.refresh, second_puller="two")
        presence = stub(ask=self.ask)
        source: Any = stub(_presence=presence, durable=durable, _warned_of_puller=False, _name="test")
        await DurableSource._refuse_second_process(source)


class HoldBack(StubbedLoop):
    """Messages are unacknowledged at a takeover that waits for their ack_wait."""

    place = "lanes_jetstream.durable.takeover:Takeover._hold_back"
    events: ClassVar[dict[str, Ending]] = {"time": None, "interruption": NoAnswer, "refusal": ApiError}

    def patches(self, patch: pytest.MonkeyPatch) -> None:
        self._monotonic(patch, "lanes_jetstream.durable.takeover")

    def interruption(self) -> None:
        self.reason = "connection"

    async def refresh(self) -> object:
        fails = self.begin()
        if self.permanent:
            raise ApiError(1, "refused", 400)
        return stub(unacknowledged=fails)

    async def loop(self) -> None:
        self.reason = ""
        durable = stub(ack_waits=(30.0, 30.0), refresh=self.refresh)
        pulls = stub(check=lambda: self.reason or None, interruption="connection")
        takeover: Any = stub(durable=durable, pulls=pulls, name="test")
        await Takeover._hold_back(takeover)


class TopicStart(StubbedLoop):
    """No Kafka broker answers at the start."""

    place = "lanes_kafka.client.topics:Topics.check"
    events: ClassVar[dict[str, Ending]] = {"time": SourceError, "refusal": SourceError, "login": SourceError}

    def patches(self, patch: pytest.MonkeyPatch) -> None:
        self._time(patch, "lanes_kafka.client.topics")

    def login(self) -> None:
        self.reported.append(KafkaError(KafkaError._AUTHENTICATION, "no"))

    def wait(self, *_: object) -> bool:
        fails = self.begin()
        code = KafkaError.TOPIC_AUTHORIZATION_FAILED if self.permanent else KafkaError._TRANSPORT
        self.topics._failed = {"t": KafkaError(code, "no answer")} if fails else {}
        return not fails

    async def loop(self) -> None:
        self.reported: list[KafkaError] = []
        self.topics: Any = stub(names=["t"], wait=self.wait, _failed={}, appears=lambda *_: True)
        Topics.check(self.topics, 60.0, {}, "test", self.reported)


class Leaders(StubbedLoop):
    """The leader of a partition moves while `lanes doctor` looks."""

    place = "lanes_kafka.cli.doctor:_Doctor._ends"
    events: ClassVar[dict[str, Ending]] = {"time": KafkaException, "refusal": KafkaException}

    def patches(self, patch: pytest.MonkeyPatch) -> None:
        self._time(patch, "lanes_kafka.cli.doctor")
        patch.setattr("lanes_kafka.cli.doctor.answer", self.answer)

    def answer(self, *_: object) -> object:
        if self.begin():
            code = KafkaError.TOPIC_AUTHORIZATION_FAILED if self.permanent else KafkaError.NOT_LEADER_FOR_PARTITION
            raise KafkaException(KafkaError(code))
        return stub(offset=1)

    async def loop(self) -> None:
        admin = stub(list_offsets=lambda wanted, **_: dict.fromkeys(wanted, None))
        doctor: Any = stub(admin=admin, timeout=60.0, _deadline=lambda: self.ahead + 60.0)
        level: Any = None
        _Doctor._ends(doctor, "t", [0], level)


class Rebuild(StubbedLoop):
    """A client of Kafka waits before it is rebuilt; a pass is one wait for commands."""

    place = "lanes_kafka.client.thread:ClientThread._rebuild"
    events: ClassVar[dict[str, Ending]] = {"closing": None, "time": None}

    def closing(self) -> None:
        self.group.closing = True

    def wait(self, seconds: float, **_: object) -> None:
        self.begin()
        self.ahead += seconds

    async def loop(self) -> None:
        joined: list[bool] = []
        self.group = stub(closing=False)
        nothing: Callable[[], None] = lambda: None  # noqa: E731 - a stub
        thread: Any = stub(
            _close=nothing,
            _make_group=nothing,
            _join=lambda: joined.append(True),
            _group=self.group,
            _commits=stub(limit=None),
            _mailbox=stub(wait=self.wait),
            clock=self.clock,
        )
        ClientThread._rebuild(thread, 5.0)
        if bool(joined) == (self.event == "closing"):
            self.later.append(f"the client was{'' if joined else ' not'} rebuilt")


class TopicIdentity(StubbedLoop):
    """The brokers do not answer after a batch of Spark."""

    place = "lanes_spark.driver.batch:BatchRun._check_incarnation"
    events: ClassVar[dict[str, Ending]] = {"giving_up": SourceError, "time": SourceError, "refusal": SourceError}

    def patches(self, patch: pytest.MonkeyPatch) -> None:
        self._time(patch, "lanes_spark.driver.batch")

    def giving_up(self) -> None:
        self.given_up = True

    def spans(self, _: object) -> object:
        if self.begin():
            raise SourceError("no answer", retryable=not self.permanent)
        return stub(incarnation="i")

    async def loop(self) -> None:
        self.given_up = False
        scope = stub(source=stub(spans=self.spans, topic="t"), spans=stub(incarnation="i"))
        event = stub(wait=self.wait)
        batch: Any = stub(scope=scope, given_up=event)
        session: Any = None
        BatchRun._check_incarnation(batch, session)

    def wait(self, seconds: float) -> bool:
        self.ahead += seconds
        return self.given_up


STUBBED: Final[tuple[type[StubbedLoop], ...]] = (
    Resolution,
    Start,
    StreamStart,
    Creation,
    Passes,
    Reconnection,
    StoreReconnection,
    AckWait,
    SecondProcess,
    HoldBack,
    Asking,
    Joining,
    Leave,
    Attendance,
    DurableInTheWay,
    TopicStart,
    Leaders,
    Rebuild,
    TopicIdentity,
)


def stubbed_faults_of(kind: type[StubbedLoop]) -> list[str]:
    """Run a loop with each event at each pass, and without an event; return its faults. Blocks."""
    faults = []
    for event, at in [(None, 0), *((event, min(at, kind.most)) for event in kind.events for at in PASSES)]:
        loop = kind(event, at)
        ending = _ending(loop)
        name = f"{kind.__name__}, {event or 'no event'} at pass {at}"
        if event is None:
            expected: Ending = None
            if loop.begun != kind.most and not isinstance(loop, Rebuild):
                faults.append(f"{name}: {loop.begun} passes, not {kind.most}")
        else:
            expected = kind.events[event]
            passes = at + kind.further.get(event, 0)
            if loop.begun != passes:
                faults.append(f"{name}: {loop.begun} passes, not {passes}")
        if ending is not None if expected is None else not isinstance(ending, expected):
            faults.append(f"{name}: ended with {ending!r}, not {expected}")
        faults += [f"{name}: {what}" for what in loop.later]
    return faults


def _ending(loop: StubbedLoop) -> BaseException | None:
    with pytest.MonkeyPatch.context() as patch:
        loop.patches(patch)
        try:
            run(loop.loop, chooser=Fifo())
        except (SourceError, ConfigError, ApiError, UnknownResult, KafkaException, NoAnswer) as error:
            return error
    return None
