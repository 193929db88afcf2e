"""The base class of a checker, which judges one promise row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from math import inf
from typing import Protocol, TypeVar

from memsource.checkers.verdict import Findings, Verdict
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Assignment, Timeline

Handler = Callable[[Segment, Row], None]
Method = TypeVar("Method", bound=Callable[..., None])

_EVENTS = "events"


class Checker(Protocol):
    """The judge of one promise. A checker receives each row of its events once, in the order of the timeline."""

    name: str

    def handlers(self) -> Mapping[str, Handler]:
        """Return event → method that receives the rows of the event."""

    def verdict(self) -> Verdict:
        """The judgement after the last row. Changes nothing."""


def on(*events: str) -> Callable[[Method], Method]:
    """Register a method of a ``PromiseChecker`` for the rows of these events.

    A name of two words, such as ``"ended error"``, stands for rows of the event ``ended`` with the text ``error``. The
    name ``"ended ok"`` also stands for the rows ``published``, unless the class registers a method for them.
    """

    def mark(method: Method) -> Method:
        method.__dict__[_EVENTS] = events
        return method

    return mark


class PromiseChecker:
    """A checker whose methods register for events by the decorator ``on``. The class name is the checker's name.

    A method of a subclass replaces the method of the base class for the same event. ``_needs_order`` is True for a
    promise that compares rows of different processes.
    """

    name: str
    _needs_order = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = cls.__name__

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._committing = timeline.committing
        self._incomparable = timeline.incomparable
        self._taken = timeline.taken
        self._findings = Findings(self.name, timeline)

    def handlers(self) -> Mapping[str, Handler]:
        """Return event → method that receives the rows of the event."""
        found: dict[str, Handler] = {}
        for kind in reversed(type(self).__mro__):
            for name, method in vars(kind).items():
                for asked in getattr(method, _EVENTS, ()):
                    event, _, text = asked.partition(" ")
                    found[event] = partial(_only, text, getattr(self, name)) if text else getattr(self, name)
                    if asked == "ended ok":
                        # A message with outputs is finished when the broker has confirmed them.
                        found.setdefault("published", getattr(self, name))
        return found

    @cached_property
    def _losses(self) -> Mapping[Assignment, int]:
        """Number of the ``lost`` row of each lost assignment."""
        return {
            (segment, row.partition, row.assignment): row.n
            for segment in self._timeline.segments
            for row in segment.rows
            if row.event == "lost"
        }

    def _unaware(self, segment: Segment, row: Row) -> bool:
        """Return whether the broker takes this assignment in the run, and its process noticed no loss by this row."""
        assignment = segment, row.partition, row.assignment
        return assignment in self._taken and row.n < self._losses.get(assignment, inf)

    def verdict(self) -> Verdict:
        """The judgement after the last row. Changes nothing."""
        return self._findings.verdict(across=self._needs_order, note=self._note(), doubts=self._doubts())

    def _note(self) -> str:
        """Return the note of the verdict: further measurements, or an empty text."""
        return ""

    def _doubts(self) -> dict[str, int]:
        """Return the reasons for doubt that appear only after the last row, with their counts."""
        return {}


def _only(text: str, method: Handler, segment: Segment, row: Row) -> None:
    if row.text == text:
        method(segment, row)
