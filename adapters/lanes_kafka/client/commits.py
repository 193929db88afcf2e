"""Commits of one client: sent without waiting, answered when the broker answers, given up after a while.

The broker checks membership, never ownership or direction: that only owned partitions are committed is looked after
here, at the last moment before a commit leaves; that positions rise is the engine's.

In a topic that was deleted and made anew the same positions are those of other messages, the broker takes a commit of
them, and no callback may tell. A client that fetches when the new topic has grown past its position reads on there. So
what was read before a commit was due is of the topic whose id is told behind that, or is not committed. Without an
answer nothing is committed: what was finished runs again, where else messages of the new topic would be passed over.

Two gaps are left. A commit that was sent may be repeated by the client itself within about half a second, onto the new
topic: a position of the old one, behind which the source stops loudly. And the answer is what one broker knows, which
may lag behind the others.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from lanes.clock import Clock
from lanes.core.offset_map import LIMIT, decode, encode
from lanes.core.types import Partition, PartitionId, Settlement
from lanes.errors import SourceError
from lanes_kafka.bridge import Answer
from lanes_kafka.broker import metadata_limit
from lanes_kafka.client.group import Group
from lanes_kafka.client.topics import Topics
from lanes_kafka.errors import ErrorLog, said, words

log = logging.getLogger("lanes.kafka")

COMMIT_TIMEOUT: Final = 10.0
"""Seconds after which a commit that was not answered counts as not made."""

_BLOCKS_FOR: Final = 5.0
"""Seconds that a commit in a callback may take, the question about its topics included."""

_DOWN_FOR: Final = 1.0
"""Seconds of that while no broker is reached, as far as is known."""

Kind = Literal["retry", "lost", "metadata", "permanent"]

# Not ILLEGAL_GENERATION and STALE_MEMBER_EPOCH: those tell a member of a rebalance that is under way, in which it keeps
# what is not revoked from it. One that was left out of a rebalance is no member any more. What ends a client for good
# is said beside its messages, and decided there.
_LOST: Final = frozenset(
    {
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.FENCED_MEMBER_EPOCH,
        KafkaError._FATAL,
    }
)
_PERMANENT: Final = frozenset(
    {
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.INVALID_GROUP_ID,
        KafkaError.UNSUPPORTED_VERSION,
    }
)


def kind_of(error: KafkaError) -> Kind:
    """What an error of a commit means.

    ``"lost"``: this process is no member any more, so nothing of it is committed. ``"metadata"``: the broker takes less
    metadata. ``"permanent"``: it will never be taken. ``"retry"``: anything else, unknown codes included, for a commit
    that is repeated does no harm.
    """
    code = error.code()
    if code in _LOST or error.fatal():
        return "lost"
    if code == KafkaError.OFFSET_METADATA_TOO_LARGE:
        return "metadata"
    return "permanent" if code in _PERMANENT else "retry"


def metadata_room(admin: AdminClient, name: str) -> int:
    """UTF-16 units of commit metadata that the broker takes beside the client's NUL, 0 … ``LIMIT``; ``LIMIT`` where it
    does not say: a commit finds out. Says where that carries nothing. Blocks for up to 5 seconds."""
    try:
        allowed = metadata_limit(admin)
    except SourceError as failure:
        log.info("%s: how much commit metadata the broker takes is not known: %s", name, failure)
        return LIMIT
    if allowed is None:
        return LIMIT
    room = max(0, min(LIMIT, allowed - 1))
    if carries(room):
        return room
    log.warning(
        "%s: the broker's offset.metadata.max.bytes=%d carries nothing of what is completed above a position: a drain "
        "also runs what is queued below the highest that was started, and takes longer; raise it to 4096",
        name,
        allowed,
    )
    return 0


def carries(room: int) -> bool:
    """Whether so much commit metadata has room for anything that is completed."""
    return bool(encode(0, [(1, 2)], room))


class Commit:
    """What is committed together; ``answer`` is given once for all of it. ``releases``: a partition of which it is the
    last one."""

    __slots__ = ("answer", "deadline", "offsets", "releases", "settlements")

    def __init__(self, settlements: Sequence[Settlement], answer: Answer, releases: Partition | None = None) -> None:
        self.settlements = settlements
        self.answer = answer
        self.releases = releases
        self.deadline = 0.0
        self.offsets: list[TopicPartition] = []

    def __repr__(self) -> str:
        return f"<Commit of {len(self.settlements)} partitions>"


class Commits:
    """The commits of one client, used in the thread that owns it.

    ``owns``: whether a partition may still be committed. ``lost``: called when the broker says that this process is no
    member any more. ``settings``: whose secrets are not shown. ``limit``: UTF-16 units of metadata that the broker
    takes, as far as is known; 0 = none.
    ``degraded``: completed sets that did not fit; that is said once.
    """

    def __init__(
        self,
        owns: Callable[[Partition], bool],
        lost: Callable[[str], None],
        clock: Clock,
        name: str,
        settings: Mapping[str, Any],
        limit: int = LIMIT,
    ) -> None:
        self.limit = limit
        self.degraded = 0
        self._told = False
        self._owns = owns
        self._lost = lost
        self._clock = clock
        self._name = name
        self._settings = settings
        self._under_way: dict[PartitionId, Commit] = {}

    @property
    def under_way(self) -> bool:
        """Whether an answer is awaited."""
        return bool(self._under_way)

    def send(self, client: Consumer, commit: Commit, *, timeout: float | None = None) -> None:
        """Send one. ``timeout``: block so many seconds at most until it is made, in a callback of the client, while
        which no answer comes."""
        if commit.answer.given_up:
            return
        if not all(self._owns(each.partition) for each in commit.settlements):
            # The loss may have been reported and not been heard yet.
            gone = f"{self._name}: a partition was given up meanwhile: nothing of it is committed any more"
            commit.answer.give(SourceError(gone, retryable=True))
            return
        # What it has waited for before counts.
        commit.deadline = commit.deadline or self._clock() + COMMIT_TIMEOUT
        commit.offsets = [self._offset(each) for each in commit.settlements]
        try:
            client.commit(offsets=commit.offsets, asynchronous=True)
            if timeout is None:
                self._under_way |= dict.fromkeys([each.partition.id for each in commit.settlements], commit)
            elif _is_made(client, commit, timeout):
                commit.answer.give()
            else:
                # It was refused: this waits for as long as it takes, on a broker that has answered just now, and says
                # why.
                answered = client.commit(offsets=commit.offsets, asynchronous=False)
                self._answered(commit, _error_of(None, answered or ()))
        except KafkaException as failure:
            self._answered(commit, failure.args[0])
        except RuntimeError as failure:
            why = words(failure, self._settings)
            commit.answer.give(SourceError(f"{self._name}: not committed: {why}", retryable=True))

    def _offset(self, settlement: Settlement) -> TopicPartition:
        partition_id, floor = settlement.partition.id, settlement.floor
        assert floor is not None, "a source that commits gets positions"
        if not self.limit or not settlement.completed:
            return TopicPartition(*partition_id, floor)
        text = encode(floor, settlement.completed, self.limit)
        kept = decode(text, floor, 1 << 63)
        if not kept or kept[-1][1] < settlement.completed[-1][1]:
            self._degrade()
        return TopicPartition(*partition_id, floor, text)

    def on_commit(self, error: KafkaError | None, offsets: Sequence[TopicPartition]) -> None:
        """The client's callback for a commit that was sent without waiting."""
        for offset in offsets:
            commit = self._under_way.get(PartitionId(offset.topic, offset.partition))
            # Not the answer of an older one, which counts as not made. Of one that says the same both are made.
            if commit is not None and any(_said_by(each) == _said_by(offset) for each in commit.offsets):
                self._forget(commit)
                # One bad partition spoils the report of the others: then nothing is known of any of them.
                self._answered(commit, _error_of(error, offsets))

    def recall(self) -> list[Commit]:
        """Forget what was sent and not answered, and return it, to be sent again: while a callback of the client runs
        no answer comes."""
        commits = list(dict.fromkeys(self._under_way.values()))
        self._under_way.clear()
        return commits

    def expire(self, now: float) -> None:
        """Give up on what was not answered in time."""
        for commit in [each for each in self._under_way.values() if each.deadline <= now]:
            self._forget(commit)
            late = f"{self._name}: a commit was not answered within {COMMIT_TIMEOUT:g} s"
            commit.answer.give(SourceError(late, retryable=True))

    def abandon(self, reason: str) -> None:
        """Give up on everything that was sent."""
        for commit in list(self._under_way.values()):
            self._forget(commit)
            commit.answer.give(SourceError(f"{self._name}: a commit was not answered: {reason}", retryable=True))

    def _forget(self, commit: Commit) -> None:
        # Of one that was given up, and sent again in part, a newer commit may be under way.
        self._under_way = {one: each for one, each in self._under_way.items() if each is not commit}

    def _answered(self, commit: Commit, error: KafkaError | None) -> None:
        if error is None:
            commit.answer.give()
            return
        kind = kind_of(error)
        if kind == "lost":
            self._lost(f"a commit was refused: {error.name()}")
        elif kind == "metadata":
            self._shrink()
        where = ", ".join(sorted(str(each.partition.id) for each in commit.settlements))
        commit.answer.give(
            SourceError(
                f"{self._name}: {where}: not committed: {said(error, self._settings)}", retryable=kind != "permanent"
            )
        )

    def _shrink(self) -> None:
        self.limit //= 2
        self._degrade()

    def _degrade(self) -> None:
        self.degraded += 1
        if not self._told:
            self._told = True
            log.warning(
                "%s: the broker's offset.metadata.max.bytes leaves no room for all that is completed above a position: "
                "from now on a next owner is told of as much as fits, and repeats the rest; raise it, or lower "
                "max_ahead, or pass commit_metadata=False",
                self._name,
            )


