"""The partitions that a client owns in its group, and the callbacks that assign and revoke them.

All code of this module runs in the thread that owns the client, mostly inside a call of ``consume`` or ``close``. If a
callback fails, it does not raise the error, but ends the source.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from lanes.clock import Clock
from lanes.core.types import NEVER, Partition, PartitionId
from lanes.errors import SourceError
from lanes.source import Assigned, Lost, Revoking, SourceEvent
from lanes_kafka.client.group_snapshot import Snapshots
from lanes_kafka.client.join_watch import JoinWatch
from lanes_kafka.client.offsets import QUERY_TIMEOUT, StartPosition, log_bounds, position_in_range, start_positions
from lanes_kafka.client.records import READER
from lanes_kafka.client.topics import Topics
from lanes_kafka.config import ClientConfig
from lanes_kafka.errors import client_message, fatal_error, is_permanent

log = logging.getLogger("lanes.kafka")

OF_POLL_INTERVAL: Final = 0.8
"""Share of ``max.poll.interval.ms`` for the drain, last commit and release of a partition. The rest is a margin."""

_RECLAIM_AFTER: Final = 5.0
"""Seconds after a presumed loss until a still owned partition restarts."""

_COMMIT_STARTS_EVERY: Final = 5.0
"""Seconds between two attempts to commit the start positions of a group."""

_ASK_BOUNDS_EVERY: Final = 5.0
"""Seconds between two requests for the bounds of a log that does not contain the position to read. A request may block
the thread."""

_TOPIC_ID_TIMEOUT: Final = 2.0
"""Seconds that an assignment waits for the ids of its topics."""

_START_TIMEOUT: Final = 60.0
"""Maximum time in seconds during which the thread repeats the request for start positions."""

_LEAST_TIMEOUT: Final = 0.5
"""Timeout in seconds of the last request for start positions, after which the thread must poll the client."""


class Assignment:
    """One assignment of ``partition``, from the callback until the revocation or loss.

    Args:
        partition: The assigned partition.
        position: The first position to deliver.
        rebalance: Number of the callback that assigned the partition.

    Attributes:
        partition: The assigned partition.
        position: The next position to deliver.
        end: Position after the last message that the client has read.
        positions_read: Number of positions that the client has read, including gaps.
        bytes_read: Size of the messages that the client has read, in bytes.
        paused: Whether the thread has told the client to pause the partition.
        drained: Whether the thread drops new messages of the partition.
        returning: Whether the thread is releasing the partition, in a call that may run callbacks.
        released: Whether the thread has released the partition. No later commit names a released partition.
        rebalance: Number of the callback that assigned the partition.
    """

    __slots__ = (
        "bytes_read",
        "drained",
        "end",
        "partition",
        "paused",
        "position",
        "positions_read",
        "rebalance",
        "released",
        "returning",
    )

    def __init__(self, partition: Partition, position: int, rebalance: int) -> None:
        self.partition = partition
        self.position = self.end = position
        self.positions_read = self.bytes_read = 0
        self.rebalance = rebalance
        self.paused = False
        self.drained = self.returning = self.released = False

    def at(self, offset: int | None = None) -> TopicPartition:
        """Return a partition in the client's own type, with ``offset`` if the caller passes an offset."""
        return TopicPartition(*self.partition.id) if offset is None else TopicPartition(*self.partition.id, offset)

    def __repr__(self) -> str:
        return f"<Assignment {self.partition.id} at {self.position}>"


class _UnknownPartition(Exception):
    """Error: the coordinator has assigned a partition that the client does not know yet."""


