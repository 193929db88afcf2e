"""The verdict of a checker, and the findings that lead to the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Timeline

WITNESSES: Final = 5
"""Maximum number of violations, of gaps and of incomparable partitions that a verdict names; the verdict counts the
others.
"""

_SHOWN: Final = 200

Status = Literal["passed", "violated", "unproven"]
"""The state of a promise. ``"unproven"`` means that the history cannot decide, for example because rows are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer of one checker to one history.

    A violation counts even if rows are missing. A verdict without violations is ``"unproven"`` if it has ``reasons``.

    Attributes:
        name: Name of the checker.
        status: ``"passed"``, ``"violated"`` or ``"unproven"``.
        checked: Number of judgements of the checker.
        violations: Number of violations.
        witnesses: The first violations, one line for each.
        reasons: Reasons why the history does not prove the promise, one line for each.
        note: Other measurements of the checker.
    """

    name: str
    status: Status
    checked: int
    violations: int = 0
    witnesses: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    note: str = ""


class Findings:
    """The violations and doubts of one checker, with only the first witnesses."""

    def __init__(self, name: str, timeline: Timeline) -> None:
        self.checked = 0
        self._name = name
        self._timeline = timeline
        self._violations = 0
        self._witnesses: list[str] = []
        self._doubts: Counter[str] = Counter()
        self._unsaid: set[tuple[Segment, str]] = set()

    def violation(self, segment: Segment, row: Row, what: str) -> None:
        """Record that a row shows a violation."""
        self._violations += 1
        if len(self._witnesses) < WITNESSES:
            self._witnesses.append(f"{place(segment, row)}: {what}")

    def doubt(self, why: str, count: int = 1) -> None:
        """Record a reason why the history does not prove the promise, and count equal reasons."""
        self._doubts[why] += count

    def unsaid(self, segment: Segment, name: str) -> None:
        """Record that the ``begin`` row of a segment lacks the setting ``name``, which the checker needs."""
        if (segment, name) not in self._unsaid:
            self._unsaid.add((segment, name))
            self.doubt(f"segments whose begin row lacks {name}")

    def verdict(self, *, across: bool = False, note: str = "", doubts: Mapping[str, int] | None = None) -> Verdict:
        """Return the verdict of these findings.

        Args:
            across: Whether the promise needs an order between segments.
            note: Other measurements of the checker.
            doubts: Reasons that appear only after the last row, with their counts. A count of 0 has no effect.

        Returns:
            The verdict.
        """
        late = {why: count for why, count in (doubts or {}).items() if count}
        reasons = []
        if late or self._doubts:
            reasons = [f"{count} {why}" for why, count in sorted((self._doubts + Counter(late)).items())]
        gaps = [printable(str(gap)) for segment in self._timeline.segments for gap in segment.gaps]
        reasons += _some([f"gap in the history: {gap}" for gap in dict.fromkeys(gaps)])
        if across:
            incomparable = sorted(self._timeline.incomparable.items())
            reasons += _some([f"{printable(name)} across segments: {why}" for name, why in incomparable])
        status: Status = "violated" if self._violations else "unproven" if reasons else "passed"
        return Verdict(
            name=self._name,
            status=status,
            checked=self.checked,
            violations=self._violations,
            witnesses=tuple(self._witnesses),
            reasons=tuple(reasons),
            note=note,
        )


def place(segment: Segment, row: Row) -> str:
    """Return a text for a witness: partition, position, key, member, process id and number of the row."""
    return f"{printable(row.partition)} position {row.position} key {row.key or 'none'}, {at(segment, row)}"


def at(segment: Segment, row: Row) -> str:
    """Return a text of the member, the process id and the number of a row."""
    return f"{segment.label} row {row.n}"


def printable(text: str, limit: int = _SHOWN) -> str:
    """Return a text as one printable line, because the names in a history may contain any characters."""
    shown = text if text.isprintable() else text.encode("unicode_escape").decode()
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _some(reasons: list[str]) -> list[str]:
    more = len(reasons) - WITNESSES
    return reasons if more <= 0 else [*reasons[:WITNESSES], f"and {more} more of these"]
