"""The tools around a run of ``lanes``: a broker in memory to run it on, its history read back, its promises checked.

``simulate`` runs a user's own handler through many orders of events and faults: see ``README.md``. The suite that every
source passes is in ``memsource.contract``; plans as Hypothesis strategies are in ``memsource.sim.strategies``, the base
class of state machines is in ``memsource.sim.machine``.

A name is imported when it is asked for: the pytest plugin, which every test run loads, shall not import all of this.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from memsource.attempts import MemoryAttempts
    from memsource.broker import MemoryBroker
    from memsource.checkers import (
        CHECKERS,
        AtLeastOnce,
        BoundedInFlight,
        Checker,
        DeadLetterBeforeSettle,
        NoCommitPastUnfinished,
        NoOverlap,
        NoSettleBeforeEnd,
        PerKeyOrder,
        Verdict,
        check,
    )
    from memsource.group import Group
    from memsource.group_source import GroupSource
    from memsource.history import Gap, HistoryError, Segment, read, read_bytes
    from memsource.report import Checked, Counts, check_files, counts, exit_status, render
    from memsource.rows import Row
    from memsource.sim.campaign import Campaign, Failure, Report
    from memsource.sim.errors import (
        Deadlock,
        ImpossiblePlan,
        Livelock,
        NeverYields,
        Nondeterministic,
        Overtime,
        Refused,
        SimulationError,
        SimulationFailed,
        TokenRefused,
    )
    from memsource.sim.faults import FaultBudget, faults
    from memsource.sim.injection import InjectedFailure
    from memsource.sim.plan import Fault, Plan, Schedule
    from memsource.sim.run import Run
    from memsource.sim.simulate import Simulation, simulate
    from memsource.sim.traffic import Traffic
    from memsource.sim.worker import App, Worker
    from memsource.sim.world import World
    from memsource.source import MemoryDeadLetters, MemorySource
    from memsource.timeline import Timeline

__all__ = [
    "CHECKERS",
    "App",
    "AtLeastOnce",
    "BoundedInFlight",
    "Campaign",
    "Checked",
    "Checker",
    "Counts",
    "DeadLetterBeforeSettle",
    "Deadlock",
    "Failure",
    "Fault",
    "FaultBudget",
    "Gap",
    "Group",
    "GroupSource",
    "HistoryError",
    "ImpossiblePlan",
    "InjectedFailure",
    "Livelock",
    "MemoryAttempts",
    "MemoryBroker",
    "MemoryDeadLetters",
    "MemorySource",
    "NeverYields",
    "NoCommitPastUnfinished",
    "NoOverlap",
    "NoSettleBeforeEnd",
    "Nondeterministic",
    "Overtime",
    "PerKeyOrder",
    "Plan",
    "Refused",
    "Report",
    "Row",
    "Run",
    "Schedule",
    "Segment",
    "Simulation",
    "SimulationError",
    "SimulationFailed",
    "Timeline",
    "TokenRefused",
    "Traffic",
    "Verdict",
    "Worker",
    "World",
    "check",
    "check_files",
    "counts",
    "exit_status",
    "faults",
    "read",
    "read_bytes",
    "render",
    "simulate",
]

_HOMES: Final = {
    "memsource.attempts": ("MemoryAttempts",),
    "memsource.broker": ("MemoryBroker",),
    "memsource.checkers": (
        "CHECKERS",
        "AtLeastOnce",
        "BoundedInFlight",
        "Checker",
        "DeadLetterBeforeSettle",
        "NoCommitPastUnfinished",
        "NoOverlap",
        "NoSettleBeforeEnd",
        "PerKeyOrder",
        "Verdict",
        "check",
    ),
    "memsource.group": ("Group",),
    "memsource.group_source": ("GroupSource",),
    "memsource.history": ("Gap", "HistoryError", "Segment", "read", "read_bytes"),
    "memsource.report": ("Checked", "Counts", "check_files", "counts", "exit_status", "render"),
    "memsource.rows": ("Row",),
    "memsource.sim.campaign": ("Campaign", "Failure", "Report"),
    "memsource.sim.errors": (
        "Deadlock",
        "ImpossiblePlan",
        "Livelock",
        "NeverYields",
        "Nondeterministic",
        "Overtime",
        "Refused",
        "SimulationError",
        "SimulationFailed",
        "TokenRefused",
    ),
    "memsource.sim.faults": ("FaultBudget", "faults"),
    "memsource.sim.injection": ("InjectedFailure",),
    "memsource.sim.plan": ("Fault", "Plan", "Schedule"),
    "memsource.sim.run": ("Run",),
    "memsource.sim.simulate": ("Simulation", "simulate"),
    "memsource.sim.traffic": ("Traffic",),
    "memsource.sim.worker": ("App", "Worker"),
    "memsource.sim.world": ("World",),
    "memsource.source": ("MemoryDeadLetters", "MemorySource"),
    "memsource.timeline": ("Timeline",),
}
"""Module → what it has of ``__all__``."""

_HOME: Final = {name: module for module, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(home), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
