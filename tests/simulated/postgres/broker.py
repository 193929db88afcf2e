"""The broker of a run: a server as data, its network, and the members with the real sources."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from random import Random
from typing import Any, Final

from lanes.clock import Clock, monotonic
from lanes.core.ring import partition as partition_of
from lanes.core.types import Message, Partition, PartitionKey, Settlement, key_bytes
from lanes.dead_letter import DeadLetter
from lanes.errors import LanesError
from lanes_postgres.advisory_locks import key_of
from lanes_postgres.subscription.owned import lock_name
from memsource.adapters.choices import KINDS, Choice, Kind, Phase
from memsource.adapters.pairs import Impossible
from memsource.adapters.world import AdapterWorld
from memsource.memory.broker import KeepsDeadLetters
from memsource.memory.topic import Record
from memsource.personality import PersonalityName
from memsource.sim.world.worker import Worker
from tests.simulated.postgres.client import Line, Network
from tests.simulated.postgres.log import Batch, ReferenceLog, StoredRow
from tests.simulated.postgres.member import SUBSCRIPTION, SimulatedMember, SimulatedWriter, unit_of
from tests.simulated.postgres.server import PostgresServer, Session
from tests.simulated.postgres.statements import INCARNATION, LOG, SCHEMA, member_key, state_key, subscription_key
from tests.simulated.postgres.states import StateRow

_LATENCIES: Final = (0.0, 0.001, 0.001, 0.02, 0.04)
_CALM: Final = (0.0, 0.0, 0.5, 1.0, 3.0)
"""Seconds at the begin of a run without faults."""

_CALLS: Final = ("connect", "look", "read", "members", "lock", "unlock", "verify", "claim", "store", "commit", "letter")
"""Names of the statements. Each run draws those that can fail."""

_BUDGETS: Final = (0.0, 0.1, 1.0, 5.0)

_FAILING: Final = (1, 1, 2, 4)
"""Numbers of statements that can fail in a run. If few can, the few faults of a run meet rare statements too."""

_PHASES: Final[Mapping[str, Phase]] = {
    "verify": "lease",
    "lock": "takeover",
    "claim": "takeover",
    "store": "commit",
    "commit": "commit",
    "letter": "commit",
}
"""Activities to which statements belong; the others belong to the present activity of the member."""

_REACTIONS: Final[Mapping[Kind, Sequence[str]]] = {
    "freeze": ("verify", "store", "lock"),
    "cut_off": ("verify", "store", "read", "connect"),
    "restart": ("connect", "lock", "claim"),
    "callback": ("connect", "lock", "claim", "commit"),
}
"""Statements that a member makes after a fault."""

_EVENTS: Final = {"locks": 4, "session": 3, "waits": 3, "rolled back": 2}
"""Events at the server that change the work of a member, with their weights."""

_COMMITS_WITHIN: Final = (0.01, 0.3, 2.0, 6.0)
"""Seconds of a COMMIT that takes long."""

_LATE: Final = 0.3
"""Share of the transactions whose COMMIT takes long, in a run that has such."""

_AWARE: Final = 0.3
"""Seconds after the end of a connection within which a process that runs must have noticed the end."""

_EXPIRES: Final = 0.5
"""Seconds beyond a lease after which the session of a frozen process must have ended."""


class PostgresBroker(KeepsDeadLetters):
    """A log with real members of one subscription.

    Args:
        rng: Source of all settings.
        writes: Whether the members write their dead letters by the real writer.
        late: Whether some transactions become visible after transactions with a later ticket.

    Attributes:
        server: The server.
        network: The network.
        members: All sources that the run has made.
        letters: Ids of the dead letters whose writes were confirmed.
    """

    name: PersonalityName = "kafka"
    takes_in_at_once = False
    impossible: Impossible = {}  # noqa: RUF012
    phases: tuple[Phase, ...] = ("open", "steady", "drain", "lease", "commit", "takeover", "close")
    all_calls: tuple[str, ...] = _CALLS
    calls: tuple[str, ...] = _CALLS
    waits = True

    def __init__(self, rng: Random, *, writes: bool, late: bool) -> None:
        super().__init__()
        self._rng = rng
        self._world: AdapterWorld | None = None
        self._calm_until = rng.choice(_CALM)
        self._faulty = frozenset(rng.sample(self.all_calls, rng.choice(_FAILING)))
        self.calls = tuple(call for call in self.all_calls if call in self._faulty)
        self.reactions: dict[Kind, Sequence[str]] = {
            kind: found
            for kind, asked in _REACTIONS.items()
            if (found := [one for one in asked if one in self._faulty])
        }
        self._writes = writes
        self._late = late
        partitions = rng.choice([1, 1, 2, 3, 4, 5])
        self._lease = rng.choice([3.0, 3.0, 5.0, 10.0])
        self._arguments: dict[str, Any] = {
            "time_budget": rng.choice(_BUDGETS),
            "poll_interval": rng.choice([0.1, 0.5, 2.0]),
            "visit": rng.choice(["oldest", "backlog", "name"]),
            "start": rng.choice(["beginning", "beginning", "next"]),
        }
        self.deadlines: tuple[float, ...] = (self._lease, self._lease * 5 / 6, self._lease / 3, 3.0)
        self.server = PostgresServer(ReferenceLog(partitions))
        self.server.on_row = self._stored
        self.server.on_expiry = self._expired
        latencies = [rng.choice(_LATENCIES) for _ in range(4)]
        self.network = Network(self.server, rng, latencies, self._fate)
        self._keys = {key_of(lock_name(SCHEMA, LOG, SUBSCRIPTION, number)): number for number in self.partitions}
        self.members: list[SimulatedMember] = []
        self.letters: set[str] = set()
        self._taken: list[tuple[str, Partition]] = []
        self._epochs: dict[int, int] = {}
        self._owners: dict[int, str] = {}
        self._turn = 0

    def __repr__(self) -> str:
        return f"<PostgresBroker {self.server!r}>"

    def bind(self, world: AdapterWorld) -> None:
        self._world = world

    @property
    def kinds(self) -> frozenset[Kind]:
        """All faults except duplicates, which a connection does not have. Some runs begin without faults."""
        calm = self._world is not None and self._world.now < self._calm_until
        return frozenset() if calm else frozenset(KINDS) - {"duplicate"}

    # --- producers

    def publish(
        self,
        value: bytes,
        *,
        key: PartitionKey | None,
        headers: Iterable[tuple[str, bytes]] = (),
        partition: int | None = None,
    ) -> Record:
        """Append one message in a transaction, whose COMMIT may take long."""
        encoded = None if key is None else key_bytes(key)
        if partition is None and encoded is not None:
            partition = partition_of(encoded, len(self.partitions))
        if partition is None:
            self._turn += 1
            partition = self._turn % len(self.partitions)
        log = self.server.log
        transaction = log.begin()
        transaction.batches.append(Batch(partition, (StoredRow(encoded, LOG, value, self.now),)))
        log.at_commit(transaction)
        seconds = self._rng.choice(_COMMITS_WITHIN) if self._late and self._rng.random() < _LATE else 0.0
        if seconds:
            self.network.at(self.now + seconds, lambda: log.commit(transaction))
        else:
            log.commit(transaction)
        # The position follows with the sequencer.
        return Record(partition, -1, encoded, value, (), LOG)

    def skip(self, count: int, *, partition: int = 0) -> None:
        """Do nothing, because positions have no gaps."""

    @property
    def partitions(self) -> range:
        return range(len(self.server.log.ends))

    @property
    def records(self) -> list[Record]:
        """The messages that have positions, from the start of the subscription on."""
        return [
            Record(number, position, row.key, row.value, (), row.subject)
            for number, start in enumerate(self._starts)
            for position, row in self.server.log.rows(number).items()
            if position >= start
        ]

    @property
    def unfinished(self) -> list[Record]:
        """The messages above the stored positions, and the messages without a position."""
        left = [record for record in self.records if not self._is_finished(record)]
        log = self.server.log
        coming = [batch for transaction in log.running for batch in transaction.batches]
        for batch in [*log.waiting, *coming]:
            left += [Record(batch.partition, 1 << 60, row.key, row.value, (), row.subject) for row in batch.rows]
        return left

    def _is_finished(self, record: Record) -> bool:
        state = self._state(record.partition)
        return state is not None and (
            record.position < state.floor or any(begin <= record.position < end for begin, end in state.completed)
        )

    @property
    def _starts(self) -> list[int]:
        row = self.server.rows.get(subscription_key(1, SUBSCRIPTION))
        return [0 for _ in self.partitions] if row is None else list(row[1])

    def _state(self, number: int) -> StateRow | None:
        return self.server.rows.get(state_key(SUBSCRIPTION, LOG, number, INCARNATION))

    # --- members

    def source(self, member: str, clock: Clock = monotonic) -> SimulatedMember:
        made = SimulatedMember(self, member, self._lease, **self._arguments)
        self.members.append(made)
        return made

    def dead_letter_writer(self, member: str) -> SimulatedWriter | None:
        return SimulatedWriter(self, member) if self._writes else None

    def confirmed(self, member: str, letter: DeadLetter) -> None:
        """Judge the confirmation of a dead letter: the table has the letter."""
        self.letters.add(letter.id)
        if self.server.rows.get(("letter", SUBSCRIPTION, letter.id)) is None:
            self.find("LetterIsStored", f"{member} confirms the dead letter {letter.id}, which the table does not have")

    def opened(self, member: SimulatedMember) -> None:
        """Judge the start of a member: all members begin at the positions that the first start decided."""
        if member.starts != self._starts:
            what = f"{member.member} begins at {member.starts}, and the subscription at {self._starts}"
            self.find("StartsOnce", what)

    def assigned(self, member: SimulatedMember, partition: Partition) -> None:
        """Record an assignment. A fencing token that is not above all earlier tokens is a finding."""
        number, token = unit_of(partition), partition.fencing_token or 0
        before = self._epochs.get(number, 0)
        if token <= before:
            self.find("EpochsRise", f"{member.member} got the epoch {token} of {partition.id}, after {before}")
        self._epochs[number] = token

    def lost(self, member: SimulatedMember, partition: Partition) -> None:
        """Judge a loss: a lost assignment has no lease."""
        if partition.deadline > self.now:
            self.find("LossEndsLease", f"{member.member} loses {partition.id}, whose lease lasts until later")

    def on_started(self, member: str, message: Message) -> None:
        """Judge the start of a handler: the member has the lock, or could not yet notice its loss."""
        source = self._source(member)
        number = unit_of(message.partition)
        if source is None or source.owned.get(number) is not message.partition:
            return
        holder = self.server.locks.get(self._lock_key(message.partition))
        newest = message.epoch is None or message.epoch >= self._epochs.get(number, 0)
        if (holder is None or holder.owner != member or not newest) and self._aware(member, source):
            what = f"{member} starts position {message.position} of {message.partition.id} without its lock"
            self.find("LockHolds", what)

    def _lock_key(self, partition: Partition) -> int:
        return key_of(lock_name(SCHEMA, LOG, SUBSCRIPTION, partition.id.number))

    def _aware(self, member: str, source: SimulatedMember) -> bool:
        """Whether a member has had the time to notice the loss of a lock."""
        line, worker = source.lock_line, self.worker(member)
        if worker is None:
            return False
        ended = -math.inf
        if line is not None:
            ended = line.ended_at if not line.open else math.inf if not line.session.open or line.dead else -math.inf
        return self.now - max(ended, worker.frozen_until, self.network.cut_until(member)) > _AWARE

    def on_settled(self, settlements: Sequence[Settlement]) -> None:
        """Judge confirmed positions: the table has them, unless a newer owner has claimed the partition."""
        for settlement in settlements:
            state = self._state(settlement.partition.id.number)
            if settlement.floor is None or state is None or state.epoch != settlement.partition.fencing_token:
                continue
            if settlement.partition.deadline > self.now and state.floor < settlement.floor:
                what = f"{settlement.partition.id} is confirmed at {settlement.floor}, and stored at {state.floor}"
                self.find("ConfirmedIsStored", what)

    def _stored(self, session: Session, key: Hashable, before: Any, after: Any) -> None:
        """Judge a change of a row, by the row itself."""
        assert isinstance(key, tuple)
        if key[0] == "subscription" and before is not None:
            self.find("StartsOnce", f"{session.owner} decides again where the subscription begins: {after}")
        if key[0] != "state" or after is None:
            return
        if before is not None and after.floor < before.floor:
            self.find("PositionsRise", f"{session.owner} lowers {key[3]} from {before.floor} to {after.floor}")
        if before is None or after.epoch != before.epoch:
            self._owners[after.epoch] = session.owner
            if before is not None and after.epoch < before.epoch:
                self.find("OwnersStore", f"{session.owner} stores {key[3]} under {after.epoch} after {before.epoch}")
        elif self._owners[after.epoch] != session.owner:
            self.find("OwnersStore", f"{session.owner} stores {key[3]} of {self._owners[after.epoch]}")

    def _expired(self, session: Session) -> None:
        """Judge the end of an idle session: the member no longer relies on the locks of the session."""
        source = self._source(session.owner)
        line = None if source is None else source.lock_line
        if source is None or line is None or line.session is not session:
            return
        self._take([line])
        for partition in source.owned.values():
            if partition.deadline > self.now:
                what = (
                    f"{session.owner} relies on its lock of {partition.id} for {partition.deadline - self.now:g} s more"
                )
                self.find("LeaseCovers", what)

    @property
    def taken(self) -> list[tuple[str, Partition]]:
        return self._taken

    def _take(self, lines: Iterable[Line]) -> None:
        """Record the assignments whose locks end with sessions, before the sessions end."""
        for line in lines:
            source = self._source(line.member)
            if source is not None and source.lock_line is line:
                self._taken += [(line.member, partition) for partition in source.owned.values()]

    def _source(self, member: str) -> SimulatedMember | None:
        return next((each for each in reversed(self.members) if each.member == member), None)

    def worker(self, member: str) -> Worker | None:
        """The process of a member."""
        assert self._world is not None, "bind comes first"
        return next((each for each in self._world.members if each.name == member), None)

    def find(self, check: str, what: str) -> None:
        assert self._world is not None, "bind comes first"
        self._world.find(check, what)

    @property
    def unjudged(self) -> tuple[str, ...]:
        return ()

    def excuses(self, member: str, error: LanesError) -> bool:
        return False

    def phase(self, member: str) -> Phase:
        source = self._source(member)
        return "open" if source is None else source.phase

    # --- statements

    def _fate(self, member: str, call: str) -> Choice:
        assert self._world is not None, "bind comes first"
        if call not in self._faulty:
            return Choice("deliver")
        state = self.phase(member)
        return self._world.exchange(member, call, _PHASES.get(call, state) if state == "steady" else state)

    # --- faults

    def crash(self, member: str, now: float) -> None:
        self.network.kill(member)

    def freeze(self, member: str, until: float) -> None:
        """Expect the end of the session with the locks, if the member is frozen for longer than its lease."""
        source = self._source(member)
        line = None if source is None else source.lock_line
        if line is None:
            return
        at = self.now + self._lease + _EXPIRES
        if until <= at:
            # The member may ask at the end of this freeze, and freeze again at once.
            return

        def judge() -> None:
            worker = self.worker(member)
            frozen = worker is not None and not worker.gone and worker.frozen_until > at
            if frozen and line.session.open and line.session.locked() and line.session.asked_at < at - self._lease:
                self.find("FrozenEnds", f"the session of {member} has its locks {self._lease:g} s after the freeze")

        self.network.at(at, judge)

    def rebalance(self, now: float) -> bool:
        """Let another member wait for partitions, so that the owners give some up."""
        self.server.rows[member_key(1, SUBSCRIPTION, "another")] = (0, True, now)
        return True

    def lose(self, partition: int, now: float) -> bool:
        """End the session that has the lock of a partition."""
        holder = self.server.locks.get(key_of(lock_name(SCHEMA, LOG, SUBSCRIPTION, partition)))
        return holder is not None and self._terminate(holder)

    def _terminate(self, session: Session) -> bool:
        self._take(line for line in self.network.lines if line.session is session)
        self.server.terminate(session)
        return True

    def redeliver(self, partition: int, now: float) -> bool:
        """Return False, because the server redelivers nothing."""
        return False

    def restart(self, now: float) -> bool:
        return self.down(now + 0.5)

    def cut_off(self, member: str, until: float) -> bool:
        self._take(self.network.of(member))
        return self.network.cut(member, until)

    def down(self, until: float) -> bool:
        """Restart the server, which ends all sessions."""
        if not self.server.up:
            return False
        self._take(self.network.lines)
        self.server.stop()
        self.network.at(until, self.server.start)
        return True

    def callback(self, target: int) -> bool:
        """Change the work of a member from outside."""
        event = self._rng.choices([*_EVENTS], [*_EVENTS.values()])[0]
        sessions = self.server.sessions
        if event == "locks":
            holders = [session for session in sessions if session.locked()]
            return bool(holders) and self._terminate(holders[target % len(holders)])
        if event == "session":
            return bool(sessions) and self._terminate(sessions[target % len(sessions)])
        if event == "waits":
            return self.rebalance(self.now)
        log = self.server.log
        transaction = log.begin()
        transaction.batches.append(Batch(0, (StoredRow(None, LOG, b"", self.now),)))
        log.at_commit(transaction)
        self.network.at(self.now + self._rng.choice(_COMMITS_WITHIN), lambda: log.roll_back(transaction))
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
