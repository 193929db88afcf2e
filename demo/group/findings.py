"""Figures from the histories of a group: overlaps, repeated runs by cause, the recovery time of each kind of fault.

After a fault, two processes may run the same message, which a library cannot prevent. The figures separate these
repeats from preventable repeats.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from demo.lateness import Delay, covered
from demo.membership import (
    Assignment,
    Moves,
    Removal,
    Snapshot,
    Span,
    deadlines,
    handovers,
    last_owners,
    moves,
    rebalances,
    removals,
    spans,
)

if TYPE_CHECKING:
    from memsource import Row, Segment

FaultKind = Literal["kill", "freeze", "pause", "stop", "join", "broker", "cut"]
"""Kind of a fault. ``pause`` is a freeze that ends within the session, and ``cut`` cuts a member's connections."""

_AFTERMATH: Final = 15.0
"""Seconds after a broker's return in which members may still lose their partitions."""

_COMES_BACK: Final = 5.0
"""Seconds after a broker's return in which a handover may still lack its commit."""

_WITNESSES: Final = 3

_LATE_SHARE: Final = 0.5
"""Part of the time for a renewal in which a member was late, above which lateness explains the loss of a lease."""

EXCUSED: Final = ("kill", "freeze", "cut", "broker", "late")
"""Causes that excuse a repeated run of a message."""


_CAUSES: Final = ((("freeze", "pause"), "freeze"), (("cut",), "cut"))


class Fault(NamedTuple):
    """A fault of the group, with its start and end in seconds of the engine's clock."""

    kind: FaultKind
    member: str
    begun: float
    ended: float


@dataclass(frozen=True, kw_only=True)
class GroupFindings:
    """The figures of a run.

    Attributes:
        duplicates: Repeated runs of a message by cause: kill, freeze, cut, broker or late. A ``late`` member lost its
            lease or session because it was late. ``clean`` counts the repeats without a cause.
        rebalances: Number of times that the broker moved partitions between members.
        recovery: Fault kind → longest recovery in seconds, see the function ``recovery``; infinite for a partition
            without a later start.
        overlaps: Number of unexcused overlapping runs of a key, plus starts and settlements after the loss of their
            partition. In a cohort, the run of a crashed member counts until its lease expires.
        overlaps_at_loss: Number of excused overlaps, which ``overlaps`` leaves out. In an excused overlap, the earlier
            lease had expired, the broker had removed a member, or the earlier assignment ended as lost.
        witnesses: Descriptions of the first three cases that ``overlaps`` counts.
        moves: Moves of a cohort's partitions, by the plans of the cohort; None without a cohort.
        handover: Median time in seconds from the end of the last handler to the next owner; None without a handover.
    """

    duplicates: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(("kill", "freeze", "clean"), 0))
    rebalances: int = 0
    recovery: Mapping[str, float] = field(default_factory=dict)
    overlaps: int = 0
    overlaps_at_loss: int = 0
    witnesses: Sequence[str] = ()
    moves: Moves | None = None
    handover: float | None = None


