"""A naive broker of one partition: its log, and the messages that its readers settled."""

from __future__ import annotations

from itertools import pairwise

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

    def finish_elsewhere(self, positions: set[int]) -> None:
        """Let another process own the partition, finish these positions of the log, and hand them over."""
        self.succeeded |= positions
        if not self.commits:
            self.settled |= positions
            return
        done = self.all_done() | positions
        log = [position for position, _, _ in self.log]
        self.floor = next((position for position in log if position not in done), self.end)
        self.completed = []
        for position, following in pairwise([*log, self.end]):
            if position in done and position >= self.floor:
                joins = self.completed and self.completed[-1][1] == position
                start = self.completed.pop()[0] if joins else position
                # A run ends where a message may follow that is not finished.
                self.completed.append((start, following if following in done else position + 1))

    def accept(self, settlement: Settlement) -> None:
        before = self.all_done()
        if settlement.floor is None:
            self.settled |= {message.position for message in settlement.messages}
        else:
            assert settlement.floor >= self.floor
            self.floor, self.completed = settlement.floor, list(settlement.completed)
        # At least once: no message is settled before it is done.
        assert self.all_done() <= self.succeeded
        # A settlement forgets no message that a former owner has finished.
        assert before <= self.all_done()

    def all_done(self) -> set[int]:
        log = {position for position, _, _ in self.log}
        if not self.commits:
            return self.settled & log
        below = {position for position in log if position < self.floor}
        return below.union(*(log.intersection(range(start, end)) for start, end in self.completed))
