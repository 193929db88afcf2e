"""The checker of a changed number of partitions. The checker finds unhandled messages and counts broken orders.

The history needs the ``produced`` rows of the producers.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from memsource.checkers.checker import PromiseChecker, on
from memsource.checkers.verdict import Findings, Verdict
from memsource.history.reader import Segment
from memsource.history.rows import Row, whole
from memsource.history.timeline import Timeline


class _Message(NamedTuple):
    """A message, by partition and position."""

    partition: str
    position: int


class NothingStranded(PromiseChecker):
    """Every published message is handled, or its dead letter is confirmed.

    No process handles a message in a physical queue without a reader. A running consumer also has unhandled messages,
    so ``CHECKERS`` omits this checker. The checker judges a run after its end.

    The note counts the messages that started before an earlier message of their key had ended in another partition.
    A change of the number of partitions may break the order only in this way.

    Args:
        timeline: History to judge.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._produced: dict[_Message, tuple[Segment, Row]] = {}
        self._started: dict[_Message, int] = {}
        self._finished: dict[_Message, int] = {}
        self._rows = 0

    @on("produced")
    def _publish(self, segment: Segment, row: Row) -> None:
        self._produced.setdefault(_message(row), (segment, row))

    @on("started")
    def _start(self, segment: Segment, row: Row) -> None:
        self._rows += 1
        self._started.setdefault(_message(row), self._rows)

    @on("ended ok", "dlq_confirmed")
    def _end(self, segment: Segment, row: Row) -> None:
        self._rows += 1
        self._finished.setdefault(_message(row), self._rows)

    def verdict(self) -> Verdict:
        """The judgement after the last row. Changes nothing."""
        findings = Findings(self.name, self._timeline)
        findings.checked = len(self._produced)
        for message, (segment, row) in self._produced.items():
            if message not in self._finished:
                findings.violation(segment, row, "was published, and no consumer has handled it")
        doubts = {} if self._produced else {"histories lack the rows of their producers": 1}
        return findings.verdict(note=f"{self._overtaken()} broken orders across partitions", doubts=doubts)

    def _overtaken(self) -> int:
        """Count the messages that started before an earlier message of their key had ended in another partition."""
        count = 0
        # The last end of the earlier messages of each key, by partition.
        ends: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for message, (_, row) in self._produced.items():
            if row.key is None:
                continue
            known = ends[row.key]
            start, never = self._started.get(message), self._rows + 1
            earlier = max((end for partition, end in known.items() if partition != message.partition), default=0)
            count += start is not None and start < earlier
            end = self._finished.get(message, never)
            known[message.partition] = max(end, known.get(message.partition, 0))
        return count


def _message(row: Row) -> _Message:
    return _Message(whole(row.partition), row.position)