class Knowledge:
    """The assignments of a run, derived from the histories, the snapshots of the broker, the faults and the lateness.

    Args:
        segments: Histories of the members.
        snapshots: States of the group in the reports of its broker.
        faults: Faults of the scenario.
        late: Spans in which each member was late, by name.
        renewal: Seconds from the time at which a renewal or heartbeat is due to the loss; 0.0 = unknown, so lateness
            explains no loss.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        snapshots: Sequence[Snapshot],
        faults: Sequence[Fault],
        late: Mapping[str, Sequence[Delay]] | None = None,
        renewal: float = 0.0,
    ) -> None:
        self.segments = segments
        self.faults = faults
        self._late = late or {}
        self._renewal = renewal
        self.spans: dict[Assignment, Span] = spans(segments)
        self.deadlines: dict[Assignment, float] = deadlines(segments)
        # The leases of a cohort outlast the processes, so the deadlines alone give the end of each assignment.
        self.outlasting = bool(self.deadlines) and not any(snapshot.sessions for snapshot in snapshots)
        self.removals: dict[Assignment, Removal] = {} if self.outlasting else removals(self.spans, snapshots)
        self.moves = moves(snapshots) if self.outlasting else None
        self.rebalances = rebalances(snapshots)
        self.last_owners = last_owners(snapshots)

    @property
    def taken(self) -> frozenset[Assignment]:
        """Assignments that the broker revoked from their members, for the checkers."""
        return frozenset(self.removals)

    @property
    def forgotten(self) -> frozenset[Assignment]:
        """The assignments that ended during an outage of the broker, or shortly after.

        The broker may have lost the commits of these assignments.
        """
        last = {segment.member: segment.rows[-1].mono for segment in self.segments}
        return frozenset(
            assignment
            for assignment, span in self.spans.items()
            if self._in_outage(min(span.end, last[assignment[0]]), _AFTERMATH)
        )

    @property
    def frozen(self) -> float:
        """Length in seconds of the longest fault, such as a freeze; 0.0 without a fault."""
        return max((one.ended - one.begun for one in self.faults), default=0.0)

    def cause(self, assignment: Assignment) -> str:
        """Return the cause of an assignment's end: kill, freeze, cut, broker or late; ``clean`` without a cause."""
        span = self.spans[assignment]
        if span.ending == "crashed":
            return "kill"
        if span.ending != "lost" and assignment not in self.removals:
            return "broker" if self._in_outage(span.end, _COMES_BACK) else "clean"
        removal = self.removals.get(assignment)
        at = min(span.end, removal.before if removal is not None else inf)
        for kinds, cause in _CAUSES:
            if any(one.kind in kinds and one.member == assignment[0] and one.begun <= at for one in self.faults):
                return cause
        if self._in_outage(at, _AFTERMATH):
            return "broker"
        return "late" if self._was_late(assignment, at) else "clean"

    def _was_late(self, assignment: Assignment, at: float) -> bool:
        """Return whether the member was late for most of the time that it had for its last renewal.

        Only a lease that ended at its deadline, and a session that the broker ended, lacked a renewal.
        """
        deadline = self.deadlines.get(assignment, inf)
        if assignment not in self.removals:
            if self.spans[assignment].end < deadline < inf:
                return False
            at = min(at, deadline)
        late = covered(self._late.get(assignment[0], ()), at - self._renewal, at)
        return self._renewal > 0 and late >= self._renewal * _LATE_SHARE

    def _in_outage(self, at: float, after: float) -> bool:
        return any(one.kind == "broker" and one.begun <= at <= one.ended + after for one in self.faults)


def findings(knowledge: Knowledge) -> GroupFindings:
    """Compute all figures of a run, in several passes over its rows."""
    from memsource.history.timeline import Timeline

    overlaps, runs = _Overlaps(knowledge), _Runs(knowledge)
    times = handovers(knowledge.segments)
    for event, segment, row in Timeline(knowledge.segments, taken=knowledge.taken):
        overlaps.see(event, segment, row)
        runs.see(event, segment, row)
    return GroupFindings(
        duplicates=runs.duplicates(),
        rebalances=knowledge.rebalances,
        recovery=recovery(knowledge),
        overlaps=overlaps.count,
        overlaps_at_loss=overlaps.at_loss,
        witnesses=overlaps.witnesses,
        moves=knowledge.moves,
        handover=median(times) if times else None,
    )