@dataclass(eq=False, repr=False)
class Group:
    """The assignments of one client.

    Attributes:
        config: Configuration of the client.
        topics: Topics of the client, as the broker knows them.
        deliver: Function that sends events to the event loop.
        serve: Function that performs commands of the loop while a callback waits. The argument is the time of the clock
            at which the callback must end.
        fail: Function that ends the source with an error.
        clock: Monotonic clock, in seconds.
        name: Name of the source, for errors and log lines.
        is_full: Function that returns whether the event loop has no room for messages.
        hands_over: Whether commits carry metadata for the next owner of a partition.
        snapshots: The generations of the group, for transactions.
        owned: Current assignments, neither revoked nor lost, by partition.
        closing: Whether the client is about to close. The group then starts no assigned partition.
        rebalances: Number of callbacks since the start that assigned, revoked or lost partitions.
        join_watch: Watch of the wait for the group's first answer.
        rejoining: Whether the member waits for an assignment after an outage in which it lost partitions.
    """

    config: ClientConfig
    topics: Topics
    deliver: Callable[[Sequence[SourceEvent]], None]
    serve: Callable[[float], None]
    fail: Callable[[SourceError], None]
    clock: Clock
    name: str
    is_full: Callable[[], bool]
    hands_over: bool
    snapshots: Snapshots = field(default_factory=lambda: Snapshots(wanted=False))
    join_watch: JoinWatch = field(init=False)
    owned: dict[PartitionId, Assignment] = field(default_factory=dict, init=False)
    closing: bool = field(default=False, init=False)
    rebalances: int = field(default=0, init=False)
    rejoining: bool = field(default=False, init=False)
    _presumed_lost: dict[PartitionId, float] = field(default_factory=dict, init=False)
    _postponed: set[PartitionId] = field(default_factory=set, init=False)
    _stale_metadata: bool = field(default=False, init=False)
    _uncommitted_starts: dict[PartitionId, int] = field(default_factory=dict, init=False)
    _commit_starts_at: float = field(default=0.0, init=False)
    _out_of_range: dict[Assignment, int] = field(default_factory=dict, init=False)
    _ask_bounds_at: float = field(default=0.0, init=False)
    _lost: bool = field(default=False, init=False)
    _lost_in_outage: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.join_watch = JoinWatch(self.name, self.clock, tells_nothing=self.config.protocol == "848")

    def assignment(self, partition: Partition) -> Assignment | None:
        """Return the assignment of this ``partition``; None = no current assignment."""
        assignment = self.owned.get(partition.id)
        return assignment if assignment is not None and assignment.partition is partition else None

    def owns(self, partition: Partition) -> bool:
        """Return whether this client owns the unreleased partition and may commit positions."""
        assignment = self.assignment(partition)
        return assignment is not None and not assignment.released

    # --- callbacks

    def on_assign(self, client: Consumer, partitions: Sequence[TopicPartition]) -> None:
        """Fetch newly assigned partitions.

        The method sets the start position and the pause of each partition before the client reads a message.
        """
        self.rebalances += 1
        self.join_watch.answered(owns=bool(partitions or self.owned or self._presumed_lost))
        # The client joins again only after this callback has assigned the partitions.
        self.snapshots.enter(client)
        if self.closing:
            return
        until = self._starts_until()
        try:
            self._lost = self._lost_in_outage = self.rejoining = False
            ids = [PartitionId(each.topic, each.partition) for each in partitions]
            if ids:
                # A user may have recreated the topic since the last request for its id.
                self.topics.wait(_TOPIC_ID_TIMEOUT)
                for name in dict.fromkeys(one.source for one in ids):
                    self.topics.appears(name, _TOPIC_ID_TIMEOUT)
                self.check_topics()
                self._start(client, ids, until=until)
            self.reclaim(client, until=until)
        except SourceError as error:
            self.fail(error)
        except Exception as error:
            self.fail(self._fatal_error("assigning partitions failed", error))

    def on_revoke(self, client: Consumer, partitions: Sequence[TopicPartition]) -> None:
        """Request a drain of revoked partitions, and wait up to 0.8 of ``max.poll.interval.ms`` for their release."""
        self.rebalances += 1
        # The group gives these partitions to others only in a later generation, after this callback.
        self.snapshots.enter(client)
        leaving = self._leaving(partitions)
        if self.closing:
            return
        try:
            waiting = [each for each in leaving if not each.released and not each.returning]
            limit = OF_POLL_INTERVAL * self.config.max_poll_interval
            self.deliver([Revoking(each.partition, limit) for each in waiting])
            until = self.clock() + limit
            # The wait for a partition ends with the release or the loss of the partition.
            while any(self.owns(each.partition) for each in waiting) and not self.closing and self.clock() < until:
                self.serve(until)
            self._lose(
                [each for each in waiting if self.owns(each.partition)], f"it was not released within {limit:g} s"
            )
        except Exception as error:
            self.fail(self._fatal_error("revoking partitions failed", error))
        finally:
            self._forget(leaving)
            if not self.owned and not self.closing:
                self.join_watch.rebalances()

    def on_lost(self, client: Consumer, partitions: Sequence[TopicPartition]) -> None:
        """Drop lost partitions without a commit, because another member may already own these partitions."""
        self.rebalances += 1
        self._lost |= bool(partitions)
        reason = "this member's session ended, or the group chose another owner"
        outage = self.topics.contact.outage()
        if outage is not None:
            reason = f"no broker has answered for {outage.seconds:.0f} s, so this member's session may have ended"
        self._lose(self._leaving(partitions), reason)
        if partitions and not self.owned and not self.closing:
            self.join_watch.rejoins()

    # --- between callbacks

    def report_return(self) -> None:
        """Record and log the end of an outage, if the group has assigned no partition since a loss."""
        outage = self.topics.contact.outage()
        # With a short session, the session ends before the source reports an outage.
        self._lost_in_outage = self._lost and (self._lost_in_outage or outage is not None)
        returned = self._lost_in_outage and outage is None
        if returned and not self.rejoining:
            self.join_watch.rejoins()
            log.info(
                "%s: waiting for the group to assign partitions again, perhaps until the broker has ended this "
                "member's former session",
                self.name,
            )
        self.rejoining = returned

    def drained(self, partition: Partition) -> None:
        """Stop delivering messages of a partition. Idempotent."""
        assignment = self.assignment(partition)
        if assignment is not None:
            assignment.drained = True

    def release(self, partition: Partition) -> None:
        """Stop delivering messages and committing positions of a partition. Idempotent."""
        assignment = self.assignment(partition)
        if assignment is not None:
            assignment.drained = assignment.released = True
            self.snapshots.own(self.owned)

    def lose_all(self, reason: str, *, presumed: bool = False) -> None:
        """Report every partition as lost.

        Args:
            reason: Reason of the loss, which the event loop reports.
            presumed: Whether the client may still own the partitions, which ``reclaim`` then starts again.
        """
        if presumed:
            self._presumed_lost |= dict.fromkeys(self.owned, self.clock() + _RECLAIM_AFTER)
        self._lose(list(self.owned.values()), reason)

    @property
    def doubted(self) -> bool:
        """Return whether a doubted partition waits for ``trust``."""
        return NEVER in self._presumed_lost.values()

    def doubt(self) -> None:
        """Mark the presumably lost partitions as doubted: each restarts only after ``trust`` or its next assignment.

        Idempotent.

        The client may learn late of its removal from the group, so the client's own state proves nothing.
        """
        self._presumed_lost = dict.fromkeys(self._presumed_lost, NEVER)

    def trust(self) -> None:
        """Allow ``reclaim`` to restart the doubted partitions, because the broker has listed this member.

        Idempotent.
        """
        now = self.clock()
        self._presumed_lost = {one: min(at, now) for one, at in self._presumed_lost.items()}

    def reclaim(self, client: Consumer, *, until: float | None = None) -> None:
        """Restart partitions that were presumed lost and that the client still owns after 5 seconds.

        A doubted partition restarts only after a call of ``trust``.

        The call also retries failed commits of start positions, and failed moves of positions that are out of range.
        Then the call starts the partitions that were unknown to the client at their assignment. The call may block
        until the broker answers.

        Args:
            client: The client.
            until: Time until which the running callback may ask for start positions; None = no callback runs. A
                callback restarts the partitions without the wait of 5 seconds, except doubted partitions.

        Raises:
            KafkaException: The broker does not answer, or answers with an error.
            SourceError: A start position is out of range, and ``out_of_range`` is ``"fail"``.
        """
        self._commit_starts(client)
        self._move_into_range(client, again=True)
        now, in_callback = self.clock(), until is not None
        due = [one for one, at in self._presumed_lost.items() if at <= now or (in_callback and at != NEVER)]
        if not due or self.closing:
            return
        if self._stale_metadata:
            if in_callback:
                # A callback must not refresh the metadata.
                return
            self._stale_metadata = False
            with contextlib.suppress(KafkaException):
                client.list_topics(timeout=QUERY_TIMEOUT)
        mine = {PartitionId(each.topic, each.partition) for each in client.assignment()}
        for partition_id in due:
            del self._presumed_lost[partition_id]
        again = [one for one in due if one in mine and one not in self.owned]
        self._start(client, again, until=self._starts_until() if until is None else until, known=True)

    def out_of_range(self, client: Consumer, partition_id: PartitionId, offset: int) -> None:
        """Move a partition whose log does not contain ``offset`` to a position in its log, or end the source.

        The setting ``out_of_range`` decides. The partition delivers no message until the broker has reported the bounds
        of the log. ``reclaim`` repeats the request for the bounds.
        """
        assignment = self.owned.get(partition_id)
        if assignment is not None:
            self._out_of_range[assignment] = offset
            self._move_into_range(client)

    def check_topics(self) -> None:
        """End the source after the deletion or recreation of a topic, whose offsets then mean other messages."""
        for assignment in self.owned.values():
            name = assignment.partition.id.source
            change = self.topics.change(name, assignment.partition.incarnation)
            if change is not None:
                self.lose_all(f"topic {name!r} was {change}")
                self.fail(
                    SourceError(
                        f"{self.name}: topic {name!r} was {change} during the run, so its offsets mean other "
                        "messages, and the source commits nothing more. Check the positions that the group has "
                        "committed for the topic, reset the positions of the old topic, and start again"
                    )
                )
                return

    # --- inside

    def _starts_until(self) -> float:
        """Return the time until which a callback that begins now may ask for start positions.

        The callback needs the rest of ``max.poll.interval.ms`` for the commit of new positions and for a margin.
        """
        allowed = OF_POLL_INTERVAL * self.config.max_poll_interval - QUERY_TIMEOUT
        return self.clock() + min(_START_TIMEOUT, allowed)

    def _start(self, client: Consumer, ids: list[PartitionId], *, until: float, known: bool = False) -> None:
        """Ask for the start positions of the partitions ``ids`` until a given time, and fetch from these positions.

        With ``known``, the client already owns the partitions, so the call seeks to the start positions.
        """
        if not ids:
            return
        # Read the ids before the positions. If a user recreates the topic between the reads, the id is then outdated,
        # so the source notices the change.
        topic_ids = {one.source: self.topics.id_of(one.source) for one in ids}
        try:
            found = self._start_positions(client, ids, until)
        except _UnknownPartition:
            self._postpone(client, ids, known=known)
            return
        started = [self._add(one, found[one], topic_ids[one.source]) for one in ids]
        offsets = [each.at(each.position) for each in started]
        if known:
            for each in started:
                if each.partition.id in self._postponed:
                    self._postponed.remove(each.partition.id)
                    self._assign_again(client, each, each.position)
                else:
                    client.seek(each.at(each.position))
        elif self.config.protocol == "eager":
            client.assign(offsets)
        else:
            client.incremental_assign(offsets)
        # A pause belongs to the client, not to an assignment.
        self.set_paused(client, started, self.is_full())
        for one, start in found.items():
            if start.uncommitted:
                self._uncommitted_starts[one] = start.floor
            else:
                # Another member has committed since a failed commit of this start.
                self._uncommitted_starts.pop(one, None)
        self._commit_starts(client, decided=ids)
        self.deliver([Assigned(each.partition) for each in started])

    def _postpone(self, client: Consumer, ids: list[PartitionId], *, known: bool) -> None:
        """Postpone the start of unknown partitions until ``reclaim`` runs after a refresh of the metadata.

        The coordinator may know new partitions before this client does. A callback cannot refresh the metadata. In
        confluent-kafka 2.16, ``list_topics`` in a callback drops the state of the running ``consume`` call. The next
        callback of this call ends the process.
        """
        if not known:
            # The client owns the partitions from now on, and must not read them yet.
            places = [TopicPartition(*one, 0) for one in ids]
            (client.assign if self.config.protocol == "eager" else client.incremental_assign)(places)
            client.pause([TopicPartition(*one) for one in ids])
            self._postponed |= set(ids)
        self._stale_metadata = True
        self._presumed_lost |= dict.fromkeys(ids, self.clock())

    def _start_positions(
        self, client: Consumer, ids: list[PartitionId], until: float
    ) -> dict[PartitionId, StartPosition]:
        config = self.config
        sizes = {name: topic.partitions for name, topic in self.topics.known.items()}
        warned = False
        while True:
            try:
                return start_positions(
                    client,
                    ids,
                    start=config.start,
                    sizes=sizes,
                    out_of_range=config.out_of_range,
                    hands_over=self.hands_over,
                    name=self.name,
                    # A request that begins shortly before the end must not outlast max.poll.interval.ms.
                    timeout=lambda: max(_LEAST_TIMEOUT, min(QUERY_TIMEOUT, until - self.clock())),
                )
            except KafkaException as failure:
                error = failure.args[0]
                if is_permanent(error) or self.closing or self.clock() >= until:
                    raise
                if not warned:
                    warned = True
                    log.warning("%s: cannot read the start positions, retrying (%s)", self.name, self._text(failure))
                if error.code() == KafkaError._UNKNOWN_PARTITION:
                    raise _UnknownPartition from None
                self.serve(until)

    def _add(self, partition_id: PartitionId, start: StartPosition, incarnation: str) -> Assignment:
        partition = Partition(partition_id, READER, incarnation, floor=start.floor, completed=start.completed)
        self._presumed_lost.pop(partition_id, None)
        assignment = self.owned[partition_id] = Assignment(partition, start.floor, self.rebalances)
        self.snapshots.own(self.owned)
        return assignment

    def _commit_starts(self, client: Consumer, *, decided: Collection[PartitionId] = ()) -> None:
        """Commit new start positions, so that a later run starts from the same positions.

        The call also retries commits of start positions that failed earlier. The call skips a partition that already
        has a committed position.

        Args:
            client: The client.
            decided: Partitions of this member whose positions the caller has just read; empty = only retry failed
                commits.
        """
        if not self._uncommitted_starts or (not decided and self.clock() < self._commit_starts_at):
            return
        # Other members may have committed start positions meanwhile. This member may have done so after a failed
        # commit.
        asked = [TopicPartition(*one) for one in self._uncommitted_starts if one not in decided]
        try:
            known = client.committed(asked, QUERY_TIMEOUT) if asked else []
            committed = {PartitionId(each.topic, each.partition) for each in known if each.offset >= 0}
            starts = self._uncommitted_starts.items()
            offsets = [TopicPartition(*one, floor) for one, floor in starts if one not in committed]
            if offsets:
                client.commit(offsets=offsets, asynchronous=False)
            self._uncommitted_starts.clear()
        except KafkaException as failure:
            self._commit_starts_at = self.clock() + _COMMIT_STARTS_EVERY
            log.warning("%s: cannot commit the start positions, retrying (%s)", self.name, self._text(failure))

    def _move_into_range(self, client: Consumer, *, again: bool = False) -> None:
        if not self._out_of_range or (again and self.clock() < self._ask_bounds_at):
            return
        strays = {each: offset for each, offset in self._out_of_range.items() if self.owns(each.partition)}
        self._out_of_range = {}
        try:
            targets = self._targets(client, strays) if strays else {}
        except SourceError as error:
            self.fail(error)
        except KafkaException as failure:
            if is_permanent(failure.args[0]):
                self.fail(self._fatal_error("reading the offset range of a log failed", failure))
                return
            if not again:
                log.warning("%s: cannot read the log's offset range, retrying (%s)", self.name, self._text(failure))
            self._out_of_range, self._ask_bounds_at = strays, self.clock() + _ASK_BOUNDS_EVERY
        else:
            for each, target in targets.items():
                self._move(client, each, target)

    def _targets(self, client: Consumer, strays: dict[Assignment, int]) -> dict[Assignment, int]:
        lows, highs = log_bounds(client, [each.partition.id for each in strays])
        rule, targets = self.config.out_of_range, {}
        for each, offset in strays.items():
            one = each.partition.id
            targets[each] = position_in_range(one, offset, lows[one], highs[one], rule, self.name)
        return targets

    def _move(self, client: Consumer, assignment: Assignment, target: int) -> None:
        if target >= assignment.position:
            # The engine treats the skipped offsets as a gap, like deleted messages.
            self._assign_again(client, assignment, target)
            return
        # Positions must rise within one assignment, so the move to a lower position makes a new assignment.
        self._lose([assignment], "its log was truncated and is read again from an earlier offset")
        incarnation = self.topics.id_of(assignment.partition.id.source)
        started = self._add(assignment.partition.id, StartPosition(target, [], uncommitted=True), incarnation)
        self._assign_again(client, started, target)
        self.deliver([Assigned(started.partition)])

    def _assign_again(self, client: Consumer, assignment: Assignment, target: int) -> None:
        # The client refuses to seek a partition without a valid fetch position.
        assignment.position = target
        if self.config.protocol == "eager":
            owned = [each for each in self.owned.values() if not each.released]
            client.assign([each.at(each.position) for each in owned])
        else:
            owned = [assignment]
            client.incremental_unassign([assignment.at()])
            client.incremental_assign([assignment.at(target)])
        self.set_paused(client, [each for each in owned if each.paused], True)
        self.set_paused(client, [each for each in owned if not each.paused], self.is_full())

    def apply_pauses(
        self, client: Consumer, to_pause: frozenset[Partition], paused: frozenset[Partition], *, resume: bool = True
    ) -> None:
        """Tell the client to pause ``to_pause`` and the released partitions.

        With ``resume``, tell the client to resume all other partitions.

        Args:
            client: The client.
            to_pause: Partitions to pause.
            paused: Partitions that the call does not resume.
            resume: Whether to resume the owned partitions in neither ``to_pause`` nor ``paused``.
        """
        owned = self.owned.values()
        unpaused = [each for each in owned if not each.paused]
        self.set_paused(client, [each for each in unpaused if each.released or each.partition in to_pause], True)
        if resume:
            kept = to_pause | paused
            resumed = [each for each in owned if each.paused and not each.released and each.partition not in kept]
            self.set_paused(client, resumed, False)

    def set_paused(self, client: Consumer, assignments: list[Assignment], paused: bool) -> None:
        """Tell the client to pause or resume these partitions."""
        if assignments:
            (client.pause if paused else client.resume)([each.at() for each in assignments])
            for each in assignments:
                each.paused = paused

    def _leaving(self, partitions: Sequence[TopicPartition]) -> list[Assignment]:
        ids = [PartitionId(each.topic, each.partition) for each in partitions]
        for one in ids:
            self._presumed_lost.pop(one, None)
            self._postponed.discard(one)
        return [self.owned[one] for one in ids if one in self.owned]

    def _lose(self, assignments: list[Assignment], reason: str) -> None:
        self._forget(assignments)
        lost = [Lost(each.partition, reason) for each in assignments if not each.released]
        if lost:
            self.deliver(lost)

    def _forget(self, assignments: list[Assignment]) -> None:
        for each in assignments:
            if self.owned.get(each.partition.id) is each:
                del self.owned[each.partition.id]
        self.snapshots.own(self.owned)

    def _fatal_error(self, what: str, error: Exception) -> SourceError:
        return fatal_error(f"{self.name}: {what}", error, self.config.client)

    def _text(self, failure: KafkaException) -> str:
        return client_message(failure.args[0], self.config.client)
