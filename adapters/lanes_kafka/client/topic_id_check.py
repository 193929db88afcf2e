"""Commits on their way out: each leaves behind an answer about its topics that was asked for when it was due.

In a topic that was deleted and made anew the same positions are those of other messages, the broker takes a commit of
them, and no callback may tell. A client that fetches when the new topic has grown past its position reads on there. So
what was read before a commit was due is of the topic whose id is told behind that, or is not committed. Without an
answer nothing is committed: what was finished runs again, where else messages of the new topic would be passed over.

Two gaps are left. A commit that was sent may be repeated by the client itself within about half a second, onto the new
topic: a position of the old one, behind which the source stops loudly. And the answer is what one broker knows, which
may lag behind the others.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from confluent_kafka import Consumer

from lanes.clock import Clock
from lanes.errors import SourceError
from lanes_kafka.client.commits import COMMIT_TIMEOUT, Commit, Commits
from lanes_kafka.client.group import Group
from lanes_kafka.client.topics import Topics
from lanes_kafka.errors import ErrorLog

_BLOCKS_FOR: Final = 5.0
"""Seconds that a commit in a callback may take, the question about its topics included."""

_DOWN_FOR: Final = 1.0
"""Seconds of that while no broker is reached, as far as is known."""


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
