"""A Kafka broker as data, with one topic, one group and its clients. The broker behaves like a measured real broker.

- **Commits.** The broker checks only the membership of the client and the size of the metadata. The member need not own
  the partition, and the position may fall or be above the end of the log. Metadata is a ``str`` of at most 4,095
  UTF-16 units (the default) plus the client's NUL. A commit with larger metadata fails, and the former commit stays. If
  one partition of a request fails, the broker commits the other partitions, and the whole request reports the error.
- **Late notice of a loss.** A crashed or frozen process sends no heartbeats. At the end of its session, its partitions
  go to other members, and the process learns of the loss at its next poll. After ``max_poll_interval`` without a poll,
  a classic client leaves the group at once. A client of protocol 848 then keeps its partitions for another session
  timeout, and its commits succeed.
- **Close.** Heartbeats stop when a close begins, although the drain of the last callback still runs.
- **Pauses.** A pause outlives the ownership: a partition that is paused, revoked and assigned again is still paused.
- **Prefetch.** A client delivers prefetched messages even while the broker is down, or after their deletion at the
  broker.
- **Recreation.** If a topic is deleted and created again within a metadata refresh, a classic client continues at the
  old offset. Protocol 848 revokes the partitions, assigns them again, and accepts a commit of the old position for the
  new topic.
- **Transactions.** A client reads only committed messages. While a transaction is open in a partition, no client reads
  beyond the beginning of the transaction. The rule includes messages of other producers.
- **Retention by size.** The broker deletes the oldest messages of a partition, finished or not. A real broker checks
  the size every few minutes, and deletes whole segments. The simulated broker deletes at once, message by message.
- **Commits without a broker.** A synchronous commit blocks (protocol 848), or fails after ``commit_timeout`` (classic
  protocol).

The simulation releases each partition after its drain. A real client releases all partitions of a callback together.

No method blocks. A method receives the present time as an argument, reads the clock of a client, or needs no time.
``advance`` acts on due timers. Times are in seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Final

from lanes.core.offset_map import decode
from lanes.core.types import NEVER, Partition, PartitionId, PartitionKey
from memsource.kafka.client import Callback, Client, ClientPartition, Commit, KafkaFailure
from memsource.kafka.coordinator import Coordinator, KafkaSettings
from memsource.kafka.log_sizes import LogSizes
from memsource.memory.broker import KeepsDeadLetters
from memsource.memory.group import Assignor, Group, plan
from memsource.memory.topic import Record
from memsource.memory.watchers import Watched
from memsource.personality import PersonalityName

__all__ = ["Commit", "KafkaBroker", "KafkaSettings"]

_ALL: Final = 1 << 62


class KafkaBroker(Watched, KeepsDeadLetters):
    """A Kafka broker with one topic and one group. ``KafkaPersonality`` adds the sources of the members.

    Not thread-safe. Methods raise ``IndexError`` for an unknown partition, and ``LookupError`` for a member without a
    source.

    Args:
        partitions: Number of partitions, 1 or more. Partition numbers begin at 0.
        topic: Name of the topic.
        settings: Settings of the broker and its clients; None = the defaults of ``KafkaSettings``.
        hands_over: Whether sources also commit the positions completed above the floor.
        assignor: Chooses the owners of the partitions; a pure function.

    Attributes:
        topic: Name of the topic.
        settings: Settings of the broker and its clients.
        hangs: Whether the broker accepts fetches and never answers them; see ``hang``.
        hands_over: Whether sources also commit the positions completed above the floor.
        coordinator: The coordinator of the group.
        transactions: The position at which the open transaction of a partition has begun, by partition.
    """

    name: PersonalityName = "kafka"
    takes_in_at_once = False

    def __init__(
        self,
        partitions: int = 1,
        *,
        topic: str = "memory",
        settings: KafkaSettings | None = None,
        hands_over: bool = True,
        assignor: Assignor = plan,
    ) -> None:
        super().__init__()
        self.topic = topic
        self.settings = settings or KafkaSettings()
        self.hands_over = hands_over
        self.hangs = False
        self.coordinator = Coordinator(partitions, topic, self.settings, assignor)
        self._commits: dict[int, Commit] = {}
        self._starts = [0] * partitions
        self._sizes = [LogSizes() for _ in range(partitions)]
        self.transactions: dict[int, int] = {}
        self._incarnation = 1
        self._clients: dict[str, Client] = {}
        self._waits: list[float] = []
        self.group.watch(self._changed)

    def __repr__(self) -> str:
        return (
            f"<KafkaBroker {self.topic}: {len(self.partitions)} partitions, {self.settings.protocol}, "
            f"{len(self.group.members)} members>"
        )

    # --- memsource.personality.Personality

    def publish(
        self,
        value: bytes | str = b"",
        *,
        key: PartitionKey | None = None,
        headers: Iterable[tuple[str, bytes]] = (),
        partition: int | None = None,
    ) -> Record:
        """Append one message and return its record; see ``Topic.publish``.

        Raises ``LookupError`` for a deleted topic.
        """
        if not self.coordinator.exists:
            raise LookupError(f"topic {self.topic} was deleted; call create_topic first")
        record = self.group.publish(value, key=key, headers=headers, partition=partition)
        self._written(record.partition, record.size)
        return record

    def skip(self, count: int, *, partition: int = 0, size: int = 0) -> None:
        """Leave a gap of ``count`` positions, as transaction markers, aborted transactions and compaction do.

        The positions have ``size`` bytes together. Raises ``ValueError`` for a negative number.
        """
        if size < 0:
            raise ValueError(f"size={size}: must be 0 or more bytes")
        self.group.skip(count, partition=partition)
        self._written(partition, size)

    @property
    def partitions(self) -> range:
        """The numbers of the partitions."""
        return self.group.topic.partitions

    @property
    def records(self) -> list[Record]:
        """All messages of the topic, by partition and position."""
        return [record for log in self.group.topic.logs for record in log.records.values()]

    @property
    def taken(self) -> list[tuple[str, Partition]]:
        """The assignments that the broker took from members; see ``memsource.personality.Personality.taken``."""
        return list(self.coordinator.taken)

    @property
    def unfinished(self) -> list[Record]:
        """The uncompleted messages from the committed position on."""
        found: list[Record] = []
        for partition, log in enumerate(self.group.topic.logs):
            offset, completed = self.group.committed(partition)
            above = log.positions[bisect_left(log.positions, offset) :]
            found += [log.records[at] for at in above if not any(start <= at < end for start, end in completed)]
        return found

    def crash(self, member: str, now: float) -> None:
        """End the newest process of this member. The member's session ends after ``session_timeout``. Idempotent."""
        self._at(now)
        self.coordinator.crash(self._client(member))
        self._changed()

    def freeze(self, member: str, until: float) -> None:
        """Suspend the newest process of this member, with its calls and heartbeats, until a time of its clock."""
        client = self._client(member)
        self._at(client.clock())
        self.coordinator.freeze(client, until)

    def isolate(self, member: str, until: float, now: float) -> None:
        """Drop all requests of the newest process of this member until a time. The process keeps running."""
        self._at(now)
        self.coordinator.isolate(self._client(member), until)
        self._changed()

    def rebalance(self, now: float) -> bool:
        """Make a new plan, as after the join and leave of a member. Return whether the broker revokes a partition."""
        self._at(now)
        return self.coordinator.rebalance()

    def lose(self, partition: int, now: float) -> bool:
        """Take a partition from its owner; return False for a partition without an owner.

        The owner continues until its next heartbeat. Without another member, the broker assigns the partition again
        within a session timeout.
        """
        self._at(now)
        return self.coordinator.lose(partition)

    def redeliver(self, partition: int, now: float) -> bool:
        """Return False, because Kafka redelivers messages only to a new owner."""
        self._at(now)
        return False

    def restart(self, now: float) -> bool:
        """Return False, because a Kafka cluster stores confirmed writes on several servers."""
        self._at(now)
        return False

    def advance(self, now: float) -> None:
        """Act on every due timer, in the order of their times."""
        acted = False
        while True:
            at, act = min(self.coordinator.timers(), key=lambda timer: timer[0])
            if at > now:
                break
            self._at(at)
            act()
            acted = True
        self._at(now)
        if acted or any(at <= now for at in self._waits):
            self._waits = [at for at in self._waits if at > now]
            self._changed()

    def next_at(self) -> float:
        """The time of the next timer; infinity without a timer."""
        return min(min(at for at, _ in self.coordinator.timers()), min(self._waits, default=NEVER))

    # --- further faults of a broker

    def stop_broker(self, now: float) -> None:
        """Stop all fetches, commits and rebalances. Clients still deliver prefetched messages. Idempotent."""
        self._at(now)
        self.coordinator.stop()
        self._changed()

    def start_broker(self, now: float) -> None:
        """Start the broker. The call restarts all session timeouts. Idempotent."""
        self._at(now)
        self.coordinator.start()
        self._changed()

    def hang(self, now: float, *, on: bool) -> None:
        """Accept fetches without an answer, or answer them again. Commits, rebalances and prefetched messages continue.

        Idempotent.
        """
        self._at(now)
        self.hangs = on
        self._changed()

    def delete_records(self, partition: int, before: int, now: float) -> None:
        """Delete the records below ``before`` (0 … the end of the log), as retention does. Idempotent."""
        self._at(now)
        log = self.group.topic.log(partition)
        if not 0 <= before <= log.end:
            raise ValueError(f"before={before}: must be 0 … {log.end}, the end of partition {partition}")
        self._delete(partition, before)

    def open_transaction(self, partition: int, now: float) -> None:
        """Begin a transaction at the end of a partition. Idempotent.

        Clients read the messages from this end on only after ``end_transaction``.
        """
        self._at(now)
        self.transactions.setdefault(partition, self.group.topic.log(partition).end)

    def end_transaction(self, partition: int, now: float) -> None:
        """Commit the open transaction of a partition. Idempotent. ``skip`` leaves the gap of its marker."""
        self._at(now)
        if self.transactions.pop(partition, None) is not None:
            self._delete_by_size(partition)
            self._changed()

    def delete_topic(self, now: float) -> None:
        """Delete the topic with its messages and commits. Raises ``LookupError`` without a topic."""
        if not self.coordinator.exists:
            raise LookupError(f"topic {self.topic} was deleted already; call create_topic first")
        self._at(now)
        self._incarnation += 1
        self._commits.clear()
        self._starts = [0] * len(self.partitions)
        self._sizes = [LogSizes() for _ in self.partitions]
        self.transactions.clear()
        self.coordinator.delete_topic()

    def create_topic(self, now: float) -> None:
        """Create the deleted topic again, without messages. Idempotent."""
        self._at(now)
        if not self.coordinator.exists:
            self.coordinator.create_topic()

    # --- for tests and checkers

    @property
    def group(self) -> Group:
        """The group as the coordinator sees it, with the coordinator's own names of the members."""
        return self.coordinator.group

    def owner(self, partition: int) -> str | None:
        """The name of the owner of a partition, as the coordinator sees it; None = free."""
        owner = self.group.owner(partition)
        return next((client.name for client in self.coordinator.clients if client.id == owner), None)

    def committed(self, partition: int) -> Commit | None:
        """The last commit of a partition; None before the first commit."""
        self.group.topic.log(partition)
        return self._commits.get(partition)

    def log_start(self, partition: int) -> int:
        """The first existing position of a partition."""
        return self._starts[partition]

    # --- for clients

    def place(self, number: int) -> PartitionId:
        """Return the id of the partition with this number."""
        return PartitionId(self.topic, number)

    def stable_end(self, partition: int) -> int:
        """The end of the messages that clients read: the beginning of an open transaction, or the end of the log."""
        return self.transactions.get(partition, self.group.topic.log(partition).end)

    def written_bytes(self, partition: int) -> int:
        """Number of all bytes written to a partition; 0 without ``retention_bytes``."""
        return self._sizes[partition].total

    def newer_bytes(self, partition: int, position: int) -> int:
        """Number of bytes above an existing position."""
        return self._sizes[partition].above(position)

    @property
    def up(self) -> bool:
        """Whether the broker runs."""
        return self.coordinator.up

    @property
    def topic_id(self) -> str | None:
        """The id of the topic; None while the topic does not exist."""
        return f"{self.topic}-{self._incarnation}" if self.coordinator.exists else None

    def introduce(self, client: Client) -> None:
        """Add the client of a new process. Methods with a member's name then act on this process."""
        self._clients[client.name] = client

    def join(self, client: Client, now: float) -> None:
        """Subscribe a client. Raises ``KafkaFailure`` while the broker is down."""
        self._at(now)
        if not self.up:
            raise KafkaFailure("_WAIT_COORD", f"the broker of {self.topic} is down")
        self.coordinator.join(client)

    def lists(self, client: Client) -> bool:
        """Whether the group lists a client as a member. A removed client may not have learned of its removal yet."""
        return self.coordinator.knows(client)

    def poll(self, client: Client, now: float) -> list[Callback | KafkaFailure]:
        """Return the next callbacks and errors. A new partition begins at its commit, or by ``offset_reset``."""
        self._at(now)
        events = self.coordinator.poll(client)
        for event in events:
            if isinstance(event, Callback) and event.kind == "assign":
                for number in event.partitions:
                    client.partitions[number] = self._begin(client, number)
        return events

    def fetch(self, client: Client, partition: int, messages: int, size: int) -> list[Record]:
        """Deliver at most ``messages`` messages.

        The message that reaches ``size`` bytes is the last message. A paused or revoked partition delivers nothing.
        Raises ``KeyError`` for a partition that the client does not own.
        """
        owned = client.partitions[partition]
        if owned.revoking or owned.silent or not client.running or messages <= 0 or size <= 0:
            return []
        if partition in client.paused:
            return []
        if self.up and self.coordinator.exists and not self.hangs and client.isolated_since is None:
            self._fill(client, partition, owned, max(messages, self.settings.prefetch))
        return owned.take(messages, size)

    def commit(self, client: Client, commits: Mapping[int, Commit], now: float) -> None:
        """Commit positions. The broker checks neither who owns a partition nor its former commit.

        Raises ``KafkaFailure`` if a commit failed. With ``OFFSET_METADATA_TOO_LARGE`` the broker commits the other
        partitions. With any other code the broker commits nothing. The call raises the errors of ``Commit.units``
        before it sends the request.
        """
        self._at(now)
        if client.fatal is not None:
            raise client.fatal
        units = {number: commit.units() for number, commit in commits.items()}
        if not self.up:
            raise KafkaFailure(
                "_WAIT_COORD", f"the broker of {self.topic} is down, so nothing was committed; start the broker"
            )
        if client.crashed or not self.coordinator.knows(client):
            raise KafkaFailure(
                "UNKNOWN_MEMBER_ID", f"{client.name} is no member of the group of {self.topic}; join again"
            )
        if not self.coordinator.exists:
            raise KafkaFailure("UNKNOWN_TOPIC_OR_PART", f"topic {self.topic} was deleted")
        limit = self.settings.metadata_limit
        for number, commit in commits.items():
            if units[number] <= limit:
                self._keep(client, number, commit)
        large = [number for number in commits if units[number] > limit]
        if large:
            raise KafkaFailure(
                "OFFSET_METADATA_TOO_LARGE",
                f"partition {large[0]} of {self.topic}: the metadata has {units[large[0]]} UTF-16 units with the NUL, "
                f"but the broker accepts at most {limit}; the former commit of the partition stays",
            )

    def release(self, client: Client, partition: int, now: float) -> None:
        """Release a partition of a client.

        A revoked partition is then free; any other partition stays assigned. Idempotent.
        """
        self._at(now)
        self.coordinator.release(client, partition)

    def begin_close(self, client: Client, now: float) -> list[Callback]:
        """Begin the close of a client. The client's heartbeats stop, and its last callback runs. Idempotent."""
        self._at(now)
        return self.coordinator.begin_close(client)

    def end_close(self, client: Client, now: float) -> None:
        """End the close of a client. A dynamic member leaves the group. Idempotent."""
        self._at(now)
        if not client.crashed:
            self.coordinator.end_close(client)
            self._changed()

    def polling(self, client: Client, now: float, *, on: bool) -> None:
        """Record whether the client polls continuously from now on."""
        self._at(now)
        client.polling = on and not client.crashed
        client.last_poll = self.coordinator.now

    def wait_until(self, at: float) -> None:
        """Set a timer that wakes the watchers at the time ``at``."""
        self._waits.append(at)

    # --- inside

    def _at(self, now: float) -> None:
        self.coordinator.now = max(self.coordinator.now, now)

    def _client(self, member: str) -> Client:
        client = self._clients.get(member)
        if client is None:
            known = ", ".join(map(repr, self._clients)) or "none"
            raise LookupError(
                f"member {member!r} has no source of {self.topic}: make its source, or use one of: {known}"
            )
        return client

    def _begin(self, client: Client, partition: int) -> ClientPartition:
        commit = self._commits.get(partition)
        owned = ClientPartition(0 if commit is None else commit.offset)
        if commit is None or not self._reachable(partition, commit.offset):
            self._reset(client, partition, owned)
            owned.position = owned.fetched
        return owned

    def _reachable(self, partition: int, position: int) -> bool:
        return self._starts[partition] <= position <= self.group.topic.log(partition).end

    def _reset(self, client: Client, partition: int, owned: ClientPartition) -> None:
        policy = self.settings.offset_reset
        if policy == "earliest":
            owned.fetched = self._starts[partition]
        elif policy == "latest":
            owned.fetched = self.stable_end(partition)
        else:
            owned.silent = True
            client.failures.append(
                KafkaFailure(
                    "_AUTO_OFFSET_RESET", f"partition {partition} of {self.topic} has no position {owned.fetched}"
                )
            )

    def _fill(self, client: Client, partition: int, owned: ClientPartition, messages: int) -> None:
        """Fetch until the client has ``messages`` prefetched messages, or the readable messages end."""
        log, end = self.group.topic.log(partition), self.stable_end(partition)
        if not self._reachable(partition, owned.fetched):
            self._reset(client, partition, owned)
            if owned.silent:
                return
        records = log.read(owned.fetched, messages - len(owned.queue), _ALL)
        records = [record for record in records if record.position < end]
        owned.queue.extend(records)
        if records:
            owned.fetched = records[-1].position + 1
        following = log.read(owned.fetched, 1, 1)
        if not following or following[0].position >= end:
            # Only a gap is left, and the client reads past the gap.
            owned.fetched = max(end, owned.fetched)

    def _written(self, partition: int, size: int) -> None:
        if self.settings.retention_bytes is not None:
            self._sizes[partition].append(self.group.topic.log(partition).end, size)
            self._delete_by_size(partition)

    def _delete_by_size(self, partition: int) -> None:
        limit = self.settings.retention_bytes
        if limit is not None:
            begin = self._sizes[partition].begin(limit, self.stable_end(partition))
            if begin > self._starts[partition]:
                self._delete(partition, begin)

    def _delete(self, partition: int, before: int) -> None:
        self._starts[partition] = max(before, self._starts[partition])
        self._sizes[partition].trim(before)
        self.group.topic.log(partition).trim(before)

    def _keep(self, client: Client, partition: int, commit: Commit) -> None:
        ahead = max(0, self.group.topic.log(partition).end - commit.offset)
        completed = decode(commit.metadata, commit.offset, ahead) or ()
        self.group.commit(client.id, partition, commit.offset, completed)
        self._commits[partition] = commit