class Vetting:
    """The commits of one client; used in the thread that owns it. True while one waits for an answer about its topics.

    One question is under way at a time: the next one is for all that became due meanwhile.
    """

    def __init__(
        self, topics: Topics, group: Group, commits: Commits, errors: ErrorLog, clock: Clock, name: str
    ) -> None:
        self._topics = topics
        self._group = group
        self._commits = commits
        self._errors = errors
        self._clock = clock
        self._name = name
        self._waiting: deque[tuple[int, Commit]] = deque()
        self._checked = topics.answered

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def commit(self, client: Consumer, commit: Commit, *, until: float | None) -> None:
        """Have one sent. ``until``: in a callback of the client, which has to end at that time of the clock: now, and
        block for its answer, for 5 seconds at most. None = in none: ``look`` sends it."""
        if commit.answer.given_up or not all(self._group.owns(each.partition) for each in commit.settlements):
            # It is refused without a word to the broker.
            self._send(client, commit)
        elif until is not None:
            self._commit_now(client, commit, until)
        elif _has_ids(commit):
            commit.deadline = self._clock() + COMMIT_TIMEOUT
            self._waiting.append((self._topics.question(), commit))
        else:
            self._send(client, commit)

    def look(self, client: Consumer) -> None:
        """Take in what was answered, send what that lets go, and give up on what has waited for too long. Does not
        block."""
        self._commits.expire(self._clock())
        if self._topics.look():
            self._errors.answered()
        self._check()
        while self._waiting and self._waiting[0][0] <= self._topics.answered:
            self._send(client, self._waiting.popleft()[1])
        while self._waiting and self._waiting[0][1].deadline <= self._clock():
            self._refuse(self._waiting.popleft()[1])

    def repeat(self, client: Consumer, until: float) -> None:
        """Have all sent again that has no answer yet, in a callback of the client, which has to end at that time: while
        it runs none comes. What this raises is their answer, too."""
        recalled = self.recall()
        try:
            for commit in recalled:
                self.commit(client, commit, until=until)
        except BaseException as error:
            # Of one that was answered the first answer counts.
            for commit in recalled:
                why = self._errors.words(error)
                commit.answer.give(SourceError(f"{self._name}: not committed: {why}", retryable=True))
            raise

    def recall(self) -> list[Commit]:
        """Forget what has no answer yet, and return it."""
        waiting, self._waiting = self._waiting, deque()
        return [*self._commits.recall(), *(commit for _, commit in waiting)]

    def abandon(self, reason: str) -> None:
        """Give up on everything."""
        waiting, self._waiting = self._waiting, deque()
        for _, commit in waiting:
            commit.answer.give(SourceError(f"{self._name}: a commit was not sent: {reason}", retryable=True))
        self._commits.abandon(reason)

    def _commit_now(self, client: Consumer, commit: Commit, until: float) -> None:
        deadline = min(self._clock() + (_DOWN_FOR if self._errors.down else _BLOCKS_FOR), until)
        answered = self._topics.wait(deadline - self._clock())
        self._check()
        if answered:
            self._errors.answered()
        elif self._errors.down:
            unreached = f"{self._name}: not committed: no broker is reached"
            commit.answer.give(SourceError(unreached, retryable=True))
            self._over(commit)
            return
        elif _has_ids(commit):
            self._refuse(commit)
            return
        self._send(client, commit, timeout=max(0.0, deadline - self._clock()))

    def _check(self) -> None:
        # Not only what this took in: whoever else waits for the ids does, too.
        if self._checked != self._topics.answered:
            self._checked = self._topics.answered
            self._group.check_topics()

    def _send(self, client: Consumer, commit: Commit, *, timeout: float | None = None) -> None:
        self._commits.send(client, commit, timeout=timeout)
        self._over(commit)

    def _refuse(self, commit: Commit) -> None:
        unknown = (
            f"{self._name}: not committed: the broker did not say in time whether the topics are what they were, and "
            "positions of one that was made anew are those of other messages"
        )
        commit.answer.give(SourceError(unknown, retryable=True))
        self._over(commit)

    def _over(self, commit: Commit) -> None:
        if commit.releases is not None:
            self._group.release(commit.releases)


def _has_ids(commit: Commit) -> bool:
    """A broker that is too old has none to tell."""
    return any(each.partition.incarnation for each in commit.settlements)


def _is_made(client: Consumer, commit: Commit, timeout: float) -> bool:
    """Whether the broker has what was sent before this. It answers one client in the order it was asked.

    Blocks for ``timeout`` seconds at most. Raises ``KafkaException`` where it does not answer.
    """
    found = client.committed([TopicPartition(each.topic, each.partition) for each in commit.offsets], timeout=timeout)
    return all(_is_same(*pair) for pair in zip(found, commit.offsets, strict=True))


def _is_same(one: TopicPartition, other: TopicPartition) -> bool:
    return one.error is None and _said_by(one) == _said_by(other)


def _said_by(offset: TopicPartition) -> tuple[str, int, int, str]:
    return offset.topic, offset.partition, offset.offset, offset.metadata or ""


def _error_of(error: KafkaError | None, offsets: Sequence[TopicPartition]) -> KafkaError | None:
    if error is not None:
        return error
    return next((offset.error for offset in offsets if offset.error is not None), None)