def recovery(knowledge: Knowledge) -> dict[str, float]:
    """Return kind of fault → longest recovery in seconds, for kills, freezes, stops and joins. Pure.

    A recovery ends when every partition of the member has started again. For a join, the recovery ends when the new
    member starts its first partition. The function skips a fault of a member without a partition, and a new member that
    ended before it started a partition. A partition with an earlier start by another member does not count. If the run
    ended before the last owner started, the recovery ends at the broker's report of that owner.
    """
    begun: dict[str, list[float]] = defaultdict(list)
    for (_, partition, _), span in knowledge.spans.items():
        begun[partition].append(span.begin)
    last = knowledge.last_owners
    found: dict[str, float] = {}
    for fault in knowledge.faults:
        if fault.kind == "join":
            own = [span.begin for (member, _, _), span in knowledge.spans.items() if member == fault.member]
            ended = any(one.member == fault.member and one.kind in ("kill", "stop") for one in knowledge.faults)
            given = min((since for name, since in last.values() if name == fault.member), default=inf)
            times = [] if ended and not own else [min(own, default=given)]
        elif fault.kind in ("kill", "freeze", "stop"):
            held = [
                partition
                for (member, partition, _), span in knowledge.spans.items()
                if member == fault.member
                and span.begin <= fault.begun < span.end
                and not any(span.begin < at <= fault.begun for at in begun[partition])
            ]
            times = [
                min(
                    (at for at in begun[partition] if at > fault.begun),
                    default=last[partition][1] if partition in last and last[partition][1] > fault.begun else inf,
                )
                for partition in held
            ]
        else:
            continue
        if times:
            found[fault.kind] = max(found.get(fault.kind, 0.0), max(times) - fault.begun)
    return found


class _Overlaps:
    """A finder of overlapping runs of a key, and of starts and settlements after the loss of their partition."""

    def __init__(self, knowledge: Knowledge) -> None:
        from memsource.history.rows import whole

        self._knowledge = knowledge
        # A key may move from one piece of its partition to another.
        self._whole = whole
        self._running: dict[tuple[str, str], list[tuple[Segment, Row]]] = defaultdict(list)
        # Messages that a crashed process was running. Each message counts until the lease of its assignment expires.
        self._ghosts: dict[tuple[str, str], list[tuple[Segment, Row]]] = defaultdict(list)
        self._lost: set[Assignment] = set()
        self._sent: dict[Assignment, float] = {}
        self.count = 0
        self.at_loss = 0
        self.witnesses: list[str] = []

    def see(self, event: str, segment: Segment, row: Row) -> None:
        assignment = segment.member, row.partition, row.assignment
        if event == "started":
            self._started(segment, row, assignment)
        elif event in ("ended", "zombie"):
            if row.key is not None:
                running = self._running[self._whole(row.partition), row.key]
                running[:] = [
                    (other, start)
                    for other, start in running
                    if other is not segment or (start.position, start.assignment) != (row.position, row.assignment)
                ]
        elif event == "lost":
            self._lost.add(assignment)
        elif event in ("ack", "commit_sent"):
            self._sent[assignment] = row.mono
            if assignment in self._lost:
                self._found(segment, row, f"{event} after its partition was lost")
            elif row.mono >= self._knowledge.deadlines.get(assignment, inf):
                self._found(segment, row, f"{event} after its lease had run out")
        elif event == "commit_ok":
            removal = self._knowledge.removals.get(assignment)
            if removal is not None and self._sent.get(assignment, 0.0) > removal.before:
                self._found(segment, row, "its commit was accepted after the broker had removed its member")
        elif event == "over":
            for key, running in self._running.items():
                if self._knowledge.outlasting:
                    self._ghosts[key] += [one for one in running if one[0] is segment and segment.crashed]
                running[:] = [one for one in running if one[0] is not segment]

    def _started(self, segment: Segment, row: Row, assignment: Assignment) -> None:
        if assignment in self._lost:
            self._found(segment, row, "started after its member knew that the partition was lost")
        elif row.mono >= self._knowledge.deadlines.get(assignment, inf):
            self._found(segment, row, "started after its lease had run out")
        if row.key is None:
            return
        for other, start in self._ghosts[self._whole(row.partition), row.key]:
            if row.mono < self._knowledge.deadlines.get((other.member, start.partition, start.assignment), 0.0):
                self._found(segment, row, f"started before the lease of {other.label} row {start.n} expired")
        running = self._running[self._whole(row.partition), row.key]
        for other, start in running:
            earlier = other.member, start.partition, start.assignment
            if other is not segment and self._excused(row, assignment, earlier):
                self.at_loss += 1
            else:
                self._found(segment, row, f"started while {other.label} row {start.n} ran a message of its key")
        running.append((segment, row))

    def _excused(self, row: Row, assignment: Assignment, earlier: Assignment) -> bool:
        """Return whether a fault excuses the overlap of a later run with an earlier run.

        A fault excuses an overlap if the earlier lease had expired, the broker had removed one of the two members, or
        the earlier assignment ended as lost.
        """
        deadline = self._knowledge.deadlines.get(earlier)
        if deadline is not None and (deadline <= row.mono or self._knowledge.outlasting):
            return deadline <= row.mono
        for one in (earlier, assignment):
            removal = self._knowledge.removals.get(one)
            if removal is not None:
                return removal.after <= row.mono
        # The member had joined again between two snapshots, or had recorded the loss itself.
        span = self._knowledge.spans.get(earlier)
        return span is not None and span.ending == "lost"

    def _found(self, segment: Segment, row: Row, what: str) -> None:
        self.count += 1
        if len(self.witnesses) < _WITNESSES:
            self.witnesses.append(f"{row.partition} position {row.position}, {segment.label} row {row.n}: {what}")


