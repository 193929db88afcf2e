"""The histories of a run: verdicts of the checkers, and the causes of redeliveries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from demo.group.findings import Fault, GroupFindings, Knowledge, findings
from demo.lateness import Delay
from demo.membership import Snapshot
from lanes.errors import LanesError


class Verdict(NamedTuple):
    """The verdict of a checker.

    Attributes:
        name: Name of the checker.
        status: The verdict: passed, violated or unproven; on Spark: held, violated or unproven.
        detail: Reason for the status, in one line.
    """

    name: str
    status: str
    detail: str


class Seen(NamedTuple):
    """Facts about a group outside its histories.

    Attributes:
        snapshots: States of the group in the reports of its broker.
        faults: Faults of the scenario.
        late: Spans in which each member was late, by name.
        renewal: Seconds that a member has for a renewal or a heartbeat; 0.0 = unknown.
    """

    snapshots: Sequence[Snapshot]
    faults: Sequence[Fault]
    late: Mapping[str, Sequence[Delay]] = {}
    renewal: float = 0.0


class Findings(NamedTuple):
    """Facts from all histories of a run.

    Attributes:
        verdicts: Verdict of each checker.
        redelivered: Cause (restart, held, settled or late) → number of redeliveries.
        peak_in_flight: Highest number of messages that one process had in flight.
        group: Figures of a group or cohort; None without a group.
        stranded: Number of published events that no worker has handled; None without a history.
    """

    verdicts: Sequence[Verdict]
    redelivered: Mapping[str, int]
    peak_in_flight: int
    group: GroupFindings | None = None
    stranded: int | None = None


def examine(directory: Path, seen: Seen | None = None) -> Findings:
    """Read and check all segments of a directory. Blocks. ``seen`` states facts about a group; None without a group."""
    import memsource
    from memsource.checkers import MARGIN, BoundedRepeats, NothingStranded, checkers_within

    try:
        segments = memsource.read([directory])
    except LanesError as error:
        # A missing history proves nothing.
        return Findings([Verdict("history", "unproven", str(error))], {}, 0)
    knowledge = Knowledge(segments, *seen) if seen is not None else None
    # A frozen process is late by the length of the freeze, and its history does not record the freeze.
    frozen = knowledge.frozen if knowledge is not None else 0.0
    checkers = (*checkers_within(MARGIN + frozen), NothingStranded)
    if knowledge is not None and knowledge.deadlines:
        checkers += (partial(BoundedRepeats, excused=knowledge.forgotten),)
    checked = memsource.check(segments, checkers, taken=knowledge.taken if knowledge is not None else ())
    verdicts = [
        Verdict(found.name, found.status, _detail(found.violations, found.witnesses, found.reasons))
        for found in checked
    ]
    stranded = sum(found.violations for found in checked if found.name == NothingStranded.__name__)
    counts = memsource.counts(segments)
    group = findings(knowledge) if knowledge is not None else None
    return Findings(verdicts, counts.redeliveries, counts.peak_in_flight, group, stranded)


def _detail(violations: int, witnesses: Sequence[str], reasons: Sequence[str]) -> str:
    first = next(iter((*witnesses, *reasons)), "")
    return f"{violations} violations, the first: {first}" if violations else first
