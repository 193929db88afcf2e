"""The source that reads as a member of a Kafka consumer group. The group stores one position for each partition."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, get_args

import anyio
from confluent_kafka import Consumer

from lanes.arguments import check_flag, check_whole, kind_of, names_unknown_options, shown_value
from lanes.clock import monotonic
from lanes.core.types import Message, Partition, Room, Settlement
from lanes.errors import ConfigError, ContractError, SourceError
from lanes.handlers import check_plain_function
from lanes.loops import Doorbell
from lanes.outputs.publisher import Publisher, Transacted
from lanes.queues.partitioned import PartitionedQueue
from lanes.queues.stranded import Stranded, stranded_text
from lanes.source import Assigned, Backlog, Destination, Lost, Outage, Retention, SourceEvent, SourceTraits
from lanes_kafka.bridge import Answer, Bridge
from lanes_kafka.client.commits import Commit, can_carry
from lanes_kafka.client.group import OF_POLL_INTERVAL
from lanes_kafka.client.group_snapshot import GroupSnapshot
from lanes_kafka.client.growth import OnGrowth
from lanes_kafka.client.mailbox import Close, Confirm, Demand, Expire, Release
from lanes_kafka.client.prefetch import Prefetched
from lanes_kafka.client.records import KeyFunction, record_key
from lanes_kafka.client.thread import ClientThread
from lanes_kafka.config import OutOfRange, Start, client_config
from lanes_kafka.keywords import of_the_source
from lanes_kafka.publisher import KafkaPublisher
from lanes_kafka.topic_names import read_topics
from lanes_kafka.transactions.publisher import TransactionalPublisher
from lanes_kafka.transactions.requests import Counts
from lanes_kafka.transactions.settings import KafkaTransactions, check_source, transactional_settings

log = logging.getLogger("lanes.kafka")

_SYSTEM: Final = "kafka"

_WATCH_EVERY: Final = 1.0
"""Seconds between two checks of the thread's last poll."""


