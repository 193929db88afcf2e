"""A naive broker of one partition: its log, and the messages that its readers settled."""

from __future__ import annotations

from lanes.core.types import Settlement

Entry = tuple[int, bytes | None, int]
"""Position, key, size."""


class Broker:
    """``commits``: readers commit one position and a completed set, instead of single messages."""

    def __init__(self, commits: bool) -> None:
        self.commits = commits
        self.log: list[Entry] = []
        self.end = 0
        self.floor = 0
        self.completed: list[tuple[int, int]] = []
        self.settled: set[int] = set()
        self.succeeded: set[int] = set()

    def append(self, gap: int, key: bytes | None, size: int) -> Entry:
        self.log.append((self.end + gap, key, size))
        self.end += gap + 1
        return self.log[-1]

    def done(self, position: int) -> bool:
        in_runs = any(start <= position < end for start, end in self.completed)
        return position < self.floor or in_runs if self.commits else position in self.settled

    def accept(self, settlement: Settlement) -> None:
        if settlement.floor is None:
            self.settled |= {message.position for message in settlement.messages}
        else:
            assert settlement.floor >= self.floor
            self.floor, self.completed = settlement.floor, list(settlement.completed)
        # At least once: no message is settled before it is done.
        assert {position for position, _, _ in self.log if self.done(position)} <= self.succeeded
