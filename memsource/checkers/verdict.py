"""What a checker says, and how it collects it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Timeline

__all__ = ["WITNESSES", "Checker", "Findings", "Handler", "Status", "Verdict", "at", "place", "printable"]

WITNESSES: Final = 5
"""Violations, and reasons of a kind, that a verdict names; the rest is counted."""

_SHOWN: Final = 200

Status = Literal["passed", "violated", "unproven"]
"""What is known of a promise: ``"unproven"`` where the history does not tell enough."""
Handler = Callable[[Segment, Row], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer of one checker to one history.

    ``violated``: ``violations`` were found, which stand whatever may be missing; the first ones are in
    ``witnesses``, a line each. ``unproven``: none was found, but the history does not show that there is none;
    ``reasons`` says why, also beside violations. ``passed``: the promise was kept, ``checked`` times. ``note``
    is what else the checker measured.
    """

    name: str
    status: Status
    checked: int
    violations: int = 0
    witnesses: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    note: str = ""


class Checker(Protocol):
    """One promise. A checker sees every row it asks for once, in the order of the timeline, and then judges."""

    name: str

    def handlers(self) -> Mapping[str, Handler]:
        """Which method takes the rows of which event."""

    def verdict(self) -> Verdict:
        """The judgement after the last row. Changes nothing."""


class Findings:
    """Violations and doubts of one checker, bounded however many there are."""

    def __init__(self, name: str, timeline: Timeline) -> None:
        self.checked = 0
        self._name = name
        self._timeline = timeline
        self._violations = 0
        self._witnesses: list[str] = []
        self._doubts: Counter[str] = Counter()
        self._unsaid: set[tuple[Segment, str]] = set()

    def violation(self, segment: Segment, row: Row, what: str) -> None:
        """The row shows a violation."""
        self._violations += 1
        if len(self._witnesses) < WITNESSES:
            self._witnesses.append(f"{place(segment, row)}: {what}")

    def doubt(self, why: str, count: int = 1) -> None:
        """Something cannot be said; doubts of the same reason are counted."""
        self._doubts[why] += count

    def unsaid(self, segment: Segment, name: str) -> None:
        """The ``begin`` row of a segment does not say what ``name`` was, and something would have to be held to it."""
        if (segment, name) not in self._unsaid:
            self._unsaid.add((segment, name))
            self.doubt(f"segments whose begin row does not say {name}")

    def verdict(self, *, across: bool = False, note: str = "", doubts: Mapping[str, int] | None = None) -> Verdict:
        """The verdict. ``across``: the promise needs an order between segments. ``doubts``: those that show only at the
        end, with their counts; 0 = none."""
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
    """Where a row stands, for a witness: partition, position, key, member and row number."""
    return f"{printable(row.partition)} position {row.position} key {row.key or 'none'}, {at(segment, row)}"


def at(segment: Segment, row: Row) -> str:
    """Member and number of a row."""
    return f"{segment.label} row {row.n}"


def printable(text: str, limit: int = _SHOWN) -> str:
    """One line that a terminal shows as it is: names in a history are somebody else's."""
    shown = text if text.isprintable() else text.encode("unicode_escape").decode()
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _some(reasons: list[str]) -> list[str]:
    more = len(reasons) - WITNESSES
    return reasons if more <= 0 else [*reasons[:WITNESSES], f"and {more} more of these"]