@names_unknown_options(
    "KafkaSource",
    homes=of_the_source("KafkaSource", "topics=…"),
)
class KafkaSource:
    """Reads topics as a member of a Kafka consumer group.

    A separate thread owns the client. The thread calls ``key`` and the callbacks of ``config``, such as ``stats_cb``,
    ``error_cb`` and ``oauth_cb``. The object runs on asyncio and on trio.

    Args:
        config: The dictionary of a ``confluent_kafka.Consumer``, which also names the group. ``lanes`` switches
            automatic commits off, sets ``auto.offset.reset`` to ``error``, and changes the defaults of unset fetch
            settings. All other settings keep their values.
        topics: Names of topics, or partitioned queues, in which each partition is a topic. The source accepts no
            patterns.
        key: A function from the client's message to its partition key. Default: the key of the record.
        start: Position at which a group starts in a topic for which the group has committed no position:
            ``"beginning"``, ``"next"`` or an aware ``datetime``. Default: as ``auto.offset.reset``, or ``"beginning"``.
        out_of_range: Position at which to continue when the log does not contain the committed position:
            ``"earliest"``, ``"latest"``, or ``"fail"`` to end the source. Default: as ``auto.offset.reset``, or
            ``"fail"``.
        commit_metadata: Whether the metadata of a commit lists, for the next owner, the completed messages above the
            position. If False, a drain also runs the queued messages below the highest started message.
        rebuilds: Number of times that the source rebuilds a client after a permanent failure, 0 or more. A rebuild
            helps, for example, when another member has taken the same ``group.instance.id``. The pauses before rebuilds
            grow from 1 s to 30 s. After 5 minutes without a failure, the source may use all ``rebuilds`` again.
        consumer_target: Largest number of partitions that this process prefers to own, 1 or more; None = no target. The
            broker ignores targets when it assigns partitions. ``Status.target_honoured`` is therefore False. An
            autoscaler reads in ``Status.under_provisioned`` whether this process exceeds its target.
        on_growth: Reaction to a growing number of partitions of a topic during the run. Keys then move to other
            partitions and may lose their order. ``"alarm"`` logs a warning. ``"stop"`` ends the source with an error,
            and the consumer drains.
        transactions: Transactions that commit the outputs of handlers together with the positions. Requires
            ``publisher=KafkaPublisher(…)`` of the same cluster in the consumer. None = no transactions.
        client: A function that makes the consumer from the final dictionary, for example a subclass of ``Consumer``.

    Raises:
        ConfigError: A setting or an argument is invalid, or contradicts a guarantee of ``lanes``.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        topics: str | PartitionedQueue | Sequence[str | PartitionedQueue],
        key: KeyFunction = record_key,
        start: Start | None = None,
        out_of_range: OutOfRange | None = None,
        commit_metadata: bool = True,
        rebuilds: int = 0,
        consumer_target: int | None = None,
        on_growth: OnGrowth = "alarm",
        transactions: KafkaTransactions | None = None,
        client: Callable[[dict[str, Any]], Consumer] = Consumer,
    ) -> None:
        self._config = client_config(config, start=start, out_of_range=out_of_range)
        self._topics, self._queues, shown = read_topics(topics)
        if not callable(key):
            raise ConfigError(f"key={shown_value(key)}: pass a function of the client's message, or leave it out")
        check_plain_function("key", key, "the client's message")
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
        check_whole("rebuilds", rebuilds, 0)
        check_flag("commit_metadata", commit_metadata)
        if consumer_target is not None:
            check_whole("consumer_target", consumer_target, 1)
        if on_growth not in get_args(OnGrowth):
            raise ConfigError(f'on_growth={shown_value(on_growth)}: must be "stop" or "alarm"')
        self._on_growth: OnGrowth = on_growth
        if transactions is not None:
            if not isinstance(transactions, KafkaTransactions):
                raise ConfigError(
                    f"transactions is {kind_of(transactions)}: pass KafkaTransactions(…), or leave it out"
                )
            check_source(self._config, config, commit_metadata=commit_metadata)
            self._transactional_id = transactions.transactional_id(self._config)
        self._transactions = transactions
        self._transactional: TransactionalPublisher | None = None
        self._key = key
        self._make = client
        self._hands_over = commit_metadata
        self._rebuilds = rebuilds
        self._consumer_target = consumer_target
        self._clock = monotonic
        # The name is a label of each metric. It is therefore short and does not depend on the assigned partitions.
        self._name = f"kafka {self._config.group}/{shown}"
        self._prefetched = Prefetched()
        # The committed position of each partition, and whether no message above it is completed.
        self._owned: dict[Partition, tuple[int | None, bool]] = {}
        self._number = 0
        self._asked: Room | None = None
        # Number of assignments that the last demand knew.
        self._assigned = 0
        self._failure: SourceError | None = None
        self._warned = False
        self._answers: set[Answer[Any]] = set()
        self._client_thread: ClientThread | None = None
        self._arrived = Doorbell()
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
            SourceError: No broker answers (retryable), or the broker refuses the login or the operation.
        """
        self._warn_about_range()
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
            queues=self._queues,
            on_growth=self._on_growth,
            transacts=self._transactions is not None,
        )
        opened: Answer[None] = Answer(self._bridge)
        self._client_thread.start(opened)
        await opened.wait()
        if self._transactional is not None:
            self._transactional.opened(self._client_thread.limit)
        return dataclasses.replace(
            self.declared(),
            hands_over=self._hands_over and can_carry(self._client_thread.limit),
            partitions=self._client_thread.partitions,
        )

    def _warn_about_range(self) -> None:
        """Log a warning if the group would give partition 0 of every topic of a queue to one member."""
        assignor = str(self._config.client.get("partition.assignment.strategy", "range")).partition(",")[0].strip()
        if self._config.protocol != "eager" or assignor != "range":
            return
        for queue in self._queues:
            if queue.partitions > 1:
                log.warning(
                    "%s: partition.assignment.strategy=range gives partition 0 of all %d topics of queue %r to one "
                    "member, so other processes may read nothing; set "
                    "partition.assignment.strategy=cooperative-sticky",
                    self._name,
                    queue.partitions,
                    queue.name,
                )

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Wait for events; see ``lanes.source.Source.receive``. Cancel-safe.

        Args:
            room: Maximum number and size of the messages of this call, and the paused partitions.

        Returns:
            Events in the order of each partition.

        Raises:
            SourceError: The client has failed permanently, a topic was deleted or recreated, or a position is out of
                range with ``out_of_range="fail"``.
        """
        while True:
            # No await follows before the return, so a cancelled receive has removed no events.
            events = self._prefetched.take(room)
            if not events and self._failure is None and self._needs_demand(room):
                self._ask(room)
                # The thread may have used up the new credit already, so wait for no messages of other partitions.
                events = self._prefetched.take(room)
            if events:
                for event in events:
                    self._note_ownership(event)
                return events
            if self._failure is not None:
                raise self._failure
            await self._arrived.wait(self._wait_time())
            self._check_polling()

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Commit positions; see ``lanes.source.Source.settle``.

        A commit fails after 10 s without an answer, or after 5 s during a revocation.

        Args:
            settlements: Positions to commit, at most one for each partition.

        Raises:
            SourceError: The broker did not confirm the commit; retryable unless the cause is permanent.
            ContractError: A settlement has no floor.
        """
        if any(each.floor is None for each in settlements):
            raise ContractError(f"{self._name}: a settlement without a floor; please report it as a bug of lanes")
        if settlements:
            if self._transactional is None:
                await self._commit(settlements)
            else:
                await self._transactional.settle(settlements)
            for each in settlements:
                if each.partition in self._owned:
                    self._owned[each.partition] = each.floor, not each.completed

    async def _commit(self, settlements: Sequence[Settlement], *, prepares: bool = False) -> None:
        await self._command(Commit(settlements, self._answer(), prepares=prepares))

    async def _prepare(self, settlements: Sequence[Settlement]) -> None:
        await self._commit(settlements, prepares=True)

    async def extend(self, messages: Sequence[Message]) -> None:
        """Do nothing, because a Kafka broker does not limit the time of a message.

        Args:
            messages: The messages to keep alive.
        """

    async def release(self, partition: Partition) -> None:
        """Release a drained partition.

        If the group does not revoke the partition, it stays assigned until ``aclose``, and the client does not read it.

        Args:
            partition: The assignment to release.

        Raises:
            SourceError: The client is closed, or the last commit, which moves the position past a gap, has failed.
        """
        committed, complete = self._owned.pop(partition, (None, False))
        self._prefetched.drop(partition)
        if self._transactional is not None:
            self._transactional.gone(partition)
        await self._command(Release(partition, self._answer(), committed if complete else None))

    def freeze_limit(self) -> float:
        """Return the session minus the heartbeat interval minus 1 s; see ``lanes.source.Confirming.freeze_limit``.

        Returns:
            The seconds. The result is infinity before ``open``.
        """
        return math.inf if self._client_thread is None else self._client_thread.session.freeze_limit

    async def confirm(self, partitions: Sequence[Partition]) -> Sequence[Partition]:
        """Ask the broker for the members of the group; see ``lanes.source.Confirming.confirm``.

        Args:
            partitions: Assignments.

        Returns:
            The owned partitions of ``partitions``, if the group still lists this member.

        Raises:
            SourceError: The client is closed.
        """
        self._check_open()
        answer: Answer[Sequence[Partition]] = Answer(self._bridge)
        await self._command(Confirm(partitions, answer))
        return await answer.wait()

    def transacted(self, publisher: Publisher | None) -> Transacted | None:
        """Return the transactions of the source; see ``lanes.outputs.publisher.Transacting.transacted``.

        Args:
            publisher: A ``KafkaPublisher``, whose dictionary is the configuration of the producer.

        Returns:
            The transactions; None without ``transactions=…``.

        Raises:
            ConfigError: The publisher is missing, or is no ``KafkaPublisher``.
        """
        if self._transactions is None:
            return None
        if not isinstance(publisher, KafkaPublisher):
            passed = "no publisher" if publisher is None else type(publisher).__name__
            raise ConfigError(
                f"{self._name}: transactions=… with {passed}: a transaction writes only to the cluster of the source; "
                "pass publisher=KafkaPublisher(config) to the consumer, or leave transactions out"
            )
        self._transactional = TransactionalPublisher(
            transactional_settings(publisher.config, self._transactional_id),
            self._config.admin,
            self._config.group,
            self._name,
            lambda: GroupSnapshot(None, frozenset()) if self._client_thread is None else self._client_thread.snapshot(),
            self._prepare,
        )
        return Transacted(self._transactional, self._transactions.every, self._transactions.messages)

    @property
    def transaction_counts(self) -> Counts:
        """The number of transactions of this process, by outcome; all 0 without ``transactions=…``."""
        return Counts() if self._transactional is None else self._transactional.counts

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
            revoke_limit_from=f"max.poll.interval.ms, of which {OF_POLL_INTERVAL:g} may pass",
            consumer_target=self._consumer_target,
            queues=self._queues,
        )

    def lag(self, partition: Partition) -> int | None:
        """Return the offsets from the committed position to the log's end; see ``lanes.source.Lagging.lag``.

        Args:
            partition: An assignment.

        Returns:
            The lag in offsets, 0 or more; None = unknown.
        """
        end = None if self._client_thread is None else self._client_thread.end_offsets.of(partition)
        committed, _ = self._owned.get(partition, (None, False))
        return None if end is None or committed is None else max(0, end - committed)

    def backlog(self, partition: Partition) -> Backlog:
        """Return the offsets from the next message to the log's end; see ``lanes.source.Backlogged.backlog``.

        Args:
            partition: An assignment.

        Returns:
            The distance, and the last error of the client.
        """
        thread = self._client_thread
        if thread is None:
            return Backlog(None)
        return Backlog(thread.end_offsets.unread(partition), *(thread.last_error() or ("",)))

    def outage(self) -> Outage | None:
        """Return the time since a broker answered; see ``lanes.source.Connected.outage``.

        The client asks for the ids of the topics every second. A broker that closes an idle connection causes no
        outage.

        Returns:
            The outage, with the last error of the client; None while a broker answers.
        """
        return None if self._client_thread is None else self._client_thread.outage()

    def rejoining(self) -> bool:
        """Whether the source waits for its group; see ``lanes.source.Rejoining.rejoining``.

        Returns:
            True = the group has not answered since this member joined, or since an outage cost the member its
            partitions.
        """
        return self._client_thread is not None and self._client_thread.rejoining()

    def retention(self, message: Message) -> Retention | None:
        """Return the time until the broker may delete a message; see ``lanes.source.Retaining.retention``.

        Args:
            message: An unfinished message.

        Returns:
            The earliest time by ``retention.ms`` and ``retention.bytes``. If this user may not read these settings, the
            source estimates the time from the observed deletions.
        """
        return None if self._client_thread is None else self._client_thread.retention.of(message)

    def stranded(self) -> Sequence[Stranded]:
        """Return the topics whose messages no member of the group reads; see ``lanes.source.Stranding.stranded``.

        Every 5 s the client checks topics with names of the queue, up to twice the number of partitions. The client
        also checks topics of a former, larger number in which the group has committed positions.

        Returns:
            The topics.
        """
        thread = self._client_thread
        return () if thread is None else thread.queue_watch.found

    def findings(self) -> Sequence[str]:
        """Return texts about stranded messages and new partitions; see ``lanes.source.Reporting.findings``.

        Returns:
            A text for each queue with stranded messages, and for each topic with new partitions.
        """
        if self._client_thread is None:
            return ()
        found = self.stranded()
        by_queue = [[each for each in found if each.queue == queue.name] for queue in self._queues]
        texts = [stranded_text(each, f"group {self._config.group!r}") for each in by_queue if each]
        return [*texts, *self._client_thread.growth.grown.values()]

    def reads(self, destination: Destination) -> bool:
        """Return whether ``topics`` includes the topic; see ``lanes.source.Reading.reads``.

        Args:
            destination: The topic of the dead letters.

        Returns:
            True for a topic of this name, even in another cluster, because a destination names no cluster.
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

    def _deliver(self, events: Sequence[SourceEvent], number: int, filling: bool = False) -> None:
        self._prefetched.add(events, number, filling=filling)
        self._arrived.ring()

    def _on_failure(self, failure: SourceError) -> None:
        self._failure = self._failure or failure
        self._arrived.ring()

    def _on_end(self) -> None:
        self._ended.set()
        for answer in list(self._answers):
            answer.fail(self._failure or SourceError(f"{self._name}: the client is closed; make a new source"))
        self._arrived.ring()

    # --- inside

    def _note_ownership(self, event: SourceEvent) -> None:
        if isinstance(event, Assigned):
            self._owned[event.partition] = event.partition.floor, not event.partition.completed
            if self._transactional is not None:
                self._transactional.assigned(event.partition)
        elif isinstance(event, Lost):
            self._owned.pop(event.partition, None)
            if self._transactional is not None:
                self._transactional.gone(event.partition)

    def _needs_demand(self, room: Room) -> bool:
        """Return whether the thread needs a new demand.

        The thread needs no new demand until it has used half of its credit.
        """
        prefetched, asked = self._prefetched, self._asked
        if asked is None or asked.paused != room.paused or self._assigned != prefetched.assigned:
            return True
        if (asked.messages > 0) != (room.messages > 0) or prefetched.due() <= self._clock():
            return True
        return prefetched.needs_credit(prefetched.credit(room, self._owned.keys()))

    def _ask(self, room: Room) -> None:
        assert self._client_thread is not None, "open() comes first"
        prefetched = self._prefetched
        self._asked, self._assigned = room, prefetched.assigned
        self._number += 1
        rewind = prefetched.rewind(room, self._owned.keys(), self._number, self._clock())
        # The dropped messages make room for others.
        prefetched.granted = prefetched.credit(room, self._owned.keys())
        self._client_thread.demand(
            Demand(
                self._number,
                room.messages,
                prefetched.granted,
                prefetched.assigned,
                room.paused,
                rewind,
                prefetched.client_paused,
            )
        )

    def _check_open(self) -> None:
        if self._ended.is_set() or self._client_thread is None:
            raise self._failure or SourceError(f"{self._name}: the client is closed; make a new source")

    def _answer(self) -> Answer[None]:
        self._check_open()
        return Answer(self._bridge)

    async def _command(self, command: Commit | Release | Confirm) -> None:
        assert self._client_thread is not None
        self._answers.add(command.answer)
        try:
            self._client_thread.send(command)
            await command.answer.wait()
        finally:
            self._answers.discard(command.answer)

    def _wait_time(self) -> float:
        """Return the seconds to the next check of polls and prefetched messages, at most until the poll deadline."""
        assert self._client_thread is not None
        now = self._clock()
        left = self._config.max_poll_interval - (now - self._client_thread.polled)
        return min(left if 0.0 < left < _WATCH_EVERY else _WATCH_EVERY, max(0.0, self._prefetched.due() - now))

    def _check_polling(self) -> None:
        """Warn when the thread does not poll the client, and treat the partitions as lost after the poll deadline."""
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
