"""The broker of a run: a ``KafkaBroker`` as data, whose members are real ``KafkaSource`` objects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import Context
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any, Final

from confluent_kafka import KafkaError

from lanes.clock import Clock
from lanes.core.types import Message, Partition, PartitionId, Room, Settlement
from lanes.dead_letter import DeadLetter
from lanes.errors import LanesError, SourceError
from lanes.source import SourceEvent
from lanes_kafka.client.group import Assignment
from lanes_kafka.dead_letters.wire import ID
from lanes_kafka.source import KafkaSource
from memsource.adapters.choices import KINDS, OF_REQUESTS, Kind, Phase
from memsource.adapters.pairs import Impossible
from memsource.adapters.runs import TOPIC
from memsource.adapters.threads import SteppedThread
from memsource.adapters.world import AdapterWorld
from memsource.kafka.broker import KafkaBroker, KafkaSettings
from memsource.kafka.client import Client, ClientPartition, Code, Commit, KafkaFailure
from memsource.memory.group import Committed
from memsource.memory.topic import Record
from memsource.sim.loop.event_loop import SimLoop, current
from tests.simulated.kafka.admin import SimulatedAdmin
from tests.simulated.kafka.consumer import SimulatedConsumer
from tests.simulated.kafka.events import FORBIDDEN, Events, Extras
from tests.simulated.kafka.producer import LETTERS, Letter, SimulatedProducer, SimulatedWriter

GROUP_ID: Final = "g"

_REBUILDS: Final = 3

_CLOSED_AFTER: Final = 30.0
"""Seconds within which a close ends the thread of a source, also without a broker."""

_TRANSIENT: Final = (
    KafkaError._TRANSPORT,
    KafkaError._PARTITION_EOF,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
)
"""Codes of error messages after which the client works on."""

_REACTIONS: Final[Mapping[Kind, Sequence[str]]] = {
    "freeze": ("members",),
    "cut_off": ("commit", "committed", "topics"),
    "restart": ("commit", "committed", "topics"),
    "callback": ("commit", "committed", "offsets"),
}
"""Requests that a member makes after a fault."""

_IMPOSSIBLE: Final[Impossible] = {
    # A consumer drains all partitions, and commits, before it closes the client. The callbacks of a close only give up
    # what is left, and the thread asks nothing any more.
    (kind, "close"): "a client that closes sends no request of the adapter"
    for kind in OF_REQUESTS
}

_STRATEGIES: Final = {"eager": "range", "cooperative": "cooperative-sticky"}

_DEAF_FOR: Final = 8.0
"""Seconds for which a client that was removed during a freeze gets no answer, longer than a session."""

_SHORT_POLLS: Final = 24.5
"""Seconds between two polls, of which 0.8 are for a drain: hardly more than the longest one, with its commits."""

_FAILS_WITHIN: Final = 12.0
"""Seconds after a refused read within which its source fails, unless a stop closes it; the longest handler takes 7."""

_RECENTLY: Final = 60.0
"""Seconds after a refused request in which a process may end by the refusal."""


class SimulatedKafka(KafkaBroker):
    """A broker with one topic and one group, and the clients of its members.

    Args:
        rng: Draws the settings, and the sizes of the batches that clients return.
        partitions: Number of partitions; None = drawn.
        settings: Settings of the broker and its clients; None = drawn.
        extras: Events that only some runs have.

    Attributes:
        events: Events that only some runs have.
        deleted: The messages that retention has deleted, by the name of the partition and the position.
    """

    kinds: frozenset[Kind] = frozenset(KINDS)
    phases: tuple[Phase, ...] = ("open", "steady", "drain", "commit", "takeover", "close")
    impossible = _IMPOSSIBLE
    reactions = _REACTIONS
    calls: tuple[str, ...] = (*("commit",) * 4, *("members", "committed", "topics") * 2, "offsets", "ends", "configs")

    def __init__(
        self,
        rng: Random,
        *,
        partitions: int | None = None,
        settings: KafkaSettings | None = None,
        extras: Extras | None = None,
    ) -> None:
        settings = settings or KafkaSettings(
            protocol=rng.choice(["eager", "cooperative", "cooperative", "848"]),
            session_timeout=6.0,
            heartbeat_interval=rng.choice([0.5, 1.0]),
            max_poll_interval=rng.choice([30.0, 60.0, 300.0]),
            prefetch=rng.choice([3, 100]),
        )
        if extras is not None and extras.deafens:
            settings = replace(settings, deaf=_DEAF_FOR)
        if extras is not None and extras.polls:
            settings = replace(settings, max_poll_interval=_SHORT_POLLS)
        super().__init__(
            partitions or rng.randint(1, 4), topic=TOPIC, settings=settings, hands_over=rng.random() < 0.75
        )
        self.rng = rng
        self.events = Events(self, extras or Extras())
        self.deleted: set[tuple[str, int]] = set()
        if self.events.extras.retains:
            # The bounds of a log are asked for by a member whose position was deleted.
            self.calls = (*self.calls, *("offsets",) * 9)
        if self.events.extras.writes:
            self.calls = (*self.calls, *("letter",) * 6)
        self.letters: list[Letter] = []
        self._letter_offsets: dict[tuple[SimulatedProducer, int], int] = {}
        self._forbidden: tuple[Code, float] = FORBIDDEN[0], 0.0
        self._refusals: dict[str, float] = {}
        self._ended: set[str] = set()
        self._commits_refused = False
        self._producers: dict[str, SimulatedProducer] = {}
        self._writers: list[SimulatedWriter] = []
        self.deadlines: tuple[float, ...] = (
            settings.session_timeout,
            min(48.0, 0.8 * settings.max_poll_interval),
            5.0,
            10.0,
            1.0,
        )
        # Real limits are higher than the number of messages of a run.
        self.batch = rng.choice([2, 1_000])
        self.read_ahead = rng.choice([4, 20_000])
        self.consumers: dict[str, SimulatedConsumer] = {}
        # Every commit that the broker has stored, and the assignments that it took during a freeze of a session.
        self._stored: set[tuple[int, int, tuple[tuple[int, int], ...]]] = set()
        self._doubtful: list[Partition] = []
        self.frozen: set[str] = set()
        self._wakes: dict[str, float] = {}
        self._sources: dict[str, KafkaSource] = {}
        self._instances: dict[str, str] = {}
        # The answers about the topic that members have: the time of the request, and the topic's id.
        self._told: dict[str, list[tuple[float, str | None]]] = {}
        self._stale_commits = False
        self._stale: set[int] = set()

    # --- memsource.adapters.world.AdapterBroker

    def bind(self, world: AdapterWorld) -> None:
        self.world = world
        self.loop: SimLoop = current()
        self.events.begin()

    def source(self, member: str, clock: Clock) -> KafkaSource:
        instance = self._instance_for(member)
        self._reset_stale()
        made: list[Client] = [Client(member, clock, instance)]
        self.introduce(made[0])

        def client(settings: dict[str, Any]) -> Any:
            if len(made) > 1 or member in self.consumers:
                made.append(Client(member, clock, instance))
                self.introduce(made[-1])
            self.consumers[member] = SimulatedConsumer(self, made[-1], settings)
            return self.consumers[member]

        source = self._sources[member] = KafkaSource(
            self._config() | ({} if instance is None else {"group.instance.id": instance}),
            topics=self.topic,
            commit_metadata=self.hands_over,
            rebuilds=_REBUILDS,
            out_of_range="earliest" if self.events.extras.retains else None,
            client=client,
        )
        source._clock = clock
        receive, close = source.receive, source.aclose

        async def receiving(room: Room) -> Sequence[SourceEvent]:
            try:
                return await receive(room)
            except SourceError:
                self._ended.add(member)
                raise

        async def aclose() -> None:
            self._ended.add(member)
            thread: Any = source._client_thread
            if thread is not None:
                self.loop.call_at(
                    self.world.now + _CLOSED_AFTER, lambda: self._check_closed(member, thread.thread), context=Context()
                )
            await close()

        source.receive = receiving  # type: ignore[method-assign]
        source.aclose = aclose  # type: ignore[method-assign]
        return source

    def _instance_for(self, member: str) -> str | None:
        """The first instance id that no running process has, in a run with static members."""
        if not self.events.extras.static:
            return None
        running = {each.name for each in self.world.members if not (each.gone or each.ended.is_set())}
        taken = {each for name, each in self._instances.items() if name in running}
        self._instances[member] = next(name for name in map("i-{}".format, count()) if name not in taken)
        return self._instances[member]

    def _reset_stale(self) -> None:
        """Delete the positions of a former topic, as an operator does before the next start."""
        for number in self._stale:
            self._commits.pop(number, None)
            # The group may have no member.
            self.group._committed[number] = Committed()
        self._stale.clear()

    def _check_closed(self, member: str, thread: SteppedThread) -> None:
        if thread.is_alive() and member not in self.frozen and not self._client(member).crashed:
            self.world.find("CloseEnds", f"the thread of {member} runs {_CLOSED_AFTER:g} s after the close")

    def admin(self, member: str) -> SimulatedAdmin:
        """Make the admin client of a member."""
        return SimulatedAdmin(self, self._client(member))

    def phase(self, member: str) -> Phase:
        consumer = self.consumers.get(member)
        return "open" if consumer is None else consumer.phase

    def cut_off(self, member: str, until: float) -> bool:
        now = self.world.now
        self.isolate(member, until, now)
        self.events.retain_while(until)
        consumer = self.consumers.get(member)
        if consumer is not None and self.rng.random() < 0.5:
            consumer.on_broken_connection()
        return True

    def down(self, until: float) -> bool:
        now = self.world.now
        if not self.up:
            return False
        self.stop_broker(now)
        self.events.retain_while(until + 1.0)
        self.loop.call_at(until, lambda: self.start_broker(self.world.now), context=Context())
        for consumer in self.consumers.values():
            consumer.on_broken_connection()
        return True

    def callback(self, target: int) -> bool:
        now = self.world.now
        if self.events.callback(target):
            return True
        if target < 3 or (target < 5 and self.settings.protocol == "eager"):
            # An eager group takes no single partition.
            return self.rebalance(now)
        if target < 5:
            lost = self.lose(target % len(self.partitions), now)
            if lost and target == 3:
                # The former owner may get the partition again before it has heard of the loss.
                self.group.rebalance()
            return lost
        alive = [each for each in self.consumers.values() if each.running]
        if not alive:
            return False
        consumer = alive[target % len(alive)]
        if target == 5:
            consumer.on_broken_connection()
        elif target == 6:
            consumer.on_error(self.rng.choice(_TRANSIENT))
        else:
            consumer.on_fatal()
        return True

    def rebalance(self, now: float) -> bool:
        self.events.on_rebalance()
        return super().rebalance(now)

    def forbid(self, code: Code, until: float) -> None:
        """Refuse requests with this error until a time."""
        self._forbidden = code, until

    @property
    def forbidden(self) -> Code | None:
        """The error of the requests that the broker refuses now; None = the broker refuses no request."""
        code, until = self._forbidden
        return code if self.world.now < until else None

    def delete_topic(self, now: float) -> None:
        for number in self.partitions:
            self._delete(number, self.group.topic.log(number).end)
        super().delete_topic(now)
        self.world.on_recreated()

    def publish(self, *args: Any, **options: Any) -> Record:
        # The topic appears before a producer writes to it.
        self.create_topic(self.world.now)
        return super().publish(*args, **options)

    def on_asked(self, member: str, asked: Future[Any] | None) -> None:
        """Record the answer to a request for the topic id, and check that the source ends after a recreation."""
        sent = self.world.now

        def answered(future: Future[Any]) -> None:
            error: Any = future.exception()
            if error is None:
                topic_id = future.result().topic_id
                self._told.setdefault(member, []).append((sent, topic_id))
                former = [each for each in held() if each.partition.incarnation != topic_id]
                if former:
                    self.loop.call_at(self.world.now + _FAILS_WITHIN, check, former, context=Context())
            elif error.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                # The changes of a topic stay unknown to a user who may not see it.
                self._told.setdefault(member, []).append((sent, None))

        def held() -> list[Assignment]:
            consumer = self.consumers.get(member)
            return [] if consumer is None else consumer.assignments

        def check(former: list[Assignment]) -> None:
            if member in self._ended or member in self.frozen or self.client_of(member).crashed:
                return
            left = [str(each.partition.id) for each in held() if each in former]
            if left:
                self.world.find(
                    "RecreatedStops", f"{member} still owns {left} {_FAILS_WITHIN:g} s after it was told of a new topic"
                )

        if asked is not None:
            asked.add_done_callback(answered)

    def was_asked(self, member: str, since: float, topic_id: str) -> bool:
        """Whether the member has received this topic id in the answer to a request that it sent after a time."""
        return any(sent >= since and told in (topic_id, None) for sent, told in self._told.get(member, ()))

    def on_committed(self, assignment: Assignment | None) -> None:
        """Record a commit of an assignment of a former topic, which was under way during the recreation."""
        if assignment is not None and assignment.partition.incarnation != self.topic_id:
            self._stale_commits = True
            self._stale.add(assignment.partition.id.number)

    def check_allowed(self, member: str, *codes: Code) -> None:
        """Raise the error of a request that the broker refuses with one of these codes."""
        code = self.forbidden
        if code in codes and code is not None:
            self._refusals[member] = self.world.now
            raise KafkaFailure(code, "simulated")

    @property
    def unjudged(self) -> tuple[str, ...]:
        """Checks that do not apply to this run.

        After a refused commit the process commits nothing more, and ends. The position of a former topic, which was
        committed while the topic was recreated, skips messages of the new topic.
        """
        refused = ("NoDuplicateCleanly",) if self._commits_refused else ()
        return (*refused, "NothingLost", "AtLeastOnce", "PerKeyOrder") if self._stale_commits else refused

    def excuses(self, member: str, error: LanesError) -> bool:
        """Whether the broker has just refused a request of a member, so that its process may end by this error."""
        if "group.instance.id" in str(error):
            # The session of a process that has crashed is not over.
            return True
        if self.events.extras.polls and "assigning partitions failed" in str(error):
            # The network has cut the member off in its assignment, for longer than it may ask for its positions.
            return True
        if self.events.recreated and any(
            text in str(error) for text in ("was deleted", "out of range", "does not exist, or this client")
        ):
            return True
        named = "AUTHORIZATION_FAILED" in str(error) or "this user may not" in str(error)
        return named and self.world.now - self._refusals.get(member, -math.inf) < _RECENTLY

    def on_refused(self, member: str) -> None:
        """Check that a source fails or closes after the client has reported a refused read."""

        def check() -> None:
            if not (member in self._ended or member in self.frozen or self.client_of(member).crashed):
                self.world.find(
                    "RefusedStops", f"the source of {member} works {_FAILS_WITHIN:g} s after its read was refused"
                )

        self._refusals[member] = self.world.now
        self.loop.call_at(self.world.now + _FAILS_WITHIN, check, context=Context())

    def freeze(self, member: str, until: float) -> None:
        now = self.world.now
        super().freeze(member, until)
        self.events.retain_while(until)
        self.frozen.add(member)
        self._wakes[member] = max(until, self._wakes.get(member, until))
        if until - now >= self.settings.session_timeout:
            count = len(self.coordinator.taken)
            self.loop.call_at(until, lambda: self._wake(member, count), context=Context())

    def _wake(self, member: str, count: int) -> None:
        if self._wakes[member] > self.world.now:
            # Another freeze has begun meanwhile, and is not over.
            return
        if self.forbidden == "GROUP_AUTHORIZATION_FAILED":
            # The member may not ask who is in the group. It waits for a heartbeat, which the broker refuses too; see
            # docs/reference/kafka.md.
            return
        self._doubtful += [partition for name, partition in self.coordinator.taken[count:] if name == member]

    def on_started(self, member: str, message: Message) -> None:
        if any(each is message.partition for each in self._doubtful):
            self.world.find(
                "NothingStartsInDoubt",
                f"{member} started position {message.position} of {message.partition.id}, which the group had given "
                "away while the member was frozen for a session",
            )

    def on_settled(self, settlements: Sequence[Settlement]) -> None:
        for each in settlements:
            assert each.floor is not None, "Kafka settles positions"
            if each.partition.incarnation != self.topic_id:
                self.world.on_recreated()
            completed = _merged(each.completed) if self.hands_over else ()
            if (each.partition.id.number, each.floor, completed) not in self._stored:
                self.world.find(
                    "ConfirmedIsStored",
                    f"the source confirmed position {each.floor} of {each.partition.id} with {completed}, which the "
                    "broker has never stored",
                )

    def crash(self, member: str, now: float) -> None:
        super().crash(member, now)
        # The group gives the partitions of a crashed member away at the end of its session.
        self.events.retain_while(now + self.settings.session_timeout)

    def commit(self, client: Client, commits: Mapping[int, Commit], now: float) -> None:
        self._commits_refused |= self.forbidden is not None
        self.check_allowed(client.name, *FORBIDDEN)
        before = {number: self.group.committed(number) for number in commits}
        super().commit(client, commits, now)
        for number in commits:
            offset, completed = self.group.committed(number)
            self._check_kept(client, number, *before[number], offset, completed)
            self._stored.add((number, offset, _merged(completed)))
            if completed and self.phase(client.name) == "drain":
                self.events.on_handed_over(number, offset, _merged(completed))

    def _check_kept(
        self,
        client: Client,
        number: int,
        before: int,
        completed: Iterable[tuple[int, int]],
        offset: int,
        now: Iterable[tuple[int, int]],
    ) -> None:
        """Judge that a commit omits no completed position of the previous commit."""
        kept = {position for run in now for position in range(*run)}
        named = {position for run in completed for position in range(*run) if position >= offset >= before}
        if not named <= kept:
            what = f"{client.name} commits position {offset} of partition {number} without {sorted(named - kept)}"
            self.world.find("CompletedIsKept", f"{what}, which were completed at {before}")

    def dead_letter_writer(self, member: str) -> SimulatedWriter | None:
        if not self.events.extras.writes:
            return None
        # In some processes the queue of the client has room for one record.
        few = {"queue.buffering.max.messages": 1} if self.rng.random() < 0.3 else {}
        self._writers.append(SimulatedWriter(self, member, self._config() | few))
        return self._writers[-1]

    def producer(self, member: str, settings: dict[str, Any]) -> SimulatedProducer:
        """Make the producer of a member."""
        self._producers[member] = SimulatedProducer(self, member, settings)
        return self._producers[member]

    def store_letter(self, producer: SimulatedProducer, topic: str, number: int, letter: Letter) -> int:
        """Append a dead letter, unless the broker already has the producer's sequence number. Returns its offset."""
        assert topic == LETTERS, "the members write to one topic"
        if self.world.now < self.events.too_few_replicas_until:
            raise KafkaFailure("NOT_ENOUGH_REPLICAS", "simulated")
        offset = self._letter_offsets.setdefault((producer, number), len(self.letters))
        if offset == len(self.letters):
            self.letters.append(letter)
        return offset

    def confirmed(self, member: str, letter: DeadLetter) -> None:
        """Judge the confirmation of a dead letter: the topic has the letter."""
        named = (ID, letter.id.encode())
        if letter.value not in [each.value for each in self.letters if named in each.headers]:
            what = f"{member} confirms the dead letter {letter.id}, which the topic does not have"
            self.world.find("LetterIsStored", what)

    def end(self) -> None:
        for source in self._sources.values():
            if source._client_thread is not None:
                # The threads of the sources are stepped threads.
                thread: Any = source._client_thread.thread
                thread.end()
        for writer in self._writers:
            writer.end()

    # --- for links

    def reachable(self, client: Client, *, own: bool) -> bool:
        """Whether requests of a client arrive now; with ``own``, requests of the client's own connection to the
        coordinator.
        """
        return self.up and (client.isolated_since is None or (client.deaf and not own))

    # --- for clients

    def client_of(self, member: str) -> Client:
        """The newest client of a member."""
        return self._client(member)

    @property
    def introduced(self) -> list[Client]:
        """The newest client of each member."""
        return list(self._clients.values())

    @property
    def producers(self) -> list[SimulatedProducer]:
        """The newest producer of each member."""
        return list(self._producers.values())

    def bound(self, partition: int, end: bool) -> int:
        """The end of a log, or its beginning."""
        return self.group.topic.log(partition).end if end else self._starts[partition]

    # --- inside

    def _delete(self, partition: int, before: int) -> None:
        name = str(PartitionId(self.topic, partition))
        self.deleted.update((name, each) for each in self.group.topic.log(partition).positions if each < before)
        super()._delete(partition, before)

    def _begin(self, client: Client, partition: int) -> ClientPartition:
        # The adapter assigns each partition with a position.
        return ClientPartition()

    def _fill(self, client: Client, partition: int, owned: ClientPartition, messages: int) -> None:
        if self.forbidden == "TOPIC_AUTHORIZATION_FAILED":
            return
        if self._reachable(partition, owned.fetched):
            super()._fill(client, partition, owned, messages)
        elif not owned.queue:
            # The error follows the prefetched messages; see ``SimulatedConsumer._fetch``.
            owned.silent = True

    def _config(self) -> dict[str, Any]:
        settings = self.settings
        config: dict[str, Any] = {
            "bootstrap.servers": "simulated:9092",
            "group.id": GROUP_ID,
            "max.poll.interval.ms": int(settings.max_poll_interval * 1000),
        }
        if settings.protocol == "848":
            return config | {"group.protocol": "consumer"}
        return config | {
            "session.timeout.ms": int(settings.session_timeout * 1000),
            "heartbeat.interval.ms": int(settings.heartbeat_interval * 1000),
            "partition.assignment.strategy": _STRATEGIES[settings.protocol],
        }


def _merged(runs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Merge each run that begins at the end of another run."""
    found: list[tuple[int, int]] = []
    for start, end in runs:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return tuple(found)
