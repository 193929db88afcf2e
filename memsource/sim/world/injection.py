"""The faults of one run: where they are due, which are armed, and which have happened."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from memsource.sim.plans.plan import Fault, FaultKind


class InjectedFailure(OSError):
    """A call of ``World.io`` fails because the plan says so."""


class Moment(NamedTuple):
    """A fault that has happened: its time on the clock of the histories, and the worker or partition it met, or ""."""

    at: float
    fault: Fault
    whom: str


class Injection:
    """The ``faults`` of a plan. Nothing blocks.

    Some faults act at their boundary. Others are armed there, and strike the next call of their kind. ``performed``:
    faults that acted or were armed at a boundary. ``moments``: faults that have happened.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.performed: list[Fault] = []
        self.moments: list[Moment] = []
        self._faults = faults
        self._due: defaultdict[int, list[Fault]] = defaultdict(list)
        for fault in faults:
            self._due[fault.at].append(fault)
        self._armed: defaultdict[tuple[FaultKind, str], deque[Fault]] = defaultdict(deque)

    def __repr__(self) -> str:
        armed = sum(map(len, self._armed.values()))
        return f"<Injection: {len(self.performed)} of {len(self._faults)} faults, {armed} armed>"

    def at(self, boundary: int) -> Sequence[Fault]:
        """The faults that are due at this boundary."""
        return self._due.get(boundary, ())

    def arm(self, fault: Fault, whom: str = "") -> None:
        """Let a fault strike the next call of its kind, by the worker ``whom``; "" = by any."""
        self._armed[fault.kind, whom].append(fault)

    def take(self, kind: FaultKind, whom: str = "") -> Fault | None:
        """Take the fault that strikes now, which is then disarmed; None = there is none."""
        armed = self._armed.get((kind, whom))
        return armed.popleft() if armed else None

    def disarm(self, whom: str | None = None) -> None:
        """Disarm all faults, or those of one worker."""
        for key, armed in self._armed.items():
            if whom is None or whom == key[1]:
                armed.clear()

    def note(self, at: float, fault: Fault, whom: str) -> None:
        """Note that a fault happens now."""
        self.moments.append(Moment(at, fault, whom))

    @property
    def over(self) -> bool:
        """Whether all faults of the plan were performed, and none is armed."""
        return len(self.performed) >= len(self._faults) and not any(self._armed.values())

    @property
    def happened(self) -> Counter[str]:
        """``fault: kind`` → how often it has happened."""
        return Counter(f"fault: {moment.fault.kind}" for moment in self.moments)
