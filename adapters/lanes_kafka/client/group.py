"""What a client owns in its group, and the callbacks by which it hears of that.

Everything here runs in the thread that owns the client, most of it inside a call of ``consume`` or ``close``. No
callback raises: an error becomes the failure of the source.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from lanes.clock import Clock
from lanes.core.types import Partition, PartitionId
from lanes.errors import SourceError
from lanes.source import Assigned, Lost, Revoking, SourceEvent
from lanes_kafka.client.offsets import QUERY_TIMEOUT, Beginning, beginnings, bounds, moved
from lanes_kafka.client.records import READER
from lanes_kafka.client.topics import Topics
from lanes_kafka.config import ClientConfig
from lanes_kafka.errors import ended_by, is_permanent, said

log = logging.getLogger("lanes.kafka")

OF_POLL_INTERVAL: Final = 0.8
"""What a drain may take of ``max.poll.interval.ms``, with its last commit and its release; the rest is a margin."""

_READOPT_AFTER: Final = 5.0
"""Seconds without a callback after which a partition that was presumed lost, and that the client says it owns, is."""

_DECIDE_EVERY: Final = 5.0
"""Seconds between two tries to commit where a group begins."""

_ASK_BOUNDS_EVERY: Final = 5.0
"""Seconds between two questions what a log has that does not reach where it is read: each may block for some, too."""

_LOOK_TIMEOUT: Final = 1.0
"""Seconds that the second of them waits to hear whether something is committed by now."""

_TOPIC_PATIENCE: Final = 2.0
"""Seconds that an assignment waits for the ids of its topics."""

_PATIENCE: Final = 60.0
"""Seconds for which the broker is asked where to begin, at most: it may be about to start."""


class Assignment:
    """``partition`` until it is revoked or lost.

    ``position``: next to be delivered, so whatever comes below it was delivered before. ``end``: behind the last
    message that was read. ``paused``: what the client was told last. ``drained``: nothing of it is delivered any more;
    ``returning``: it is being given back by us, in a call in which callbacks may come; ``released``: it was given back,
    and nothing is committed any more either. ``made``: in which round of callbacks it was made.
    """

    __slots__ = ("drained", "end", "made", "partition", "paused", "position", "released", "returning")

    def __init__(self, partition: Partition, position: int, made: int) -> None:
        self.partition = partition
        self.position = self.end = position
        self.made = made
        self.paused = False
        self.drained = self.returning = self.released = False

    def at(self, offset: int | None = None) -> TopicPartition:
        """It as the client names it, with a position."""
        return TopicPartition(*self.partition.id) if offset is None else TopicPartition(*self.partition.id, offset)

    def __repr__(self) -> str:
        return f"<Assignment {self.partition.id} at {self.position}>"


class Group:
    """The assignments of one client.

    ``tell`` takes events for the event loop. ``serve``: perform for a moment what the loop asks for while a callback
    waits, which has to end at that time of the clock. ``fail``: the source cannot go on. ``starved``: whether there is
    no room for messages. ``owned``: by partition, until revoked or lost. ``closing``: set before the client is closed;
    nothing is taken any more. ``rounds`` counts the callbacks that changed something.
    """

    def __init__(
        self,
        config: ClientConfig,
        topics: Topics,
        tell: Callable[[Sequence[SourceEvent]], None],
        serve: Callable[[float], None],
        fail: Callable[[SourceError], None],
        clock: Clock,
        name: str,
        *,
        starved: Callable[[], bool],
        hands_over: bool,
    ) -> None:
        self._starved = starved
        self.owned: dict[PartitionId, Assignment] = {}
        self.closing = False
        self.rounds = 0
        self.hands_over = hands_over
        self._config = config
        self._topics = topics
        self._tell = tell
        self._serve = serve
        self._fail = fail
        self._clock = clock
        self._name = name
        self._presumed: dict[PartitionId, float] = {}
        self._undecided: dict[PartitionId, int] = {}
        self._decide_at = 0.0
        self._astray: dict[Assignment, int] = {}
        self._ask_bounds_at = 0.0

    def owns(self, partition: Partition) -> bool:
        """Whether it may be committed: owned, and not given back."""
        assignment = self.owned.get(partition.id)
        return assignment is not None and assignment.partition is partition and not assignment.released

    # --- callbacks

    def on_assign(self, client: Consumer, partitions: Sequence[TopicPartition]) -> None:
        """Begin with these. The client is told where, and what is paused, before anything of them is read."""
        self.rounds += 1
        if self.closing:
            return
        try:
            ids = [PartitionId(each.topic, each.partition) for each in partitions]
            if ids:
                # Of the topic there is now: it may have been created anew since the last look.
                self._topics.wait(_TOPIC_PATIENCE)
                for name in dict.fromkeys(one.source for one in ids):
                    self._topics.appears(name, _TOPIC_PATIENCE)
                self.check_topics()
                self._begin(client, ids)
            self.readopt(client, at_once=True)
        except SourceError as error:
            self._fail(error)
        except Exception as error:
            self._fail(self._ended_by("assigning partitions failed", error))

    def on_revoke(self, client: Consumer, partitions: Sequence[TopicPartition]) -> None:
        """Have these drained, and wait for that up to 0.8 of ``max.poll.interval.ms``."""
        self.rounds += 1
        leaving = self._taken(partitions)
        for each in partitions:
            self._presumed.pop(PartitionId(each.topic, each.partition), None)
        if self.closing:
            return
        try:
            waiting = [each for each in leaving if not each.released and not each.returning]
            limit = OF_POLL_INTERVAL * self._config.max_poll_interval
            self._tell([Revoking(each.partition, limit) for each in waiting])
            until = self._clock() + limit
            # Released is forgotten; so is what is lost meanwhile, and what a stop gives back.
            while any(self._still(each) for each in waiting) and not self.closing and self._clock() < until:
                self._serve(until)
            self._lose([each for each in waiting if self._still(each)], f"it was not released within {limit:g} s")
        except Exception as error:
            self._fail(self._ended_by("revoking partitions failed", error))
        finally:
            self._forget(leaving)

    def on_lost(self, client: Consumer, partitions: Sequence[TopicPartition]) -> None:
        """Give these up: they are somebody else's already, and nothing of them is committed."""
        self.rounds += 1
        for each in partitions:
            self._presumed.pop(PartitionId(each.topic, each.partition), None)
        self._lose(self._taken(partitions), "the group gave it up, or gave it to another member")

    # --- between callbacks

    def drained(self, partition: Partition) -> None:
        """Nothing of it is delivered any more. Idempotent."""
        assignment = self.owned.get(partition.id)
        if assignment is not None and assignment.partition is partition:
            assignment.drained = True

    def release(self, partition: Partition) -> None:
        """It is drained, and nothing of it is committed any more. Idempotent."""
        assignment = self.owned.get(partition.id)
        if assignment is not None and assignment.partition is partition:
            assignment.drained = assignment.released = True

    def lose_all(self, reason: str, *, presumed: bool = False) -> None:
        """Give everything up. ``presumed``: until the client says whether that is so, by a callback or by none."""
        if presumed:
            now = self._clock()
            self._presumed |= dict.fromkeys(self.owned, now)
        self._lose(list(self.owned.values()), reason)

    def readopt(self, client: Consumer, *, at_once: bool = False) -> None:
        """Begin anew with what was presumed lost, is still the client's, and was not heard of for a while; and commit
        where the group begins, and go on where the log did not reach, if that has failed.

        May block for the broker. Raises ``KafkaException`` when it does not answer.
        """
        self._decide(client, again=True)
        self._go_on(client, again=True)
        now = self._clock()
        due = [one for one, since in self._presumed.items() if at_once or now - since >= _READOPT_AFTER]
        if not due or self.closing:
            return
        mine = {PartitionId(each.topic, each.partition) for each in client.assignment()}
        for partition_id in due:
            del self._presumed[partition_id]
        self._begin(client, [one for one in due if one in mine and one not in self.owned], known=True)

    def out_of_range(self, client: Consumer, partition_id: PartitionId, offset: int) -> None:
        """The log does not reach where a partition is read: go on where the rule says, or fail. Nothing of it comes
        until the broker has said what the log has: that is asked again by ``readopt``."""
        assignment = self.owned.get(partition_id)
        if assignment is not None:
            self._astray[assignment] = offset
            self._go_on(client)

    def check_topics(self) -> None:
        """Fail when the offsets of a topic mean other messages than they did, as far as is known."""
        for assignment in self.owned.values():
            name = assignment.partition.id.source
            what = self._topics.change(name, assignment.partition.incarnation)
            if what is not None:
                self.lose_all(f"topic {name!r} is not what it was")
                self._fail(
                    SourceError(
                        f"{self._name}: topic {name!r} was {what} while it was read: its offsets mean other messages. "
                        "Nothing more is committed. Check what the group has committed for it, reset that where it is "
                        "of the old topic, and start again"
                    )
                )
                return

    # --- inside

    def _begin(self, client: Consumer, ids: list[PartitionId], *, known: bool = False) -> None:
        """``known``: the client has these, and is told to go back to where to begin."""
        if not ids:
            return
        # An id that is older than the position: where the topic is made anew in between, it is found to be another.
        topic_ids = {one.source: self._topics.id_of(one.source) for one in ids}
        found = self._beginnings(client, ids)
        begun = [self._announce(one, found[one], topic_ids[one.source]) for one in ids]
        offsets = [each.at(each.position) for each in begun]
        if known:
            for offset in offsets:
                client.seek(offset)
        elif self._config.protocol == "eager":
            client.assign(offsets)
        else:
            client.incremental_assign(offsets)
        # A pause belongs to the client, not to an assignment.
        self._pause_or_resume(client, begun)
        self._undecided |= {one: found[one].floor for one in found if found[one].decided}
        self._decide(client)
        self._tell([Assigned(each.partition) for each in begun])

    def _beginnings(self, client: Consumer, ids: list[PartitionId]) -> dict[PartitionId, Beginning]:
        config = self._config
        sizes = {name: topic.partitions for name, topic in self._topics.known.items()}
        until = self._clock() + min(_PATIENCE, OF_POLL_INTERVAL * config.max_poll_interval)
        told = False
        while True:
            try:
                return beginnings(
                    client,
                    ids,
                    start=config.start,
                    sizes=sizes,
                    out_of_range=config.out_of_range,
                    hands_over=self.hands_over,
                    name=self._name,
                )
            except KafkaException as failure:
                error = failure.args[0]
                if is_permanent(error) or self.closing or self._clock() >= until:
                    raise
                if not told:
                    told = True
                    why = self._said(failure)
                    log.warning("%s: the broker does not say where to begin, asking on: %s", self._name, why)
                if error.code() == KafkaError._UNKNOWN_PARTITION:
                    # The coordinator may know of partitions that were added lately before this client does.
                    with contextlib.suppress(KafkaException):
                        client.list_topics(timeout=QUERY_TIMEOUT)
                self._serve(until)

    def _announce(self, partition_id: PartitionId, beginning: Beginning, incarnation: str) -> Assignment:
        partition = Partition(partition_id, READER, incarnation, floor=beginning.floor, completed=beginning.completed)
        self._presumed.pop(partition_id, None)
        assignment = self.owned[partition_id] = Assignment(partition, beginning.floor, self.rounds)
        return assignment

    def _decide(self, client: Consumer, *, again: bool = False) -> None:
        """Commit where the group begins: that is decided once, however its first run ends. ``again``: unless something
        is committed by now, which may be beyond it."""
        if not self._undecided or (again and self._clock() < self._decide_at):
            return
        # Of what others own, too: they may have begun by now, and have gone on.
        asked = [TopicPartition(*one) for one in self._undecided if again or one not in self.owned]
        try:
            known = client.committed(asked, QUERY_TIMEOUT) if asked else []
            decided = {PartitionId(each.topic, each.partition) for each in known if each.offset >= 0}
            offsets = [TopicPartition(*each, floor) for each, floor in self._undecided.items() if each not in decided]
            if offsets:
                client.commit(offsets=offsets, asynchronous=False)
            self._undecided.clear()
        except KafkaException as failure:
            self._decide_at = self._clock() + _DECIDE_EVERY
            why = self._said(failure)
            log.warning("%s: where the group begins is not committed yet, again soon: %s", self._name, why)

    def _go_on(self, client: Consumer, *, again: bool = False) -> None:
        if not self._astray or (again and self._clock() < self._ask_bounds_at):
            return
        astray = {each: offset for each, offset in self._astray.items() if self._still(each)}
        self._astray = {}
        try:
            targets = self._targets(client, astray) if astray else {}
        except SourceError as error:
            self._fail(error)
        except KafkaException as failure:
            if is_permanent(failure.args[0]):
                self._fail(self._ended_by("asking what the log has failed", failure))
                return
            if not again:
                why = self._said(failure)
                log.warning("%s: the broker does not say what its log has, asking on: %s", self._name, why)
            self._astray, self._ask_bounds_at = astray, self._clock() + _ASK_BOUNDS_EVERY
        else:
            for each, target in targets.items():
                self._move(client, each, target)

    def _targets(self, client: Consumer, astray: dict[Assignment, int]) -> dict[Assignment, int]:
        lows, highs = bounds(client, [each.partition.id for each in astray])
        rule, name = self._config.out_of_range, self._name
        return {
            each: moved(each.partition.id, offset, lows[each.partition.id], highs[each.partition.id], rule, name)
            for each, offset in astray.items()
        }

    def _move(self, client: Consumer, assignment: Assignment, target: int) -> None:
        if target >= assignment.position:
            # A gap in the offsets, as any other.
            self._assign_again(client, assignment, target)
            return
        # Within one assignment positions only rise.
        self._lose([assignment], "its log was truncated, and is read again from an earlier offset")
        incarnation = self._topics.id_of(assignment.partition.id.source)
        begun = self._announce(assignment.partition.id, Beginning(target, [], decided=True), incarnation)
        self._assign_again(client, begun, target)
        self._tell([Assigned(begun.partition)])

    def _assign_again(self, client: Consumer, assignment: Assignment, target: int) -> None:
        # The client refuses to seek a partition that has nowhere to read.
        assignment.position = target
        if self._config.protocol == "eager":
            owned = [each for each in self.owned.values() if not each.released]
            client.assign([each.at(each.position) for each in owned])
        else:
            owned = [assignment]
            client.incremental_unassign([assignment.at()])
            client.incremental_assign([assignment.at(target)])
        self._pause_or_resume(client, [each for each in owned if not each.paused])
        self.pause(client, [each for each in owned if each.paused])

    def _pause_or_resume(self, client: Consumer, assignments: list[Assignment]) -> None:
        if self._starved():
            self.pause(client, assignments)
        else:
            self.resume(client, assignments)

    def rest(
        self, client: Consumer, resting: frozenset[Partition], paused: frozenset[Partition], *, resume: bool = True
    ) -> None:
        """Have the client hand out nothing of what is ``resting`` or released, and, with ``resume``, all the others but
        the ``paused``, which stay as they are."""
        owned = self.owned.values()
        self.pause(client, [each for each in owned if not each.paused and (each.released or each.partition in resting)])
        if resume:
            kept = resting | paused
            rested = [each for each in owned if each.paused and not each.released and each.partition not in kept]
            self.resume(client, rested)

    def pause(self, client: Consumer, assignments: list[Assignment]) -> None:
        """Have the client hand out nothing of these."""
        if assignments:
            client.pause([each.at() for each in assignments])
            for each in assignments:
                each.paused = True

    def resume(self, client: Consumer, assignments: list[Assignment]) -> None:
        """Have the client hand out what there is of these."""
        if assignments:
            client.resume([each.at() for each in assignments])
            for each in assignments:
                each.paused = False

    def _taken(self, partitions: Sequence[TopicPartition]) -> list[Assignment]:
        ids = [PartitionId(each.topic, each.partition) for each in partitions]
        return [self.owned[one] for one in ids if one in self.owned]

    def _still(self, assignment: Assignment) -> bool:
        return self.owned.get(assignment.partition.id) is assignment and not assignment.released

    def _lose(self, assignments: list[Assignment], reason: str) -> None:
        self._forget(assignments)
        lost = [Lost(each.partition, reason) for each in assignments if not each.released]
        if lost:
            self._tell(lost)

    def _forget(self, assignments: list[Assignment]) -> None:
        for each in assignments:
            if self.owned.get(each.partition.id) is each:
                del self.owned[each.partition.id]

    def _ended_by(self, what: str, error: Exception) -> SourceError:
        return ended_by(f"{self._name}: {what}", error, self._config.client)

    def _said(self, failure: KafkaException) -> str:
        return said(failure.args[0], self._config.client)
