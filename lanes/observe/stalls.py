"""Which partitions stand at ``max_ahead`` for long, and what holds each of them up."""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

from lanes.core.commits import Committer
from lanes.core.lane import FINISHED
from lanes.core.types import NEVER, Message, Partition
from lanes.history.recorder import key_hash

log = logging.getLogger("lanes")

NAMED_AFTER: Final = 1.0
"""Seconds that a partition stands at ``max_ahead``, with nothing confirmed meanwhile, before that is worth a word."""


class Stall(NamedTuple):
    """Nothing more is taken of ``partition`` until ``oldest`` is finished; None = until the broker has confirmed
    ``floor``, below which everything is."""

    partition: Partition
    floor: int
    oldest: Message | None


class _Awaited(NamedTuple):
    """What a partition waits for, given what is ``confirmed``: for the ``broker`` to confirm more, or for a message."""

    confirmed: int
    broker: bool


class Stalls:
    """The partitions of one ``committer`` that stand at ``max_ahead``: each blocker is told once, when it has lasted.

    Commits that lag behind quick handlers come and go many times a second: they are not worth a word. Time is an
    argument, in seconds of the engine's clock. Nothing blocks.
    """

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        # What it waits for since when it began to, and when that is to be told: infinity once it was.
        self._waits: dict[Partition, tuple[_Awaited, float]] = {}

    def __repr__(self) -> str:
        return f"<Stalls {len(self._waits)} partitions at max_ahead>"

    def reached(self, partition: Partition, now: float) -> None:
        """It stands at ``max_ahead`` from now on."""
        self._forget()
        self._waits[partition] = self._awaited(partition), now + NAMED_AFTER

    def moved(self, now: float) -> bool:
        """Something has finished, or was confirmed; True when something else may hold a partition up now, and
        ``next_at`` has changed. Cheap while nothing stands."""
        if not self._waits:
            return False
        self._forget()
        moved = [partition for partition, (before, _) in self._waits.items() if self._awaited(partition) != before]
        for partition in moved:
            self._waits[partition] = self._awaited(partition), now + NAMED_AFTER
        return bool(moved)

    def due(self, now: float) -> list[Stall]:
        """Those that have lasted, and were not told before."""
        self._forget()
        stalls = []
        for partition in [partition for partition, (_, at) in self._waits.items() if at <= now]:
            awaited, ledger = self._awaited(partition), self._committer.partitions[partition]
            oldest = None if awaited.broker else ledger.in_flight()[0]
            if oldest is not None and oldest.state == FINISHED:
                # It is entered into the ledger in a moment, and then the floor moves.
                self._waits[partition] = awaited, now + NAMED_AFTER
                continue
            self._waits[partition] = awaited, NEVER
            stalls.append(Stall(partition, ledger.floor(), oldest))
        return stalls

    def next_at(self) -> float:
        """When ``due`` has something next; infinity while it has nothing."""
        return min((at for _, at in self._waits.values()), default=NEVER)

    def _awaited(self, partition: Partition) -> _Awaited:
        commits = partition.commits
        assert commits is not None, "only a partition whose source commits has a bound above the committed position"
        return _Awaited(commits.confirmed, self._committer.partitions[partition].floor() > commits.confirmed)

    def _forget(self) -> None:
        # One that drains is held up by nobody: it is given back.
        for partition in [each for each in self._waits if each not in self._committer.ahead or not each.steady]:
            del self._waits[partition]


def report(stall: Stall, name: str, max_ahead: int, now: float, error: str) -> None:
    """Say in the log of the source ``name`` what holds a partition up; ``error``: why its commits fail, if they do."""
    oldest = stall.oldest
    if oldest is None:
        why = f"commits fail: {error}" if error else "a commit is not answered"
        until = f"the broker has confirmed position {stall.floor}: {why}"
    else:
        until = (
            f"position {oldest.position} is finished: key {key_hash(oldest.key)}, attempt {oldest.attempt}, "
            f"{now - oldest.received:.1f} s old"
        )
    log.warning(
        "%s: %s: max_ahead=%d is reached and nothing more of it is taken until %s",
        name,
        stall.partition.id,
        max_ahead,
        until,
    )
