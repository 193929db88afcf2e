"""The faults of one run: due at a boundary, armed for a later call, or happened."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from memsource.sim.plans.plan import Fault, FaultKind


class InjectedFailure(OSError):
    """The error of a call of ``World.io`` that the plan lets fail."""


class Moment(NamedTuple):
    """A fault that has happened.

    Attributes:
        at: Time on the clock of the histories, in seconds.
        fault: The fault.
        whom: Name of the worker or partition that the fault met; "" = neither.
    """

    at: float
    fault: Fault
    whom: str


class Injection:
    """The faults of a plan. Nothing blocks.

    Some faults act at their boundary. Other faults are only armed at their boundary, and strike the next call of their
    kind.

    Args:
        faults: Faults of the plan.

    Attributes:
        performed: Faults that acted or were armed at their boundary.
        moments: Faults that have happened.
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
        """Return the faults that are due at a boundary."""
        return self._due.get(boundary, ())

    def arm(self, fault: Fault, whom: str = "") -> None:
        """Let a fault strike the next call of its kind by the worker ``whom``; "" = by any worker."""
        self._armed[fault.kind, whom].append(fault)

    def take(self, kind: FaultKind, whom: str = "") -> Fault | None:
        """Disarm and return the fault that strikes now; None = no fault is armed."""
        armed = self._armed.get((kind, whom))
        return armed.popleft() if armed else None

    def disarm(self, whom: str | None = None) -> None:
        """Disarm the faults of the worker ``whom``; None = all faults."""
        for key, armed in self._armed.items():
            if whom is None or whom == key[1]:
                armed.clear()

    def note(self, at: float, fault: Fault, whom: str) -> None:
        """Note that a fault happens at a time, to a worker or partition."""
        self.moments.append(Moment(at, fault, whom))

    @property
    def over(self) -> bool:
        """Whether all faults of the plan were performed, and none is armed."""
        return len(self.performed) >= len(self._faults) and not any(self._armed.values())

    @property
    def happened(self) -> Counter[str]:
        """``fault: kind`` → number of faults that have happened."""
        return Counter(f"fault: {moment.fault.kind}" for moment in self.moments)
