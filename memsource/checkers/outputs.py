"""The checkers of outputs: only a handler that succeeds publishes, before the settlement, in the order of its key."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from memsource.checkers.checker import PromiseChecker, on
from memsource.checkers.verdict import Findings, Verdict
from memsource.history.outputs import VisibleOutput
from memsource.history.reader import Segment
from memsource.history.rows import Row, whole
from memsource.history.timeline import Timeline

_Delivery = tuple[Segment, str, int, int]
"""A message within one assignment, as (segment, partition, assignment, position)."""

_Attempt = tuple[str, int, int]
"""An attempt of a message, as (partition, position, attempt)."""

_LATE: Final = "messages were delivered late, so their keys have no order"


def _delivery(segment: Segment, row: Row) -> _Delivery:
    return segment, row.partition, row.assignment, row.position


class OutputsAtLeastOnce(PromiseChecker):
    """A message is settled only after all outputs of its handler are confirmed, and a failed attempt publishes nothing.

    A history shows when the consumer sent the outputs of an attempt, and when all of them were confirmed. In a
    simulation the checker also knows the outputs that the broker shows to readers. Each output of a settled message
    must be visible, and each visible output must be of an attempt that has succeeded.

    Args:
        timeline: History to judge.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._unconfirmed: dict[_Delivery, Row] = {}
        # The attempt and the number of outputs of each message whose handler has published.
        self._made: dict[_Delivery, tuple[int, int]] = {}
        self._settled: dict[_Delivery, tuple[Segment, Row]] = {}
        self._published: set[_Attempt] = set()
        self._visible: dict[_Attempt, dict[int, float]] = defaultdict(dict)
        for output in timeline.outputs:
            attempt = whole(output.partition), output.position, output.attempt
            self._visible[attempt].setdefault(output.number, output.at)

    @on("publishing")
    def _publishing(self, segment: Segment, row: Row) -> None:
        self._unconfirmed[_delivery(segment, row)] = row
        self._made[_delivery(segment, row)] = row.attempt, int(row.number)
        self._published.add((whole(row.partition), row.position, row.attempt))

    @on("published", "dlq_sent", "blocked", "abandoned", "started")
    def _confirmed(self, segment: Segment, row: Row) -> None:
        self._unconfirmed.pop(_delivery(segment, row), None)
        if row.event != "published":
            # A message that was given up, or runs again, need not publish the outputs of this attempt.
            self._made.pop(_delivery(segment, row), None)

    @on("ack", "passed")
    def _ack(self, segment: Segment, row: Row) -> None:
        delivery = _delivery(segment, row)
        if delivery in self._unconfirmed:
            self._findings.violation(segment, row, "settled while its outputs were not confirmed")
        made = self._made.pop(delivery, None)
        if made is None:
            return
        self._findings.checked += 1
        attempt, count = made
        visible = self._visible.get((whole(row.partition), row.position, attempt), {})
        missing = [number for number in range(1, count + 1) if visible.get(number, row.mono + 1) > row.mono]
        if missing and self._timeline.shows_outputs:
            self._findings.violation(segment, row, f"settled, and output {missing[0]} of {count} was not visible")

    @on("gap")
    def _gap(self, segment: Segment, row: Row) -> None:
        # The outputs may have been confirmed in the gap, and other attempts may have succeeded.
        self._unconfirmed = {each: at for each, at in self._unconfirmed.items() if each[0] is not segment}

    def verdict(self) -> Verdict:
        """The judgement after the last row. Changes nothing."""
        findings = self._findings
        stray = sorted(self._visible.keys() - self._published)
        gaps = any(segment.gaps for segment in self._timeline.segments)
        if not stray or not self._timeline.segments:
            return super().verdict()
        found = Findings(self.name, self._timeline)
        if gaps:
            found.doubt("outputs are visible whose attempts may have succeeded in a gap", len(stray))
        else:
            segment = self._timeline.segments[0]
            for partition, position, attempt in stray:
                row = Row(0, "publishing", 0.0, partition, 0, position, None, attempt)
                found.violation(segment, row, f"an output of attempt {attempt} is visible, which did not succeed")
        return findings.verdict() if findings.verdict().status == "violated" else found.verdict()


class OutputOrder(PromiseChecker):
    """Outputs of messages of one key to one target and one output key become visible in the order of the messages.

    The first write of each output counts, because a repeat may follow later outputs. The checker needs the visible
    outputs of a simulation. It judges neither messages without a key nor messages with ``order="none"``.

    Args:
        timeline: History to judge.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._late: set[tuple[str, int]] = set()
        self._unordered = any(segment.rules.order == "none" for segment in timeline.segments)

    @on("redelivered")
    def _redelivered(self, segment: Segment, row: Row) -> None:
        if row.text == "late":
            self._late.add((whole(row.partition), row.position))

    def verdict(self) -> Verdict:
        """The judgement after the last row. Changes nothing."""
        findings = Findings(self.name, self._timeline)
        highest: dict[tuple[str, str, str, str | None], VisibleOutput] = {}
        seen: set[tuple[str, str, str | None, int, int]] = set()
        outputs = () if self._unordered else sorted(self._timeline.outputs, key=lambda output: output.at)
        for output in outputs:
            partition = whole(output.partition)
            place = partition, output.target, output.key, output.position, output.number
            if output.message_key is None or place in seen:
                continue
            seen.add(place)
            if (partition, output.position) in self._late:
                continue
            findings.checked += 1
            chain = partition, output.message_key, output.target, output.key
            before = highest.get(chain)
            if before is not None and (before.position, before.number) > (output.position, output.number):
                row = Row(0, "publishing", output.at, partition, 0, output.position, output.message_key, output.attempt)
                findings.violation(
                    self._timeline.segments[0],
                    row,
                    f"output {output.number} to {output.target} became visible after output {before.number} of "
                    f"position {before.position}",
                )
            else:
                highest[chain] = output
        return findings.verdict()
