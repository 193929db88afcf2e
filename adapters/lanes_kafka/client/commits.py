"""Commits the positions of one client. If the broker has topic ids, a commit waits for a check of its topic ids.

For a commit, the broker checks that the client is a member. The broker checks neither that the client owns the
partition nor that the position rises. Therefore ``Commits`` checks, immediately before a send, that this client still
owns every partition. The engine guarantees that positions rise.

``TopicIdCheck`` delays a commit until the broker has confirmed the ids of the commit's topics. In a topic that a user
deleted and created again, the same positions mean other messages. The broker accepts commits of such positions. The
client reports no such change by a callback. When the new topic has grown past the client's position, the client
continues in the new topic. ``TopicIdCheck`` therefore sends a commit with topic ids only after the broker has confirmed
the same ids. The confirming request must be newer than the commit. Without this confirmation the source commits no
position, because a commit could skip messages of the new topic. Handlers may then repeat finished messages.

Two gaps remain. First, the client may repeat a commit within about half a second, and the new topic may receive the
repeated commit. The source then finds a position of the old topic, and stops with an error. Second, the broker that
confirms the ids may not know the new topic yet.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

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
from lanes_kafka.errors import NOT_ALLOWED, ErrorLog, client_message, exception_text

log = logging.getLogger("lanes.kafka")

COMMIT_TIMEOUT: Final = 10.0
"""Seconds after which an unanswered commit counts as failed."""

_CALLBACK_TIMEOUT: Final = 5.0
"""Seconds allowed for a commit inside a callback, including the request for the topic ids."""

_CALLBACK_TIMEOUT_WHEN_DOWN: Final = 1.0
"""Seconds allowed for a commit inside a callback while the client reports that no broker is reachable."""

# ILLEGAL_GENERATION and STALE_MEMBER_EPOCH are missing: they report a running rebalance, in which a member keeps all
# partitions that are not revoked. A member outside the new group gets UNKNOWN_MEMBER_ID. ``consume`` returns the errors
# that end the client among its messages.
_LOST: Final = frozenset(
    {
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.FENCED_MEMBER_EPOCH,
        KafkaError._FATAL,
    }
)
"""Error codes of a commit by a former member of the group, which no retry can repair."""

# The engine retries a commit with any other error code, because a repeated commit is harmless.
_PERMANENT: Final = NOT_ALLOWED | {KafkaError.INVALID_GROUP_ID, KafkaError.UNSUPPORTED_VERSION}


def metadata_room(admin: AdminClient, name: str) -> int:
    """Return the number of UTF-16 units of commit metadata that the broker accepts, 0 to ``LIMIT``.

    The client adds one NUL to the metadata, which the result excludes. If the broker does not report its limit, the
    result is ``LIMIT``, and each refused commit halves the limit. If the limit is too small for a single completed
    message, the function logs a warning and returns 0. The call blocks for up to 5 seconds.
    """
    try:
        allowed = metadata_limit(admin)
    except SourceError as failure:
        log.info(
            "%s: the broker's limit for commit metadata is unknown (%s); the first commit tries %d units",
            name,
            failure,
            LIMIT,
        )
        return LIMIT
    if allowed is None:
        return LIMIT
    room = room_within(allowed)
    if can_carry(room):
        return room
    log.warning(
        "%s: the broker's offset.metadata.max.bytes=%d is too small for the list of completed messages, so drains "
        "take longer; raise it to 4096",
        name,
        allowed,
    )
    return 0


def room_within(allowed: int) -> int:
    """Return the UTF-16 units that fit into ``offset.metadata.max.bytes=allowed``.

    The result excludes the client's NUL.
    """
    return max(0, min(LIMIT, allowed - 1))


def can_carry(room: int) -> bool:
    """Return whether ``room`` UTF-16 units of commit metadata are enough for at least one completed message."""
    return bool(encode(0, [(1, 2)], room))


@dataclass(slots=True, eq=False)
class Commit:
    """The positions that one commit request sends.

    Attributes:
        settlements: The positions, at most one for each partition.
        answer: The answer to the event loop.
        releases: Partition to release after this commit; None = no partition.
        deadline: Time of the clock after which an unanswered commit has failed; 0 = the client has not received the
            commit yet.
        offsets: The positions in the client's own type, which ``Commits`` sets when it sends the commit.
        prepares: Whether a transaction commits the positions, so that the thread only checks them, and sends nothing.
    """

    settlements: Sequence[Settlement]
    answer: Answer[None]
    releases: Partition | None = None
    deadline: float = 0.0
    offsets: list[TopicPartition] = field(default_factory=list)
    prepares: bool = False

    def fail(self, text: str, *, retryable: bool = True) -> None:
        """Fail the commit with a ``SourceError`` of this text."""
        self.answer.fail(SourceError(text, retryable=retryable))


@dataclass(eq=False, repr=False)
class Commits:
    """The commits of one client. Only the thread that owns the client uses the object.

    Attributes:
        owns: Function that returns whether this client may still commit positions of a partition.
        lost: Function that receives the reason when the broker reports that this process is no longer a member.
        clock: Monotonic clock, in seconds.
        name: Name of the source, for errors and log lines.
        settings: Configuration of the client, whose secrets no error or log line shows.
        limit: Maximum number of UTF-16 units of commit metadata; 0 = commits carry no metadata.
        unanswered: The newest sent, unanswered commit of each partition.
    """

    owns: Callable[[Partition], bool]
    lost: Callable[[str], None]
    clock: Clock
    name: str
    settings: Mapping[str, Any]
    limit: int = LIMIT
    _warned: bool = field(default=False, init=False)
    unanswered: dict[PartitionId, Commit] = field(default_factory=dict, init=False)

    def send(self, client: Consumer, commit: Commit, *, timeout: float | None = None) -> None:
        """Send a commit.

        Args:
            client: The client.
            commit: The commit.
            timeout: Maximum seconds to wait until the broker shows the stored positions; None = do not block. Inside a
                callback a timeout is necessary, because the client delivers no answer there.
        """
        if commit.answer.given_up:
            return
        if not all(self.owns(each.partition) for each in commit.settlements):
            # The loop may not have received the report of the loss yet.
            commit.fail(f"{self.name}: not committed: this member no longer owns a partition of the commit")
            return
        if commit.prepares:
            commit.answer.give(None)
            return
        # The deadline includes the wait for the topic ids.
        commit.deadline = commit.deadline or self.clock() + COMMIT_TIMEOUT
        commit.offsets = [self._offset(each) for each in commit.settlements]
        try:
            client.commit(offsets=commit.offsets, asynchronous=True)
            if timeout is None:
                self.unanswered |= dict.fromkeys([each.partition.id for each in commit.settlements], commit)
            elif _is_stored(client, commit, timeout):
                commit.answer.give(None)
            else:
                # The broker refused the commit. This call reports the reason. Its only deadline is the client's own,
                # socket.timeout.ms, but the broker has just answered.
                answered = client.commit(offsets=commit.offsets, asynchronous=False)
                self._answered(commit, _error_of(None, answered or ()))
        except KafkaException as failure:
            self._answered(commit, failure.args[0])
        except RuntimeError as failure:
            commit.fail(f"{self.name}: not committed: {exception_text(failure, self.settings)}")

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
        """Process the answer to a commit. The client calls this method as its ``on_commit``."""
        for offset in offsets:
            commit = self.unanswered.get(PartitionId(offset.topic, offset.partition))
            # Ignore the answer to an older commit with different positions, because the older commit counts as failed.
            if commit is not None and any(_content(each) == _content(offset) for each in commit.offsets):
                self._forget(commit)
                # After an error of one partition, the outcome of the other partitions is unknown.
                self._answered(commit, _error_of(error, offsets))

    def recall(self) -> list[Commit]:
        """Remove and return all unanswered commits."""
        commits = list(dict.fromkeys(self.unanswered.values()))
        self.unanswered.clear()
        return commits

    def expire(self, now: float) -> None:
        """Fail each commit that has no answer at its deadline."""
        for commit in [each for each in self.unanswered.values() if each.deadline <= now]:
            self._forget(commit)
            commit.fail(
                f"{self.name}: the broker did not answer a commit within {COMMIT_TIMEOUT:g} s; check that a broker runs"
            )

    def abandon(self, reason: str) -> None:
        """Fail all unanswered commits, with ``reason`` in the error."""
        for commit in self.recall():
            commit.fail(f"{self.name}: a commit has no answer: {reason}")

    def _forget(self, commit: Commit) -> None:
        # A newer commit may cover some partitions of this commit: compare commits by identity.
        self.unanswered = {one: each for one, each in self.unanswered.items() if each is not commit}

    def _answered(self, commit: Commit, error: KafkaError | None) -> None:
        if error is None:
            commit.answer.give(None)
            return
        code = error.code()
        lost = code in _LOST or error.fatal()
        if lost:
            self.lost(f"a commit was refused: {error.name()}")
        elif code == KafkaError.OFFSET_METADATA_TOO_LARGE:
            self.limit //= 2
            self._degrade()
        where = ", ".join(sorted(str(each.partition.id) for each in commit.settlements))
        text = client_message(error, self.settings)
        commit.fail(f"{self.name}: {where}: not committed: {text}", retryable=lost or code not in _PERMANENT)

    def _degrade(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "%s: offset.metadata.max.bytes of the broker is too small for all messages completed above a position. "
                "The next owner repeats some of them; raise the setting, lower max_ahead, or pass "
                "commit_metadata=False",
                self.name,
            )


@dataclass(eq=False, repr=False)
class TopicIdCheck:
    """Sends commits. If the broker has topic ids, the object first checks the topic ids of each commit.

    Only the thread that owns the client uses the object.

    The object is True while commits wait. At most one request for topic ids is open. The next request serves all
    commits that the loop queues before the answer.

    Attributes:
        topics: The broker's descriptions of the topics.
        group: Assignments of the client.
        commits: Object that sends the commits.
        errors: Log of the client's errors, which knows whether a broker is reachable.
        clock: Monotonic clock, in seconds.
        name: Name of the source, for errors.
    """

    topics: Topics
    group: Group
    commits: Commits
    errors: ErrorLog
    clock: Clock
    name: str
    _waiting: deque[tuple[int, Commit]] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        self._checked = self.topics.answered

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def commit(self, client: Consumer, commit: Commit, *, until: float | None) -> None:
        """Queue a commit for ``advance``. Inside a callback, or without topic ids, send the commit at once.

        Inside a callback the call waits for the broker for at most 5 seconds, unless the broker refuses the commit.

        Args:
            client: The client.
            commit: The commit.
            until: Time of the clock at which the callback must end; None outside of callbacks.
        """
        if commit.answer.given_up or not all(self.group.owns(each.partition) for each in commit.settlements):
            # ``send`` refuses this commit without a request to the broker.
            self._send(client, commit)
        elif until is not None:
            self._commit_now(client, commit, until)
        elif _has_ids(commit):
            commit.deadline = self.clock() + COMMIT_TIMEOUT
            self._waiting.append((self.topics.ask(), commit))
        else:
            self._send(client, commit)

    def advance(self, client: Consumer) -> None:
        """Process answers about topic ids, send the commits that these answers allow, and fail overdue commits.

        The call does not block.
        """
        self.commits.expire(self.clock())
        if self.topics.poll():
            self.errors.answered()
        self._check()
        while self._waiting and self._waiting[0][0] <= self.topics.answered:
            self._send(client, self._waiting.popleft()[1])
        while self._waiting and self._waiting[0][1].deadline <= self.clock():
            self._refuse(self._waiting.popleft()[1])

    def resend(self, client: Consumer, until: float) -> None:
        """Send all unanswered commits again, inside a callback of the client that must end at ``until``.

        If the call raises an error, the commits fail with the same error.
        """
        recalled = self.recall()
        try:
            for commit in recalled:
                self.commit(client, commit, until=until)
        except BaseException as error:
            # A commit that already has an answer keeps its first answer.
            for commit in recalled:
                commit.fail(f"{self.name}: not committed: {exception_text(error, self.errors.settings)}")
            raise

    def recall(self) -> list[Commit]:
        """Remove and return all unanswered commits: sent commits, and commits that wait for topic ids."""
        waiting, self._waiting = self._waiting, deque()
        return [*self.commits.recall(), *(commit for _, commit in waiting)]

    def abandon(self, reason: str) -> None:
        """Fail all commits without an answer, with ``reason`` in the error."""
        waiting, self._waiting = self._waiting, deque()
        for _, commit in waiting:
            commit.fail(f"{self.name}: a commit was not sent: {reason}")
        self.commits.abandon(reason)

    def _commit_now(self, client: Consumer, commit: Commit, until: float) -> None:
        deadline = min(self.clock() + (_CALLBACK_TIMEOUT_WHEN_DOWN if self.errors.down else _CALLBACK_TIMEOUT), until)
        answered = self.topics.wait(deadline - self.clock())
        self._check()
        if answered:
            self.errors.answered()
        elif self.errors.down:
            commit.fail(f"{self.name}: not committed: the client reaches no broker; check that a broker runs")
            self._finish(commit)
            return
        elif _has_ids(commit):
            self._refuse(commit)
            return
        self._send(client, commit, timeout=max(0.0, deadline - self.clock()))

    def _check(self) -> None:
        # Another caller that waits for topic ids may have processed the answer.
        if self._checked != self.topics.answered:
            self._checked = self.topics.answered
            self.group.check_topics()

    def _send(self, client: Consumer, commit: Commit, *, timeout: float | None = None) -> None:
        self.commits.send(client, commit, timeout=timeout)
        self._finish(commit)

    def _refuse(self, commit: Commit) -> None:
        commit.fail(
            f"{self.name}: not committed: the broker did not confirm the topic ids in time, and a recreated topic has "
            "other messages at the same positions; check that a broker runs"
        )
        self._finish(commit)

    def _finish(self, commit: Commit) -> None:
        if commit.releases is not None:
            self.group.release(commit.releases)


def _has_ids(commit: Commit) -> bool:
    """Return whether any topic of the commit has an id. Old brokers have no topic ids."""
    return any(each.partition.incarnation for each in commit.settlements)


def _is_stored(client: Consumer, commit: Commit, timeout: float) -> bool:
    """Ask whether the broker stored the commit.

    The broker answers a client's requests in order. The answer to a later request therefore shows the result of the
    commit. The call blocks for at most ``timeout`` seconds. Raises ``KafkaException`` when the broker does not answer.
    """
    found = client.committed([TopicPartition(each.topic, each.partition) for each in commit.offsets], timeout=timeout)
    pairs = zip(found, commit.offsets, strict=True)
    return all(one.error is None and _content(one) == _content(other) for one, other in pairs)


def _content(offset: TopicPartition) -> tuple[str, int, int, str]:
    return offset.topic, offset.partition, offset.offset, offset.metadata or ""


def _error_of(error: KafkaError | None, offsets: Sequence[TopicPartition]) -> KafkaError | None:
    if error is not None:
        return error
    return next((offset.error for offset in offsets if offset.error is not None), None)
