"""A case for a checker: a history that keeps the promise, and a history that breaks the promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memsource.checkers import MakeChecker
from tests.memsource.checkers.rows import Fields, Rows, segment

Part = Fields | Sequence[Fields]

COMMITS = {"settles": "cumulative"}
CLOSES = {"settles": "cumulative", "hands_over": False}


@dataclass(frozen=True, kw_only=True)
class Case:
    """``keeps`` and ``breaks``: the rows of one or several processes, each with its own start time.

    ``witness``: the end of the first witness's text. ``asks``: what the checker has to know from the ``begin`` row.
    """

    make: MakeChecker
    what: str
    keeps: Sequence[Part]
    breaks: Sequence[Part]
    witness: str
    violations: int = 1
    checked: int | None = None
    asks: str = ""
    rules: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    then: Sequence[Part] = ()
    then_breaks: Sequence[Part] | None = None

    def __str__(self) -> str:
        return f"{self.make.name}: {self.what}"  # type: ignore[attr-defined]

    def kept(self, *, said: bool = True) -> list[Rows]:
        """The segments of the history that keeps the promise; ``said``: its ``begin`` rows say the rules."""
        return self._segments(self.keeps, self.then, said=said)

    def broken(self, *, said: bool = True) -> list[Rows]:
        """The segments of the history that breaks the promise."""
        then = self.then if self.then_breaks is None else self.then_breaks
        return self._segments(self.breaks, then, said=said)

    def _segments(self, first: Sequence[Part], then: Sequence[Part], *, said: bool) -> list[Rows]:
        rules = self.rules if said else None
        segments = [segment(*first, rules=rules, **self.more)]
        if then:
            segments.append(segment(*then, rules=rules, member="m-2", pid=2, start=self.more.get("start", 100.0) + 0.5))
        return segments
