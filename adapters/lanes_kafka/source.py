"""A Kafka consumer as a source: the group's partitions, one committed position each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import anyio
from confluent_kafka import Consumer

from lanes.clock import monotonic
from lanes.core.types import Message, Partition, Room, Settlement
from lanes.errors import ConfigError, ContractError, SourceError
from lanes.source import Assigned, Lost, SourceEvent, SourceTraits
from lanes_kafka.bridge import Answer, Bridge
from lanes_kafka.client.commits import Commit, carries
from lanes_kafka.client.group import OF_POLL_INTERVAL
from lanes_kafka.client.mailbox import Close, Command, Expire, Release, Want
from lanes_kafka.client.prefetch import Held
from lanes_kafka.client.records import KeyFunction, record_key
from lanes_kafka.client.thread import Owner
from lanes_kafka.config import OutOfRange, Start, client_config

__all__ = ["KafkaSource"]

log = logging.getLogger("lanes.kafka")

_LOOK: Final = 1.0
"""Seconds between two looks at whether the client is polled."""


class KafkaSource:
    """Reads ``topics`` in the group that ``config`` names: the dictionary that a ``confluent_kafka.Consumer`` is made
    with, passed through as it is, but for auto-commit, which is off, and ``auto.offset.reset``.

    ``key``: where the partition key comes from: ``record_key``, or a function of the client's message; it is called in
    the thread that owns the client. ``start``: where a group begins that has committed nothing: ``"beginning"``,
    ``"next"``, or an aware ``datetime``; decided on the first run only. ``out_of_range``: what becomes of a committed
    position that the log does not reach any more: ``"earliest"``, ``"latest"`` or ``"fail"``. Unset, both follow
    ``auto.offset.reset``, and without that are ``"beginning"`` and ``"fail"``. ``commit_metadata``: hand what is
    completed above a position to the next owner, in the metadata of the commit; without it a drain also runs what is
    queued below the highest that was started. ``rebuilds``: how often a client that has failed for good, such as one
    whose ``group.instance.id`` somebody else has, is made anew before the source gives up: after 1 s, 2 s, … 30 s each
    time; one that was well for 5 minutes has all of them again. ``client``: makes the consumer from the final
    dictionary, for a subclass of it.

    A thread of its own owns the client; ``stats_cb``, ``error_cb``, ``oauth_cb`` and the like are called there, and
    ``key`` too. Runs on asyncio and on trio. Raises ``ConfigError`` for what cannot be kept.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        topics: str | Sequence[str],
        key: KeyFunction = record_key,
        start: Start | None = None,
        out_of_range: OutOfRange | None = None,
        commit_metadata: bool = True,
        rebuilds: int = 0,
        client: Callable[[dict[str, Any]], Consumer] = Consumer,
    ) -> None:
        self._config = client_config(config, start=start, out_of_range=out_of_range)
        self._topics = _names(topics)
        if not callable(key):
            raise ConfigError(f"key={key!r}: pass a function of the client's message, or leave it out for the record's")
        if not callable(client):
            raise ConfigError(
                f"client={type(client).__name__}: pass a function that makes the consumer from a dictionary; a ready "
                "one cannot be asked for its settings"
            )
        if isinstance(client, type) and not issubclass(client, Consumer):
            raise ConfigError(
                f"client={client.__name__}: must be confluent_kafka.Consumer, a subclass of it, or a function that "
                "makes one; a share consumer has neither positions nor an order"
            )
        if not isinstance(rebuilds, int) or isinstance(rebuilds, bool) or rebuilds < 0:
            raise ConfigError(f"rebuilds={rebuilds!r}: must be a whole number, 0 or more")
        self._key = key
        self._make = client
        self._hands_over = commit_metadata
        self._rebuilds = rebuilds
        self._clock = monotonic
        self._name = f"kafka {self._config.group}/{','.join(self._topics)}"
        self._held = Held()
        self._owned: set[Partition] = set()
        self._committed: dict[Partition, int | None] = {}
        # Where nothing is completed above what is committed.
        self._complete: dict[Partition, int | None] = {}
        self._number = 0
        self._asked: Room | None = None
        self._failure: SourceError | None = None
        self._warned = False
        self._answers: set[Answer] = set()
        self._bridge: Bridge
        self._owner: Owner | None = None
        self._arrived = anyio.Event()
        self._ended = anyio.Event()

    def __repr__(self) -> str:
        return f"<KafkaSource {self._name}: {len(self._owned)} partitions>"

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """Make the client, check topics and permissions, and join the group; see ``lanes.source.Source.open``."""
        self._bridge = Bridge()
        self._owner = Owner(
            self._config,
            self._topics,
            self._make,
            self._key,
            self._bridge,
            self._told,
            self._failed,
            self._end,
            self._clock,
            self._name,
            hands_over=self._hands_over,
            rebuilds=self._rebuilds,
        )
        opened = Answer(self._bridge)
        self._owner.start(opened)
        await opened.wait()
        return SourceTraits(
            name=self._name,
            system="kafka",
            settles="cumulative",
            hands_over=self._hands_over and carries(self._owner.limit),
            revoke_limit=OF_POLL_INTERVAL * self._config.max_poll_interval,
            partitions=self._owner.partitions,
        )

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Wait for events; see ``lanes.source.Source.receive``.

        Raises ``SourceError`` when the client has failed for good, a position is out of range and that is to fail, or
        a topic was deleted or created anew.
        """
        while True:
            # From here to the return nothing suspends: a cancelled receive has taken nothing.
            events = self._held.take(room)
            if events:
                self._asked = None
                for event in events:
                    self._remember(event)
                return events
            if self._failure is not None:
                raise self._failure
            if self._asked != room or self._held.due() <= self._clock():
                self._ask(room)
            self._arrived = anyio.Event()
            with anyio.move_on_after(self._patience()):
                await self._arrived.wait()
            self._watch()

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Commit; see ``lanes.source.Source.settle``.

        Raises ``SourceError``, retryable for whatever may pass. A commit that is not answered within 10 s counts as not
        made.
        """
        if any(each.floor is None for each in settlements):
            raise ContractError(f"{self._name}: a settlement without a floor, where positions count: please report it")
        if settlements:
            answer = self._answer()
            await self._command(Commit(settlements, answer), answer)
            for each in settlements:
                if each.partition in self._owned:
                    self._note(each.partition, each.floor, complete=not each.completed)

    async def extend(self, messages: Sequence[Message]) -> None:
        """Nothing: Kafka has no timer for a message."""

    async def release(self, partition: Partition) -> None:
        """Give a drained partition back: to the broker when it asked for it, else it is left aside until ``aclose``."""
        complete = self._complete.get(partition)
        self._held.drop(partition)
        self._disown(partition)
        answer = self._answer()
        await self._command(Release(partition, answer, complete), answer)

    def lag(self, partition: Partition) -> int | None:
        """How many offsets what is committed lies behind the end of the partition; see ``lanes.source.Lagging.lag``."""
        end = None if self._owner is None else self._owner.ends.of(partition)
        committed = self._committed.get(partition)
        return None if end is None or committed is None else max(0, end - committed)

    async def aclose(self) -> None:
        """Leave the group, a static member excepted, and end the thread. Idempotent."""
        owner = self._owner
        if owner is None or not owner.thread.is_alive():
            return
        owner.send(Close())
        await self._ended.wait()
        # It has run its last line: this waits for the system alone.
        owner.thread.join()
        self._owner = None

    # --- from the thread, on the loop

    def _told(self, events: Sequence[SourceEvent], number: int) -> None:
        self._held.add(events, number)
        # What was read for an older request may be of no use now: then it is asked for again.
        self._asked = None
        self._arrived.set()

    def _failed(self, failure: SourceError) -> None:
        if self._failure is None:
            self._failure = failure
        self._arrived.set()

    def _end(self) -> None:
        self._ended.set()
        for answer in list(self._answers):
            answer.give(self._failure or SourceError(f"{self._name}: the client is closed: make a new source"))
        self._arrived.set()

    # --- inside

    def _remember(self, event: SourceEvent) -> None:
        if isinstance(event, Assigned):
            self._owned.add(event.partition)
            self._note(event.partition, event.partition.floor, complete=not event.partition.completed)
        elif isinstance(event, Lost):
            self._disown(event.partition)

    def _note(self, partition: Partition, floor: int | None, *, complete: bool) -> None:
        self._committed[partition] = floor
        self._complete[partition] = floor if complete else None

    def _disown(self, partition: Partition) -> None:
        self._owned.discard(partition)
        self._committed.pop(partition, None)
        self._complete.pop(partition, None)

    def _ask(self, room: Room) -> None:
        assert self._owner is not None, "open() comes first"
        self._asked = room
        self._number += 1
        held = self._held
        rewind = held.rewind(room, self._owned, self._number, self._clock())
        waiting = held.waiting(room.paused)
        self._owner.want(
            Want(
                self._number,
                room.messages,
                room.bytes,
                room.paused,
                rewind,
                resting=held.resting,
                held=waiting,
                aside=held.messages - waiting,
                received=held.received,
            )
        )

    def _answer(self) -> Answer:
        if self._ended.is_set() or self._owner is None:
            raise self._failure or SourceError(f"{self._name}: the client is closed: make a new source")
        return Answer(self._bridge)

    async def _command(self, command: Command, answer: Answer) -> None:
        assert self._owner is not None
        self._answers.add(answer)
        try:
            self._owner.send(command)
            await answer.wait()
        finally:
            self._answers.discard(answer)

    def _patience(self) -> float:
        """Seconds until the next look at whether the client is polled, and at what is held: not later than when the
        broker gives it up."""
        assert self._owner is not None
        now = self._clock()
        left = self._config.max_poll_interval - (now - self._owner.polled)
        return min(left if 0.0 < left < _LOOK else _LOOK, max(0.0, self._held.due() - now))

    def _watch(self) -> None:
        """Say when the client is not polled, before the broker says it; give up what it takes away then."""
        assert self._owner is not None
        limit = self._config.max_poll_interval
        age = self._clock() - self._owner.polled
        if age < OF_POLL_INTERVAL * limit:
            self._warned = False
        elif age < limit:
            if not self._warned:
                self._warned = True
                log.warning(
                    "%s: the client was not polled for %.1f s, max.poll.interval.ms is %g s: a callback of the "
                    "configuration, or the key function, does not return",
                    self._name,
                    age,
                    limit,
                )
        elif self._owned:
            log.error("%s: the client was not polled for %.1f s: its partitions are presumed lost", self._name, age)
            reason = "the client was not polled for max.poll.interval.ms"
            self._held.add([Lost(partition, reason) for partition in self._owned], self._number)
            self._owner.send(Expire())


def _names(topics: str | Sequence[str]) -> tuple[str, ...]:
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    if not names:
        raise ConfigError("topics=[]: name at least one topic")
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"topics={topics!r}: must be a name, or a list of names")
        if name.startswith("^"):
            raise ConfigError(
                f"topics={name!r}: patterns are not supported, because topics that appear later could not be checked "
                "at the start; name the topics"
            )
    if len(set(names)) != len(names):
        raise ConfigError(f"topics={topics!r}: a topic is there twice")
    return names