class _Run:
    """A message in an assignment: its first start, and whether the assignment finished or abandoned the message."""

    __slots__ = ("abandoned", "begun", "finished")

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.finished = False
        self.abandoned = False


class _Runs:
    """The assignments that ran each message, in the order of their first starts."""

    def __init__(self, knowledge: Knowledge) -> None:
        from memsource.history.rows import whole

        self._knowledge = knowledge
        self._whole = whole
        self._runs: dict[tuple[str, int], dict[Assignment, _Run]] = defaultdict(dict)

    def see(self, event: str, segment: Segment, row: Row) -> None:
        if event == "started":
            runs = self._runs[self._whole(row.partition), row.position]
            runs.setdefault((segment.member, row.partition, row.assignment), _Run(row.mono))
        elif event in ("abandoned", "dlq_confirmed") or (event == "ended" and row.text == "ok"):
            run = self._runs[self._whole(row.partition), row.position].get(
                (segment.member, row.partition, row.assignment)
            )
            if run is not None and event == "abandoned":
                run.abandoned = True
            elif run is not None and not run.abandoned:
                # A handover does not wait for an unconfirmed dead letter, so such a message does not count as finished.
                run.finished = True

    def duplicates(self) -> dict[str, int]:
        counted = Counter({"kill": 0, "freeze": 0, "clean": 0})
        for runs in self._runs.values():
            order = list(runs)
            for index, assignment in enumerate(order):
                cause = self._cause(assignment, order[:index], runs)
                if cause is not None:
                    counted[cause] += 1
        return dict(counted)

    def _cause(
        self, assignment: Assignment, earlier: Sequence[Assignment], runs: Mapping[Assignment, _Run]
    ) -> str | None:
        """Return the cause of a repeated run; None for a first run, or for an unfinished message of a clean handover.

        After a clean handover, the next owner may run a message that waited for a retry. After a crash or a loss, the
        next owner may run every earlier message again, because the broker may not have received the result.
        """
        if not earlier:
            return None
        removal = self._knowledge.removals.get(assignment)
        if removal is not None and runs[assignment].begun > removal.after:
            # The removed member ran concurrently with the next owner until the member was told of its removal.
            return self._knowledge.cause(assignment)
        for one in reversed(earlier):
            cause = self._knowledge.cause(one)
            if cause != "clean" or runs[one].finished:
                return cause
        return None
