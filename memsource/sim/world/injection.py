"""The faults of one run. A fault is due at a boundary, armed for a later call, or has happened."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from memsource.sim.plans.plan import Fault, FaultKind


class InjectedFailure(OSError):
    """The error that a planned fault makes ``World.io`` raise."""


class Moment(NamedTuple):
    """A fault that has happened.

    Attributes:
        at: Time on the clock of the histories, in seconds.
        fault: The fault.
        whom: Name of the affected worker or partition; "" = neither.
    """

    at: float
    fault: Fault
    whom: str


class Injection:
    """The faults of a plan. No method blocks.

    Some faults take effect at their boundary. A boundary only arms other faults, which take effect at the next call
    that can fail this way.

    Args:
        faults: Faults of the plan.

    Attributes:
        performed: Armed faults, and faults with or without an effect.
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
        """Arm a fault for the next call by the worker ``whom`` that can fail this way; "" = by any worker."""
        self._armed[fault.kind, whom].append(fault)

    def take(self, kind: FaultKind, whom: str = "") -> Fault | None:
        """Disarm and return the fault that acts now; None = no armed fault."""
        armed = self._armed.get((kind, whom))
        return armed.popleft() if armed else None

    def disarm(self, whom: str | None = None) -> None:
        """Disarm the faults of the worker ``whom``; None = all faults."""
        for key, armed in self._armed.items():
            if whom is None or whom == key[1]:
                armed.clear()

    def note(self, at: float, fault: Fault, whom: str) -> None:
        """Record that a fault happens at a time, to a worker or partition."""
        self.moments.append(Moment(at, fault, whom))

    @property
    def over(self) -> bool:
        """Whether all faults of the plan are over, with or without an effect, and no fault is armed."""
        return len(self.performed) >= len(self._faults) and not any(self._armed.values())

    @property
    def happened(self) -> Counter[str]:
        """Number of faults that have happened, by ``fault: kind``."""
        return Counter(f"fault: {moment.fault.kind}" for moment in self.moments)
