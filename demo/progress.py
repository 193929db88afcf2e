"""The progress of a run of the demo, for the view and for hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """The state of a run, updated in place.

    ``phase``: what happens now, in words. ``seconds``: since the main part began. ``stored``, ``dead_letters``:
    events done so. ``repeats``, ``violations``: refused applies. ``pending``, ``unacknowledged``: what the server
    says of the consumer. ``answering``: whether the server answers. ``worker_pid``: of the worker that runs, or
    None. ``starts``: workers started so far. ``status``: what the worker said last, as numbers. ``stream``:
    where the events are.
    """

    events: int = 0
    cases: int = 0
    phase: str = "reading the log"
    seconds: float = 0.0
    published: int = 0
    serial_rate: float = 0.0
    stored: int = 0
    dead_letters: int = 0
    repeats: int = 0
    violations: int = 0
    pending: int = 0
    unacknowledged: int = 0
    answering: bool = True
    worker_pid: int | None = None
    starts: int = 0
    stream: str = ""
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> int:
        """Number of events stored or dead-lettered. A dead letter that was written twice counts once."""
        return min(self.events, self.stored + self.dead_letters)
