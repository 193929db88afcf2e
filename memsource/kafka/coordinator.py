"""The coordinator of a Kafka group as data: sessions, heartbeats, and the removal of silent members.

The coordinator adds time to ``Group``, which stores the owners. A client learns of most decisions at its next
heartbeat. A client that does not poll within ``max_poll_interval`` leaves the group (classic protocol) or stops its
heartbeats (protocol 848). The coordinator removes a client without heartbeats at the end of its session. Measurements
of a real broker confirm the rules of each protocol.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from lanes.core.types import NEVER, Partition
from memsource.kafka.client import Callback, Client, ClientPartition, KafkaFailure, OffsetReset, RebalanceProtocol
from memsource.memory.group import Assignor, Group, Notice, plan

_GHOST: Final = "a member that joins and leaves"
_METADATA_REFRESH: Final = 0.3


@dataclass(frozen=True, kw_only=True)
class KafkaSettings:
    """Settings of a broker and its clients. Times are in seconds; only ``heartbeat_interval`` may be 0.

    Attributes:
        protocol: The rebalance protocol.
        session_timeout: Seconds without a heartbeat that end a session.
        heartbeat_interval: Seconds between heartbeats, below ``session_timeout``; 0 = clients learn of decisions at
            once.
        max_poll_interval: Maximum seconds between two polls, and between a revocation and the release.
        commit_timeout: Seconds after which a classic commit fails while the broker is down.
        metadata_limit: Maximum UTF-16 units of commit metadata, the client's NUL included.
        offset_reset: Position at which a partition without a valid commit begins.
        prefetch: Number of messages of a partition that a client prefetches.
        backlogs: Whether sources report their backlog, so that consumers watch their intake.
        confirms: Whether sources confirm their partitions. After a long freeze, consumers then start handlers only
            after the confirmation.
        retention_bytes: Bytes of each partition that the broker keeps, above 0; None = no limit. The broker deletes the
            oldest messages while the newer messages fill these bytes. Sources then report the retention of their
            messages.
        deaf: Seconds for which the broker receives no request from a client that it removed during a freeze. The
            setting simulates a connection that a router has dropped. The broker still answers another client's request
            for the list of members.
    """

    protocol: RebalanceProtocol = "cooperative"
    session_timeout: float = 6.0
    heartbeat_interval: float = 0.5
    max_poll_interval: float = 60.0
    commit_timeout: float = 6.0
    metadata_limit: int = 4_096
    offset_reset: OffsetReset = "earliest"
    prefetch: int = 100
    backlogs: bool = False
    confirms: bool = False
    retention_bytes: int | None = None
    deaf: float = 0.0

    def __post_init__(self) -> None:
        for name in ("session_timeout", "max_poll_interval", "commit_timeout"):
            if not 0 < getattr(self, name) < NEVER:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be a finite number of seconds above 0")
        if not 0 <= self.heartbeat_interval < self.session_timeout:
            raise ValueError(
                f"heartbeat_interval={self.heartbeat_interval!r}: must be 0 or more, and below session_timeout="
                f"{self.session_timeout!r}"
            )
        if not 0 <= self.deaf < NEVER:
            raise ValueError(f"deaf={self.deaf!r}: must be a finite number of seconds, 0 or more")
        if self.metadata_limit < 1 or self.prefetch < 0:
            raise ValueError(
                f"metadata_limit={self.metadata_limit}, prefetch={self.prefetch}: metadata_limit must be 1 or more, "
                "and prefetch 0 or more"
            )
        if self.retention_bytes is not None and self.retention_bytes < 1:
            raise ValueError(f"retention_bytes={self.retention_bytes}: must be 1 or more, or None for no limit")


class Coordinator:
    """The coordinator of one group. No method blocks. Not thread-safe.

    Args:
        partitions: Number of partitions.
        topic: Name of the topic.
        settings: Settings of the broker and its clients.
        assignor: Chooses the owners of the partitions.

    Attributes:
        settings: Settings of the broker and its clients.
        group: Owners, members and messages.
        classic: Whether the group uses the classic protocol.
        clients: Clients that have joined and not left.
        taken: Assignments that the broker took from members, with the names of these members.
        now: Current time; it never falls.
        up: Whether the broker runs.
        exists: Whether the topic exists.
    """

    def __init__(self, partitions: int, topic: str, settings: KafkaSettings, assignor: Assignor = plan) -> None:
        self.settings = settings
        self._plan = assignor
        self.group = Group(partitions, name=topic, cooperative=settings.protocol != "eager", assignor=self._assignor)
        self.classic = settings.protocol != "848"
        self.clients: list[Client] = []
        # Frozen or isolated clients, some of which have not joined yet.
        self._stopped: list[Client] = []
        self.taken: list[tuple[str, Partition]] = []
        self.now = 0.0
        self.up = True
        self.exists = True
        self._down_since = 0.0
        self._unnoticed_until = NEVER
        self._retake_at = NEVER
        self._names = 0
        self._turn = 0
        self.group.watch(self._note)

    # --- calls of clients

    def join(self, client: Client) -> None:
        """Add a client to the group. A static member replaces the former member with the same instance id.

        If the former member has neither closed nor crashed, the classic protocol ends the former member with
        ``_FATAL``. Protocol 848 ends the new member instead, unless the former member has closed or its session has
        ended.
        """
        former = next((each for each in self.clients if each is not client and self._same(each, client)), None)
        if former is not None and not self.classic and not former.closed:
            client.fail(KafkaFailure("_FATAL", f"instance id {client.instance!r} is still used by another member"))
            return
        client.joined = client.last_poll = self.now
        client.silent_since = client.revoking_since = None
        client.hears_at, client.informed = NEVER, False
        client.rejoining = client.exceeded = client.cut_off = False
        client.releases.clear()
        client.notices.clear()
        if client not in self.clients:
            self.clients.append(client)
        if former is not None:
            client.id = former.id
            self.clients.remove(former)
            if not former.closed and not former.crashed:
                former.fail(KafkaFailure("_FATAL", f"static member {former.instance!r} was fenced by a newer one"))
            self.group.rejoin(client.id)
        else:
            self._names += 1
            client.id = f"{client.name}#{self._names}"
            self.group.join(client.id)

    def poll(self, client: Client) -> list[Callback | KafkaFailure]:
        """Return the next callbacks and errors of a client. The partitions of an ``assign`` have no position yet."""
        if not client.running or client.closing:
            return []
        client.last_poll = self.now
        if client.failures:
            return [client.failures.popleft()]
        if client.fatal is not None:
            return []
        removed = client.isolated_since is None and not self.knows(client)
        if not client.rejoining and (client.exceeded or client.cut_off or removed):
            return [self._lost(client)]
        if not self.up or client.isolated_since is not None:
            return []
        if client.rejoining:
            if self.knows(client):
                self.group.leave(client.id)
            self.join(client)
        if client.fatal is None and (client.informed or client.hears_at <= self.now):
            client.hears_at, client.informed = NEVER, False
            client.notices = _current([*client.notices, *self.group.poll(client.id)])
        events: list[Callback | KafkaFailure] = []
        while client.notices and not events:
            events = self._heard(client)
        return events

    def release(self, client: Client, partition: int) -> None:
        """Release a partition of a client. Idempotent.

        Another member may then own a revoked partition. A partition that is not revoked stays assigned until the client
        leaves, because a Kafka client cannot give back such a partition.
        """
        owned = client.partitions.pop(partition, None)
        if owned is None or not owned.revoking:
            return
        if not any(each.revoking for each in client.partitions.values()):
            client.revoking_since = None
        client.releases.add(partition)
        self._flush(client)

    def begin_close(self, client: Client) -> list[Callback]:
        """Stop the heartbeats of a client, while its last callback runs. Idempotent."""
        joined = client in self.clients and not client.closing
        client.closing = True
        if not joined:
            return []
        self._fall_silent(client)
        return [Callback("revoke", tuple(client.partitions))] if client.partitions else []

    def end_close(self, client: Client) -> None:
        """End the close of a client.

        A dynamic member leaves; a static member keeps its partitions until its session ends. Idempotent.
        """
        client.closing = client.closed = True
        client.partitions.clear()
        if client in self.clients and (client.instance is None or not self.knows(client)):
            self.clients.remove(client)
            self.group.leave(client.id)

    def knows(self, client: Client) -> bool:
        """Whether the client is a member of the group. A removed client may not have learned of its removal yet."""
        return client.id in self.group.members

    # --- faults of clients and brokers

    def crash(self, client: Client) -> None:
        """End the process of a client. Idempotent."""
        client.crashed = True
        client.polling = False
        client.frozen_until = client.isolated_since = None
        if client in self._stopped:
            self._stopped.remove(client)
        self._fall_silent(client)
        if not self.knows(client) and client in self.clients:
            self.clients.remove(client)

    def freeze(self, client: Client, until: float) -> None:
        """Stop the process of a client until the time ``until``."""
        if until > self.now and not client.crashed:
            client.frozen_until = max(until, client.frozen_until or 0.0)
            self._stop(client)

    def isolate(self, client: Client, until: float) -> None:
        """Drop all requests and heartbeats of a client until the time ``until``. The process keeps running."""
        if until > self.now and not client.crashed and not client.closed:
            client.deaf = False
            if client.isolated_since is None:
                client.isolated_since, client.isolated_until = self.now, until
            client.isolated_until = max(until, client.isolated_until)
            self._stop(client)

    def rebalance(self) -> bool:
        """Make a new plan, as after the join and leave of a member. Return whether the broker revokes a partition."""
        self.group.join(_GHOST)
        self.group.leave(_GHOST)
        owned = [number for number in self.group.topic.partitions if self.group.owner(number) is not None]
        if owned and not self.group.rebalancing:
            self._turn += 1
            self.group.revoke(owned[self._turn % len(owned)])
        return self.group.rebalancing

    def lose(self, partition: int) -> bool:
        """Take a partition from its owner; return False without an owner.

        The owner learns of the loss at a heartbeat.
        """
        owner = self.group.owner(partition)
        if owner is None:
            return False
        self._take(owner, [partition])
        self.group.lose(owner, partition)
        if self.group.owner(partition) is None:
            self._retake_at = self.now + self.settings.session_timeout
        return True

    def stop(self) -> None:
        """Stop the broker. Idempotent."""
        if self.up:
            self.up, self._down_since = False, self.now

    def start(self) -> None:
        """Start the broker. The call restarts all session timeouts. Idempotent."""
        if not self.up:
            self.up = True
            for client in self.clients:
                if client.silent_since is not None:
                    client.silent_since = self.now
                self._flush(client)

    def delete_topic(self) -> None:
        """Delete the topic with its commits. Classic clients learn of the deletion from their next metadata."""
        self.exists = False
        self.group.recreate()
        if self.classic:
            self._unnoticed_until = self.now + _METADATA_REFRESH
        else:
            self.group.rebalance()

    def create_topic(self) -> None:
        """Create the topic again. Classic clients that have not yet noticed the deletion will not notice it later."""
        self.exists = True
        self._unnoticed_until = NEVER
        if any(self.group.owner(number) is None for number in self.group.topic.partitions):
            self.group.rebalance()

    # --- time

    def timers(self) -> Iterator[tuple[float, Callable[[], None]]]:
        """Yield the time and the action of each timer. Running an action removes its timer."""
        settings = self.settings
        yield self._retake_at, self._retake
        yield self._unnoticed_until, self._notice_deletion
        for client in self._stopped:
            if client.frozen_until is not None:
                yield client.frozen_until, partial(self._thaw, client)
            if client.isolated_since is not None:
                yield client.isolated_until, partial(self._reconnect, client)
        for client in self.clients:
            yield client.hears_at, partial(self._hear, client)
            if not self.knows(client):
                since = client.isolated_since
                if since is not None and self.classic and client.running and not client.cut_off:
                    yield since + settings.session_timeout, partial(self._cut_off, client)
                continue
            if client.silent_since is not None and self.up:
                yield client.silent_since + settings.session_timeout, partial(self._expel, client)
            if not client.running or client.closing or client.fatal is not None:
                continue
            since = self._down_since if not self.up else client.isolated_since
            if since is not None and self.classic and not client.cut_off:
                yield since + settings.session_timeout, partial(self._cut_off, client)
            if not client.polling and not client.exceeded:
                yield client.last_poll + settings.max_poll_interval, partial(self._exceed, client)
            if client.revoking_since is not None and settings.protocol != "cooperative" and self.up:
                yield client.revoking_since + settings.max_poll_interval, partial(self._expel, client)

    def _hear(self, client: Client) -> None:
        client.hears_at, client.informed = NEVER, True

    def _thaw(self, client: Client) -> None:
        client.frozen_until = None
        if not self.knows(client) and not client.rejoining:
            is_reached = client.isolated_since is None
            self.isolate(client, self.now + self.settings.deaf)
            client.deaf = is_reached and client.isolated_since is not None
        self._speak(client)

    def _reconnect(self, client: Client) -> None:
        client.isolated_since, client.isolated_until, client.deaf = None, NEVER, False
        self._speak(client)

    def _stop(self, client: Client) -> None:
        if client not in self._stopped:
            self._stopped.append(client)
        self._fall_silent(client)

    def _speak(self, client: Client) -> None:
        """Accept the heartbeats of a client again, if the client sends heartbeats."""
        if client.frozen_until is None and client.isolated_since is None:
            self._stopped.remove(client)
        heard = client.running and client.isolated_since is None
        if heard and not client.closing and not (client.exceeded and not self.classic):
            client.silent_since = None
        self._flush(client)

    def _expel(self, client: Client) -> None:
        self._take(client.id)
        self.group.crash(client.id)
        if client.crashed or client.closed:
            self.clients.remove(client)

    def _cut_off(self, client: Client) -> None:
        client.cut_off = True

    def _exceed(self, client: Client) -> None:
        client.exceeded = True
        if self.classic and client.isolated_since is None:
            self._take(client.id)
            self.group.leave(client.id)
        else:
            self._fall_silent(client)

    def _retake(self) -> None:
        self._retake_at = NEVER
        if any(self.group.owner(number) is None for number in self.group.topic.partitions):
            self.group.rebalance()

    def _notice_deletion(self) -> None:
        self._unnoticed_until = NEVER
        for number in self.group.topic.partitions:
            owner = self.group.owner(number)
            if owner is not None and self.settings.protocol == "eager":
                self.group.revoke(number)
            elif owner is not None:
                self._take(owner, [number])
                self.group.lose(owner, number, give=False)

    # --- inside

    def _assignor(self, owners: Sequence[str | None], members: Sequence[str]) -> list[str | None]:
        return self._plan(owners, members) if self.exists else [None] * len(owners)

    def _take(self, member: str, numbers: Iterable[int] | None = None) -> None:
        """Record in ``taken`` that the broker takes partitions from a member; by default all its partitions."""
        for client in self.clients:
            if client.id == member:
                for number in self.group.topic.partitions if numbers is None else numbers:
                    owned = client.partitions.get(number)
                    # A partition whose assignment the member has not learned was never taken from the member.
                    if self.group.owner(number) == member and owned is not None and owned.partition is not None:
                        self.taken.append((client.name, owned.partition))
                        owned.partition = None

    def _same(self, one: Client, other: Client) -> bool:
        return one.instance is not None and one.instance == other.instance and self.knows(one)

    def _fall_silent(self, client: Client) -> None:
        if client.silent_since is None:
            client.silent_since = self.now

    def _flush(self, client: Client) -> None:
        if client.running and self.up and client.isolated_since is None:
            for partition in sorted(client.releases):
                client.releases.discard(partition)
                if self.knows(client):
                    self.group.release(client.id, partition)

    def _lost(self, client: Client) -> Callback:
        # Kafka has no callback for partitions that are being revoked.
        lost = tuple(number for number, owned in client.partitions.items() if not owned.revoking)
        client.partitions.clear()
        client.releases.clear()
        client.revoking_since = None
        client.rejoining = True
        if client.exceeded:
            client.failures.append(
                KafkaFailure("_MAX_POLL_EXCEEDED", f"no poll for {self.settings.max_poll_interval:g} s")
            )
        return Callback("lost", lost)

    def _heard(self, client: Client) -> list[Callback | KafkaFailure]:
        """Return the callbacks for the next notices of one kind. Notices of other kinds wait for the next poll."""
        kind = client.notices[0].kind
        numbers = []
        while client.notices and client.notices[0].kind == kind:
            numbers.append(client.notices.popleft().partition)
        if kind == "assigned":
            client.partitions.update((number, ClientPartition()) for number in numbers)
            return [Callback("assign", tuple(numbers))]
        if kind == "lost":
            lost = Callback("lost", tuple(n for n in numbers if client.partitions.pop(n, None) is not None))
            return [lost, *self._deleted()]
        for number in numbers:
            if number not in client.partitions:
                # The client released the partition before its revocation.
                self.group.release(client.id, number)
                continue
            client.partitions[number].revoking = True
            client.partitions[number].purge()
            if client.revoking_since is None:
                client.revoking_since = self.now
        asked = tuple(number for number in numbers if number in client.partitions)
        if not asked:
            return []
        return [Callback("revoke", asked), *(self._deleted() if self.settings.protocol == "eager" else ())]

    def _deleted(self) -> list[KafkaFailure]:
        """The error that a client reports after the deletion of the topic; empty while the topic exists."""
        if self.exists:
            return []
        return [KafkaFailure("UNKNOWN_TOPIC_OR_PART", f"topic {self.group.name} was deleted")]

    def _note(self) -> None:
        """Schedule the heartbeats by which clients learn of new notices."""
        for client in self.clients:
            if client.informed or not self.knows(client):
                continue
            pending = self.group.pending(client.id)
            if not pending:
                continue
            at = self.now
            interval = self.settings.heartbeat_interval
            # The classic protocol answers a join with the assignment. The client learns other notices at a heartbeat.
            if interval and not (self.classic and pending[-1].kind == "assigned"):
                at = client.joined + interval * -(-(self.now - client.joined) // interval)
            client.hears_at = min(client.hears_at, at)


def _current(notices: Sequence[Notice]) -> deque[Notice]:
    """The notices, without assignments that were lost before their callback ran."""
    kept: list[Notice] = []
    for notice in notices:
        assigned = Notice("assigned", notice.partition)
        if notice.kind == "lost" and assigned in kept:
            at = kept.index(assigned)
            kept[at:] = [other for other in kept[at:] if other.partition != notice.partition]
        else:
            kept.append(notice)
    return deque(kept)
