"""A member of a Kafka consumer group as a source. The group commits one position for each partition."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import anyio
from confluent_kafka import Consumer

from lanes.clock import monotonic
from lanes.config import check_flag
from lanes.core.types import Message, Partition, Room, Settlement
from lanes.errors import ConfigError, ContractError, SourceError
from lanes.source import Assigned, Destination, Lost, SourceEvent, SourceTraits
from lanes_kafka.bridge import Answer, Bridge
from lanes_kafka.client.commits import Commit, can_carry
from lanes_kafka.client.group import OF_POLL_INTERVAL
from lanes_kafka.client.mailbox import Close, Demand, Expire, Release
from lanes_kafka.client.prefetch import Prefetched
from lanes_kafka.client.records import KeyFunction, record_key
from lanes_kafka.client.thread import ClientThread
from lanes_kafka.config import OutOfRange, Start, client_config

log = logging.getLogger("lanes.kafka")

_SYSTEM: Final = "kafka"

_WATCH_EVERY: Final = 1.0
"""Seconds between two checks that the client is polled."""


class KafkaSource:
    """Reads topics as a member of a Kafka consumer group.

    A separate thread owns the client. The thread calls ``key`` and the callbacks of ``config``, such as ``stats_cb``,
    ``error_cb`` and ``oauth_cb``. Runs on asyncio and on trio.

    Args:
        config: The dictionary of a ``confluent_kafka.Consumer``, which also names the group. ``lanes`` switches
            automatic commits off, sets ``auto.offset.reset`` to ``error``, and gives unset fetch settings other
            defaults. All other settings keep their values.
        topics: Names of the topics; patterns are not supported.
        key: A function from the client's message to its partition key. Default: the key of the record.
        start: Position at which a group without committed positions starts: ``"beginning"``, ``"next"`` or an aware
            ``datetime``. Only the first run of a group uses it. Default: as ``auto.offset.reset``, or ``"beginning"``.
        out_of_range: Position at which to continue when the log does not contain the committed position:
            ``"earliest"``, ``"latest"``, or ``"fail"`` to end the source. Default: as ``auto.offset.reset``, or
            ``"fail"``.
        commit_metadata: Whether the metadata of a commit lists the completed messages above the position, for the
            next owner. If False, a drain also runs the queued messages below the highest started message.
        rebuilds: Number of times that the source rebuilds a client after a permanent failure, 0 or more. A rebuild
            helps, for example, after another member took the same ``group.instance.id``. The pauses before rebuilds
            grow from 1 s to 30 s. After 5 minutes without a failure, the source may use all ``rebuilds`` again.
        client: A function that makes the consumer from the final dictionary, for example a subclass of ``Consumer``.

    Raises:
        ConfigError: A setting or an argument is invalid, or contradicts a guarantee of ``lanes``.
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
            raise ConfigError(f"key={key!r}: pass a function of the client's message, or leave it out")
        if not callable(client):
            raise ConfigError(
                f"client={type(client).__name__}: pass a function that makes the consumer from a dictionary, because a "
                "ready consumer does not show its settings"
            )
        if isinstance(client, type) and not issubclass(client, Consumer):
            raise ConfigError(
                f"client={client.__name__}: must be confluent_kafka.Consumer, a subclass of it, or a function that "
                "makes one; a share consumer has neither positions nor an order"
            )
        if not isinstance(rebuilds, int) or isinstance(rebuilds, bool) or rebuilds < 0:
            raise ConfigError(f"rebuilds={rebuilds!r}: must be a whole number, 0 or more")
        check_flag("commit_metadata", commit_metadata)
        self._key = key
        self._make = client
        self._hands_over = commit_metadata
        self._rebuilds = rebuilds
        self._clock = monotonic
        self._name = f"kafka {self._config.group}/{','.join(self._topics)}"
        self._prefetched = Prefetched()
        # The committed position of each partition, and whether no message above it is completed.
        self._owned: dict[Partition, tuple[int | None, bool]] = {}
        self._number = 0
        self._asked: Room | None = None
        self._failure: SourceError | None = None
        self._warned = False
        self._answers: set[Answer[None]] = set()
        self._client_thread: ClientThread | None = None
        self._arrived = anyio.Event()
        self._ended = anyio.Event()

    def __repr__(self) -> str:
        return f"<KafkaSource {self._name}: {len(self._owned)} partitions>"

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """Create the client, check topics and permissions, and join the group; see ``lanes.source.Source.open``.

        Returns:
            The properties of the source.

        Raises:
            ConfigError: A topic does not exist, or the client refuses its settings.
            SourceError: No broker answers (retryable), or the login or a permission is refused.
        """
        self._bridge = Bridge()
        self._client_thread = ClientThread(
            self._config,
            self._topics,
            self._make,
            self._key,
            self._bridge,
            self._deliver,
            self._on_failure,
            self._on_end,
            self._clock,
            self._name,
            hands_over=self._hands_over,
            rebuilds=self._rebuilds,
        )
        opened: Answer[None] = Answer(self._bridge)
        self._client_thread.start(opened)
        await opened.wait()
        return dataclasses.replace(
            self.declared(),
            hands_over=self._hands_over and can_carry(self._client_thread.limit),
            partitions=self._client_thread.partitions,
        )

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Wait for events; see ``lanes.source.Source.receive``. Cancel-safe.

        Args:
            room: Bounds of this call.

        Returns:
            Events in the order of each partition.

        Raises:
            SourceError: The client has failed for good, a topic was deleted or recreated, or a position is out of range
                with ``out_of_range="fail"``.
        """
        while True:
            # No await follows before the return, so a cancelled receive has removed no events.
            events = self._prefetched.take(room)
            if events:
                self._asked = None
                for event in events:
                    self._note_ownership(event)
                return events
            if self._failure is not None:
                raise self._failure
            if self._asked != room or self._prefetched.due() <= self._clock():
                self._ask(room)
            self._arrived = anyio.Event()
            with anyio.move_on_after(self._wait_time()):
                await self._arrived.wait()
            self._check_polling()

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Commit positions; see ``lanes.source.Source.settle``. A commit without an answer within 10 s has failed.

        Args:
            settlements: At most one for each partition.

        Raises:
            SourceError: The broker did not confirm the commit; retryable unless the cause is permanent.
            ContractError: A settlement has no floor.
        """
        if any(each.floor is None for each in settlements):
            raise ContractError(f"{self._name}: a settlement without a floor; please report it as a bug of lanes")
        if settlements:
            await self._command(Commit(settlements, self._answer()))
            for each in settlements:
                if each.partition in self._owned:
                    self._owned[each.partition] = each.floor, not each.completed

    async def extend(self, messages: Sequence[Message]) -> None:
        """Do nothing: Kafka has no timer for a message.

        Args:
            messages: The messages to keep alive.
        """

    async def release(self, partition: Partition) -> None:
        """Give a drained partition back.

        Unless the group revokes the partition, it stays assigned and unread until ``aclose``.

        Args:
            partition: The assignment to hand back.

        Raises:
            SourceError: The client is closed, or the last commit failed. This commit moves the position past a gap.
        """
        committed, complete = self._owned.pop(partition, (None, False))
        self._prefetched.drop(partition)
        await self._command(Release(partition, self._answer(), committed if complete else None))

    def declared(self) -> SourceTraits:
        """Return the traits that the configuration decides; see ``lanes.source.Declaring.declared``.

        Returns:
            The traits, without the number of partitions.
        """
        return SourceTraits(
            name=self._name,
            system=_SYSTEM,
            settles="cumulative",
            hands_over=self._hands_over,
            revoke_limit=OF_POLL_INTERVAL * self._config.max_poll_interval,
        )

    def lag(self, partition: Partition) -> int | None:
        """Distance in offsets from the committed position to the end of the log; see ``lanes.source.Lagging.lag``.

        Args:
            partition: An assignment.

        Returns:
            The distance, 0 or more; None while it is unknown.
        """
        end = None if self._client_thread is None else self._client_thread.end_offsets.of(partition)
        committed, _ = self._owned.get(partition, (None, False))
        return None if end is None or committed is None else max(0, end - committed)

    def reads(self, destination: Destination) -> bool:
        """Whether ``topics`` has the topic; see ``lanes.source.Reading.reads``.

        Args:
            destination: The topic of the dead letters.

        Returns:
            True for a topic of this name, also of another cluster, because a dead letter names no cluster.
        """
        return destination.system == _SYSTEM and destination.name in self._topics

    async def aclose(self) -> None:
        """Close the client and end its thread. A dynamic member leaves the group; a static member stays. Idempotent."""
        client_thread = self._client_thread
        if client_thread is None or not client_thread.thread.is_alive():
            return
        client_thread.send(Close())
        await self._ended.wait()
        # The thread has run its last line, so the join does not block for long.
        client_thread.thread.join()
        self._client_thread = None

    # --- called on the loop by the thread

    def _deliver(self, events: Sequence[SourceEvent], number: int) -> None:
        self._prefetched.add(events, number)
        # Events that were read for an older demand may not fit into the newest one: let receive send its demand again.
        self._asked = None
        self._arrived.set()

    def _on_failure(self, failure: SourceError) -> None:
        self._failure = self._failure or failure
        self._arrived.set()

    def _on_end(self) -> None:
        self._ended.set()
        for answer in list(self._answers):
            answer.fail(self._failure or SourceError(f"{self._name}: the client is closed; make a new source"))
        self._arrived.set()

    # --- inside

    def _note_ownership(self, event: SourceEvent) -> None:
        if isinstance(event, Assigned):
            self._owned[event.partition] = event.partition.floor, not event.partition.completed
        elif isinstance(event, Lost):
            self._owned.pop(event.partition, None)

    def _ask(self, room: Room) -> None:
        assert self._client_thread is not None, "open() comes first"
        self._asked = room
        self._number += 1
        prefetched = self._prefetched
        rewind = prefetched.rewind(room, self._owned.keys(), self._number, self._clock())
        waiting = prefetched.waiting(room.paused)
        self._client_thread.demand(
            Demand(
                self._number,
                room.messages,
                room.bytes,
                room.paused,
                rewind,
                client_paused=prefetched.client_paused,
                waiting=waiting,
                waiting_paused=prefetched.messages - waiting,
                received=prefetched.received,
            )
        )

    def _answer(self) -> Answer[None]:
        if self._ended.is_set() or self._client_thread is None:
            raise self._failure or SourceError(f"{self._name}: the client is closed; make a new source")
        return Answer(self._bridge)

    async def _command(self, command: Commit | Release) -> None:
        assert self._client_thread is not None
        self._answers.add(command.answer)
        try:
            self._client_thread.send(command)
            await command.answer.wait()
        finally:
            self._answers.discard(command.answer)

    def _wait_time(self) -> float:
        """Seconds to the next check of polls and prefetched messages, which is at the poll deadline at the latest."""
        assert self._client_thread is not None
        now = self._clock()
        left = self._config.max_poll_interval - (now - self._client_thread.polled)
        return min(left if 0.0 < left < _WATCH_EVERY else _WATCH_EVERY, max(0.0, self._prefetched.due() - now))

    def _check_polling(self) -> None:
        """Warn when the client is not polled, and presume its partitions lost after the poll deadline."""
        assert self._client_thread is not None
        limit = self._config.max_poll_interval
        age = self._clock() - self._client_thread.polled
        if age < OF_POLL_INTERVAL * limit:
            self._warned = False
        elif age < limit:
            if not self._warned:
                self._warned = True
                log.warning(
                    "%s: the client was not polled for %.1f s, and max.poll.interval.ms is %g s; make the callbacks of "
                    "the configuration and the key function return sooner",
                    self._name,
                    age,
                    limit,
                )
        elif self._owned:
            log.error(
                "%s: the client was not polled for %.1f s, so its partitions are presumed lost; make the callbacks of "
                "the "
                "configuration and the key function return sooner",
                self._name,
                age,
            )
            reason = "the client was not polled for max.poll.interval.ms"
            self._prefetched.add([Lost(partition, reason) for partition in self._owned], self._number)
            self._client_thread.send(Expire())


def _names(topics: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(topics, Mapping) or not isinstance(topics, Iterable):
        raise ConfigError(f"topics={topics!r}: must be a name, or a list of names")
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
        raise ConfigError(f"topics={topics!r}: a topic is named twice; name each topic once")
    return names
