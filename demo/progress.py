"""The progress of a run of the demo, for the view and for hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Kill:
    """A process that the demo killed with -9.

    Attributes:
        who: Name of the process.
        stored: Number of stored events at the kill.
        seconds: Seconds from the start of the main part to the kill.
        by: Name of the process or processes that continued; empty until the work continues.
        after: Seconds from the kill until the work continued; 0.0 while ``by`` is empty.
    """

    who: str
    stored: int
    seconds: float
    by: str = ""
    after: float = 0.0

    def __str__(self) -> str:
        text = f"{self.who} after {self.stored:,} events, at {self.seconds:.2f} s"
        return text if not self.by else f"{text}; {self.by} took over {self.after:.2f} s later"

    def over(self, by: str, seconds: float) -> None:
        """Record the process that continued, and the seconds since the start of the main part. Idempotent."""
        if not self.by:
            self.by, self.after = by, seconds - self.seconds


@dataclass
class Progress:
    """The state of a run, updated in place.

    Attributes:
        events: Number of events of the log.
        cases: Number of cases of the log.
        phase: Current step of the run, in words.
        seconds: Seconds since the main part began.
        published: Number of published events.
        serial_rate: Events per second of the serial loop; 0.0 before the measurement.
        stored: Number of stored events.
        dead_letters: Number of dead letters; 0 on Spark.
        repeats: Number of writes that the ledger refused as repeats.
        violations: Number of writes that the ledger refused as order violations.
        pending: Number of undelivered messages, by the server's report; in a group, number of unsettled messages.
        unacknowledged: Number of delivered and unacknowledged messages, by the server's report; 0 in a group.
        answering: Whether the server answers.
        worker_pid: Process id of the running worker; None without a running worker, in a group and on Spark.
        starts: Number of started workers or drivers.
        stream: Name of the stream or topic of the events.
        kills: Processes that the demo killed with -9.
        status: Latest report of the worker by field; in a group, the sums and the oldest key of all members' reports.
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
    kills: list[Kill] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> int:
        """Number of stored events plus dead letters, at most ``events``."""
        return min(self.events, self.stored + self.dead_letters)
