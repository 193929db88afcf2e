"""The broker of a run: a simulated nats-server, its network, and the members with the real sources.

This file is longer than most, because faults, requests and judgements share the settings that a run draws.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import Any, Final, Literal

from lanes.clock import Clock, monotonic
from lanes.cohort.leases import Conflict
from lanes.core.cohort.records import LEASE_PREFIX, DrainRequest, drain_key, encode
from lanes.core.types import Message, Partition, PartitionId, PartitionKey, Settlement, key_bytes
from lanes.dead_letter import DeadLetter
from lanes.errors import ConfigError, LanesError
from lanes_jetstream import Cohort
from lanes_jetstream.wire.pull_requests import PullRequests
from memsource.adapters.choices import KINDS, OF_REQUESTS, Kind, Phase
from memsource.adapters.pairs import Impossible
from memsource.adapters.world import AdapterWorld
from memsource.memory.broker import KeepsDeadLetters
from memsource.memory.topic import Record, Topic
from memsource.personality import PersonalityName
from memsource.sim.loop.event_loop import GROUP, current
from memsource.sim.world.worker import Worker
from tests.simulated.jetstream.events import Events, Extras, Use
from tests.simulated.jetstream.member import STREAM, SimulatedMember, SimulatedWriter
from tests.simulated.jetstream.network import Network
from tests.simulated.jetstream.ownership import BUCKET, KEPT, Ownership
from tests.simulated.jetstream.reports import unreal_gap
from tests.simulated.jetstream.server.protocol import Publish
from tests.simulated.jetstream.server.server import DELIVER, Fate, NatsServer, Session
from tests.simulated.jetstream.server.stream import StreamConsumer

LETTERS: Final = "letters"
"""Stream of the dead letters, and its subject."""

_LATENCIES: Final = (0.0, 0.001, 0.001, 0.02, 0.04)
_CALM: Final = (0.0, 0.0, 0.5, 1.0, 3.0)
"""Seconds at the begin of a run without faults."""

_CALLS: Final = ("pull", "delivery", "ack", "extend", "put", "put lease", "create", "consumer", "get")
"""Names of the requests. Each run draws those that can fail, because most requests of a cohort are reads."""

_REACTIONS: Final[Mapping[Kind, Sequence[str]]] = {
    "freeze": ("put lease", "create", "pull", "ack"),
    "cut_off": ("put lease", "put", "ack", "pull", "delivery"),
    "restart": ("consumer", "create", "pull", "ack", "delivery"),
    "callback": ("create", "consumer", "pull", "delivery", "get"),
}
"""Requests that a member makes after a fault."""

_FAILING: Final = (1, 1, 2, 4)
"""Numbers of requests that can fail in a run. If few can, the few faults of a run meet rare requests too."""

_EVENTS: Final = {
    "disconnect": 1,
    "redeliver": 1,
    "stream leader": 3,
    "bucket leader": 1,
    "drain": 2,
    "durable": 1,
    "bucket": 1,
    "requests": 1,
    "delivery": 6,
}
"""Events at the server that change the work of a member of a cohort, with their weights."""

_OF_A_DURABLE: Final = {"disconnect": 4, "redeliver": 1, "stream leader": 2, "requests": 2}
"""The same for the processes of a durable; the other events change nothing for them."""

_LOSES: Final = 0.3
_LOSSES: Final = 4
_LOST_WITHIN: Final = 70.0
"""Share of the runs with a durable that lose deliveries without a fault, the number of these deliveries, and the first
seconds of a run in which they are lost."""

_INTERRUPTIONS: Final[tuple[Kind, ...]] = ("callback", "callback", "restart", "cut_off")
"""Faults that are aimed at a process of a durable soon after its last takeover."""

_LEADERLESS: Final = (0.2, 1.0, 3.0, 8.0)

_CONTENDED: Final[frozenset[Kind]] = frozenset({"delay", "duplicate", "crash"})
"""Faults of a run in which processes start although another one runs. A process that is frozen or cut off does not say
that it runs."""

_ENDLESS: Final = 3600.0
"""An ack_wait that no run outlasts. The server redelivers nothing in time, so a lost message must be noticed."""

_NAME: Final = "work"
"""Name of the durable."""

_PULL: Final = "$JS.API.CONSUMER.MSG.NEXT."
_CONSUMER: Final = "$JS.API.CONSUMER."
_ACK: Final = "$JS.ACK."
_KEY: Final = f"$KV.{BUCKET}."


class JetStreamBroker(KeepsDeadLetters):
    """A stream with real members, all of a cohort or on one durable.

    Args:
        rng: Source of all other settings.
        use: Use of the stream.
        requeues: Whether a process must be able to requeue more messages than it has room for.
        wide: Whether the members write their dead letters by the real writer, and faults also strike members that wait
            and members that take partitions over.
        extras: Further events.

    Attributes:
        server: The simulated server.
        stream: The stream with the messages.
        network: The network.
        topic: The messages that the stream stores.
        members: All sources that the run has made.
        deleted: The removed messages, by the name of the partition and the position.
        losses: Times after which the network loses the first delivery of a durable, unless its connection has lost a
            delivery.
        refused: Number of processes that ended because another process ran on their durable.
    """

    name: PersonalityName = "jetstream"
    takes_in_at_once = True
    impossible: Impossible = {}  # noqa: RUF012
    phases: tuple[Phase, ...] = ("open", "steady", "drain", "lease", "commit", "takeover", "close")

    def __init__(self, rng: Random, use: Use, *, requeues: bool, wide: bool, extras: Extras) -> None:
        super().__init__()
        self._rng = rng
        self._world: AdapterWorld | None = None
        self._calm_until = rng.choice(_CALM)
        calls = [*_CALLS, *("letter" for _ in range(3))] if wide else [*_CALLS]
        if use == "contended":
            # Without an answer to its question, a process may take a running process for one that has ended.
            calls.remove("get")
        self._faulty = frozenset(rng.sample(calls, rng.choice(_FAILING)))
        self.calls: tuple[str, ...] = _CALLS
        self.reactions: dict[Kind, Sequence[str]] = {}
        self.waits = self._writes = wide
        if wide:
            # A fault that is aimed at a request that cannot fail never happens.
            self.calls = tuple(call for call in calls if call in self._faulty)
            for kind, asked in _REACTIONS.items():
                if found := [call for call in asked if call in self._faulty]:
                    self.reactions[kind] = found
        self._use: Use = use
        self._durable = use != "cohort"
        self.interruptions = _INTERRUPTIONS if use == "durable" else ()
        self._happens = _OF_A_DURABLE if self._durable else _EVENTS
        partitions = 1 if self._durable else rng.choice([1, 2, 3, 4])
        retention = rng.choice(["limits", "limits", "workqueue"])
        overdue: Literal["keep", "force"] = "force" if rng.random() < 0.3 else "keep"
        self._cohort: dict[str, Any] = {
            "lease": rng.choice([3.0, 3.0, 5.0, 10.0]),
            "drain_within": rng.choice([1.0, 5.0]),
            "overdue": overdue,
            "consumer_target": rng.choice([None, None, None, 1]),
        }
        self._takeover = rng.choice(["auto", "auto", "auto" if requeues else "hold-back"])
        self._acks = rng.choice(["confirmed", "confirmed-at-drain", "fire-and-forget"])
        self._ack_wait = rng.choice([6.0, 30.0, _ENDLESS, _ENDLESS])
        silent = "ack" in self._faulty and not (self._durable and self._acks == "confirmed")
        waits = self._durable and (self._takeover == "hold-back" or "create" in self._faulty)
        if silent or waits:
            # Only the end of ack_wait shows a lost acknowledgement, or brings the messages of an earlier process back.
            # A takeover also waits for it after three lost changes of the consumer, and perhaps several times.
            self._ack_wait = min(rng.choice([6.0, 6.0, 30.0, 300.0]), 30.0 if waits else 300.0)
        lease = self._cohort["lease"]
        self.deadlines: tuple[float, ...] = (lease, lease * 2 / 3, self._cohort["drain_within"], 1.5, 5.0, 6.0)
        if use == "shared":
            # Only the end of ack_wait brings a lost delivery back, and no fault may outlast it.
            self._ack_wait, self.deadlines = 30.0, (0.4, 5.0, 6.0)
        elif self._durable:
            self.deadlines = (0.4, 5.0, 6.0, min(self._ack_wait, 30.0))
        self.topic = Topic(partitions, STREAM)
        # The first version cannot reset a consumer.
        version = rng.choice(["2.12.1", "2.14.0"])
        seed = rng.randrange(1 << 30)
        self.server = NatsServer(self._fate, loses=self._loses, on_denied=self._on_denied, version=version, seed=seed)
        latencies = tuple(rng.choice(_LATENCIES) for _ in range(4))
        # A refusal takes a round trip of the first process, and a start some round trips of the second one.
        self.network = Network(self.server, rng, latencies[:1] if use == "contended" else latencies)
        dest = f"{STREAM}.{{{{partition({partitions},1)}}}}.{{{{wildcard(1)}}}}"
        config: dict[str, object] = {"name": STREAM, "subjects": [f"{STREAM}.*"], "retention": retention}
        if not self._durable:
            config["subject_transform"] = {"src": f"{STREAM}.*", "dest": dest}
        self.server.api.answer(f"STREAM.CREATE.{STREAM}", json.dumps(config).encode(), 0.0)
        self.stream = self.server.api.streams[STREAM]
        self.events = Events(self, rng, extras)
        if self._writes:
            stored = json.dumps({"name": LETTERS, "subjects": [LETTERS]}).encode()
            self.server.api.answer(f"STREAM.CREATE.{LETTERS}", stored, 0.0)
        self.members: list[SimulatedMember] = []
        self.ownership = Ownership(self)
        self._drained: str | None = None
        self._running: str | None = None
        self.refused = 0
        self._lost_on = -1  # connection that has lost a delivery
        self.deleted: set[tuple[str, int]] = set()
        self._inbox = ""
        self._free = asyncio.Event()
        self._turns: list[str] = []
        loses = use == "durable" and rng.random() < _LOSES
        self.losses = sorted(rng.random() * _LOST_WITHIN for _ in range(_LOSSES if loses else 0))

    def __repr__(self) -> str:
        return f"<JetStreamBroker {self.server!r}>"

    def bind(self, world: AdapterWorld) -> None:
        self._world = world
        loop, context = asyncio.get_running_loop(), self.network.context
        self.events.begin(lambda at, act: loop.call_at(at, self._acted, act, context=context))

    def _acted(self, act: Callable[[], object]) -> None:
        try:
            act()
            self.network.schedule()
        except Exception as error:
            # Otherwise the loop would only log the error.
            current().fail(error)

    @property
    def kinds(self) -> frozenset[Kind]:
        """All faults. Some runs begin without faults, so that the few faults of the run strike a group at work."""
        calm = self._world is not None and self._world.now < self._calm_until
        kinds = _CONTENDED if self._use == "contended" else frozenset(KINDS)
        return frozenset() if calm else kinds

    # --- producers

    def publish(
        self,
        value: bytes,
        *,
        key: PartitionKey | None,
        headers: Iterable[tuple[str, bytes]] = (),
        partition: int | None = None,
    ) -> Record:
        """Append one message, as another client would publish it."""
        token = "none" if key is None else key_bytes(key).hex()
        self._number_next()
        record = self.topic.publish(value, key=key, headers=headers, partition=partition)
        stored = Record(
            record.partition, record.position, record.key, value, (), f"{STREAM}.{record.partition}.{token}"
        )
        self.topic.log(record.partition).records[record.position] = stored
        self.server.append(STREAM, stored, self.now)
        self.network.schedule()
        return stored

    def skip(self, count: int, *, partition: int = 0) -> None:
        """Leave a gap of ``count`` sequences, except at the beginning of the stream, where a gap would count as a
        purge.
        """
        if self.stream.log.positions and self.stream.config["retention"] == "limits":
            self.stream.log.end += count

    def _number_next(self) -> None:
        """Give the next sequence of the stream to the next message of any partition."""
        for log in self.topic.logs:
            log.end = self.stream.log.end

    @property
    def partitions(self) -> range:
        return self.topic.partitions

    @property
    def records(self) -> list[Record]:
        return [log.records[position] for log in self.topic.logs for position in log.positions]

    @property
    def unfinished(self) -> list[Record]:
        """The unacknowledged messages of each partition's newest durable; without a durable, the stored messages."""
        left: list[Record] = []
        for number in self.partitions:
            records = self.topic.log(number).records
            newest = self._newest(number)
            positions = self.stream.stored if newest is None else newest.unfinished
            left += [records[each] for each in positions if each in records]
        return left

    def _newest(self, partition: int) -> StreamConsumer | None:
        subject = f"{STREAM}.{partition}.any"
        found = [each for each in self.stream.consumers.values() if each.takes(subject)]
        return found[-1] if found else None

    # --- members

    def source(self, member: str, clock: Clock = monotonic) -> SimulatedMember:
        arguments: dict[str, Any] = {"ack_wait": self._ack_wait}
        if self._durable:
            arguments |= {"durable": _NAME, "takeover": self._takeover, "acks": self._acks}
            arguments["shared"] = self._use == "shared"
        else:
            arguments["cohort"] = Cohort("orders", member=member, **self._cohort)
        if self.events.extras.removes:
            arguments["out_of_range"] = "earliest"
        made = SimulatedMember(self, member, **arguments)
        self.members.append(made)
        return made

    def dead_letter_writer(self, member: str) -> SimulatedWriter | None:
        return SimulatedWriter(self, member, LETTERS) if self._writes else None

    def confirmed(self, member: str, letter: DeadLetter) -> None:
        """Judge the confirmation of a dead letter: the stream has the letter."""
        log = self.server.api.streams[LETTERS].log
        named = ("Nats-Msg-Id", letter.id.encode())
        values = [each.value for each in log.records.values() if named in each.headers]
        if letter.value not in values:
            what = f"{member} confirms the dead letter {letter.id}, which the stream does not have"
            self.find("LetterIsStored", what)

    def assigned(self, member: SimulatedMember, partition: Partition) -> None:
        self.ownership.assigned(member, partition)

    def on_started(self, member: str, message: Message) -> None:
        """Judge the start of a handler; see ``Ownership``."""
        self.ownership.on_started(member, message)

    def relied(self, member: SimulatedMember) -> None:
        self.ownership.relied(member)

    def lost(self, member: SimulatedMember, partition: Partition, reason: str) -> None:
        self.ownership.lost(member, partition, reason)

    @property
    def taken(self) -> list[tuple[str, Partition]]:
        return self.ownership.taken

    def worker(self, member: str) -> Worker | None:
        """The process of a member."""
        assert self._world is not None, "bind comes first"
        return next((each for each in self._world.members if each.name == member), None)

    def find(self, check: str, what: str) -> None:
        assert self._world is not None, "bind comes first"
        self._world.find(check, what)

    def on_settled(self, settlements: Sequence[Settlement]) -> None:
        """Judge that the server has read each acknowledgement that it has confirmed to a waiting source."""
        if not self._durable or self._acks != "confirmed":
            # A settlement does not promise that the server has received it.
            return
        for message in (each for settlement in settlements for each in settlement.messages):
            # A redelivery during the settlement has replaced the token, but not the position.
            if (_NAME, message.position) not in self.server.acknowledged:
                what = f"{GROUP.get()} has a confirmation for {message.partition.id} position {message.position}"
                self.find("ConfirmedIsRead", f"{what}, whose acknowledgement no consumer has read")

    def judge_gap(self, pulls: PullRequests, text: str) -> None:
        """Judge the report of a missing delivery."""
        if what := unreal_gap(pulls, text, self.stream):
            self.find("GapIsReal", f"{GROUP.get()} {what}")

    @property
    def unjudged(self) -> tuple[str, ...]:
        """Checks that do not apply: a shared durable has no owner, and a durable refuses a second process after the
        start.
        """
        if self._use == "contended":
            # Messages of a process that is refused return after those that the other one has taken meanwhile.
            return "ExclusiveOwner", "PerKeyOrder", "OrderAcrossAssignments"
        return ("ExclusiveOwner",) if self._use == "shared" else ()

    def excuses(self, member: str, error: LanesError) -> bool:
        """Whether a process may end by this error: the server denied a request, or the process is the second on a
        durable.
        """
        refused = self._use == "contended" and "is pulled by another client" in str(error)
        self.refused += refused
        return refused or self.events.excuses(member, str(error), self.now)

    def judge_refused_start(self, member: SimulatedMember, error: ConfigError) -> None:
        """Judge a refused start: a durable never refuses its only process."""
        self.refused += 1
        if self._use != "contended":
            self.find("StartsAlone", f"{member.member} is refused, and no other process runs: {error}")

    def _on_denied(self, session: Session, subject: str, now: float) -> None:
        self.events.denied(session, subject, now)

    def works_on(self, session: Session, since: float) -> bool:
        """Whether the source of a connection works, and no fault has hindered its process since a time."""
        worker = self.worker(session.member)
        if worker is None or worker.gone or worker.ended.is_set() or not session.open:
            return False
        return worker.frozen_until <= since and self.network.cut_until(session.member) <= since

    def removed(self, sequence: int) -> None:
        """Record the removal of a message."""
        number = next(each for each in self.partitions if sequence in self.topic.log(each).records)
        log = self.topic.log(number)
        log.positions.remove(sequence)
        del log.records[sequence]
        self.deleted.add((str(PartitionId(STREAM, number)), sequence))

    def disconnect_all(self) -> None:
        """End the connections of all members."""
        for each in self.members:
            self.network.disconnect(each.member)

    async def turn(self, member: str) -> None:
        """Wait for the turn of a member, because a supervisor runs one process at a time on a durable.

        A member that was ordered to stop comes first. A process that starts after this order would otherwise keep the
        turn of the stopped member for ever.
        """
        self._turns.append(member)
        try:
            while self._use == "durable" and (self._running not in (None, member) or self._yields(member)):
                self._free.clear()
                await self._free.wait()
        finally:
            self._turns.remove(member)
            self._free.set()
        self._running = member

    def _yields(self, member: str) -> bool:
        """Return whether another member that was ordered to stop waits for its turn."""
        others = [worker for name in self._turns if name != member and (worker := self.worker(name)) is not None]
        return not self.is_stopped(member) and any(each.stopped and not each.gone for each in others)

    def dismiss(self, member: str) -> None:
        """Let the next member start on a durable, because the process of a member has ended."""
        if self._running == member:
            self._running = None
            self._free.set()

    def is_stopped(self, member: str) -> bool:
        """Return whether the process of a member has received the request to stop."""
        worker = self.worker(member)
        return worker is not None and worker.stopped

    def phase(self, member: str) -> Phase:
        return next((each.phase for each in reversed(self.members) if each.member == member), "open")

    # --- requests

    def _fate(self, session: Session, command: Publish) -> Fate:
        assert self._world is not None, "bind comes first"
        call, phase = self._call(command)
        if call not in self._faulty:
            return DELIVER
        state = self.phase(session.member)
        choice = self._world.exchange(session.member, call, phase if state == "steady" else state)
        if choice.kind == "drop_reply" and call == "pull" and self._durable:
            return DELIVER
        if choice.kind == "deliver" or (choice.kind == "duplicate" and call == "pull"):
            # The server receives no request twice, and a second pull request would exceed the room.
            return DELIVER
        if choice.kind == "delay" and choice.target % 2 and command.reply and call != "pull":
            return Fate("delay_reply", choice.amount)
        assert choice.kind in ("delay", "drop_request", "drop_reply", "duplicate"), "the world performs other faults"
        return Fate(choice.kind, choice.amount)

    def _loses(self, member: str, reply: str) -> bool:
        """Return whether a delivery to a member is lost. A delivery has no reply, and no delivery overtakes another.

        A durable cannot detect the loss of the first delivery to an inbox. A second loss on one connection looks to the
        durable like another process.
        """
        assert self._world is not None, "bind comes first"
        inbox = reply.rpartition(".")[0]
        first, self._inbox = inbox != self._inbox, inbox
        connection = max((each.number for each in self.server.sessions if each.member == member), default=0)
        if self._durable and (first or connection == self._lost_on):
            return False
        due = bool(self.losses) and self.losses[0] <= self.now
        if due:
            self.losses.pop(0)
        # A connection neither delays nor repeats a single delivery.
        asked = "delivery" in self._faulty
        lost = due or (asked and self._world.exchange(member, "delivery", self.phase(member)).kind in OF_REQUESTS)
        if lost:
            self._lost_on = connection
        return lost

    def _call(self, command: Publish) -> tuple[str, Phase]:
        """Return the name of a request, and the activity to which it belongs."""
        subject = command.subject
        if subject.startswith(_PULL):
            return "pull", "steady"
        if subject.startswith(_ACK):
            return ("extend", "steady") if command.payload == b"+WPI" else ("ack", "commit")
        if subject == LETTERS:
            return "letter", "commit"
        if subject.startswith(_KEY):
            return ("put lease" if subject.startswith(f"{_KEY}{LEASE_PREFIX}") else "put"), "lease"
        if subject.startswith(_CONSUMER):
            return ("create" if subject.split(".")[3] == "CREATE" else "consumer"), "takeover"
        return "get", "lease"

    # --- faults

    def crash(self, member: str, now: float) -> None:
        self.network.kill(member)
        self.dismiss(member)

    def freeze(self, member: str, until: float) -> None:
        """Do nothing, because the world stops the tasks of the member until ``until``."""

    def rebalance(self, now: float) -> bool:
        """Request a drain of a member, or withdraw the last request. Returns False without a bucket or a member."""
        bucket = self.server.api.buckets.get(KEPT)
        members = [each.member for each in self.members if each.state == "steady"]
        if bucket is None or not members:
            return False
        value = b""
        if self._drained is None:
            self._drained = self._rng.choice(members)
            value = encode(DrainRequest(since=self.server.api.nanoseconds(now) // 1_000_000))
        key = drain_key(self._drained)
        if not value:
            self._drained = None
        with suppress(Conflict):
            bucket.data.write(key, value, now, revision=bucket.data.read(key, now).revision)
        return True

    def lose(self, partition: int, now: float) -> bool:
        """Delete the bucket with all its leases, as an operator does."""
        self.ownership.deleted.update(self.partitions)
        return self.server.api.buckets.pop(KEPT, None) is not None

    def _delete_durable(self, partition: int) -> bool:
        """Delete the durable of a cohort partition, as an operator does."""
        newest = self._newest(partition)
        if newest is None or self._durable:
            return False
        self.ownership.deleted.add(partition)
        return self.server.delete_consumer(STREAM, newest.name)

    def redeliver(self, partition: int, now: float) -> bool:
        """Lose the last acknowledgement of a partition, or redeliver its lowest unacknowledged message."""
        newest = self._newest(partition)
        if newest is None:
            return False
        data = newest.data
        candidates = [data.last_acked, next(iter(data.unacknowledged), None)]
        if self._rng.random() < 0.5:
            candidates.reverse()
        if self.stream.config["retention"] == "workqueue":
            # A work queue has deleted an acknowledged message.
            candidates = candidates[1:] if candidates[0] == data.last_acked else candidates[:1]
        if self._use == "shared":
            # Without a process that stops, the server redelivers no unacknowledged message before the end of ack_wait.
            candidates = [each for each in candidates if each == data.last_acked]
        lost = any(each is not None and data.lose_ack(each, now) for each in candidates)
        self.server.pump(now)
        return lost

    def restart(self, now: float) -> bool:
        return self.down(now + 0.5)

    def cut_off(self, member: str, until: float) -> bool:
        return self.network.cut(member, until)

    def down(self, until: float) -> bool:
        """Kill the server, or leave the stream or the bucket without a leader."""
        if not self.server.up:
            return False
        case = self._rng.random()
        if case < 0.6:
            self.server.stop()
            self.server.later(until, self.server.start)
        elif not self._lose_leader(STREAM if case < 0.8 else KEPT, until):
            return False
        self.network.schedule()
        return True

    def _lose_leader(self, name: str, until: float) -> bool:
        return self.server.lose_leader(name, until, self.now, silent=self._rng.random() < 0.5)

    def callback(self, target: int) -> bool:
        """Change the work of a member from outside."""
        living = [each.member for each in self.members if each.state == "steady"]
        partition = target % len(self.partitions)
        if self.events.callback():
            self.network.schedule()
            return True
        event = self._rng.choices([*self._happens], [*self._happens.values()])[0]
        done = False
        if event == "disconnect" and living:
            done = self.network.disconnect(living[target % len(living)])
        elif event == "redeliver":
            done = self.redeliver(partition, self.now)
        elif event == "stream leader":
            done = self._lose_leader(STREAM, self.now + self._rng.choice(_LEADERLESS))
        elif event == "bucket leader":
            name = LETTERS if self._writes and target % 2 else KEPT
            done = self._lose_leader(name, self.now + self._rng.choice(_LEADERLESS))
        elif event == "drain":
            done = self.rebalance(self.now)
        elif event == "durable":
            done = self._delete_durable(partition)
        elif event == "bucket":
            done = self.lose(partition, self.now)
        elif event == "requests":
            done = self._end_requests(partition)
        elif event == "delivery":
            done = self._lose_delivery(partition)
        self.network.schedule()
        return done

    def _end_requests(self, partition: int) -> bool:
        """End the pull requests of a durable, as a server does before it stops."""
        newest = self._newest(partition)
        return newest is not None and self.server.end_requests(newest, "Server Shutdown")

    def _lose_delivery(self, partition: int) -> bool:
        """Lose the next delivery of a partition.

        Returns False without a durable, or if the network will lose a delivery already.
        """
        newest = self._newest(partition)
        if newest is None or newest.losing or self._durable:
            return False
        newest.losing = 1
        return True

    def end(self) -> None:
        self.network.end()

    # --- time

    @property
    def now(self) -> float:
        """The time, in seconds."""
        return asyncio.get_running_loop().time()

    def next_at(self) -> float:
        """Return infinity, because the server's timers are timers of the loop."""
        return math.inf

    def advance(self, now: float) -> None:
        """Do nothing; see ``next_at``."""
