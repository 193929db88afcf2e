"""Tools around a run of ``lanes``: brokers in memory, histories, checkers of promises, and the simulator.

``simulate`` runs a user's own handler through many orders of events and faults; ``README.md`` has an example. The suite
that every source passes is in ``memsource.contract``. The Hypothesis strategies that draw plans are in
``memsource.sim.plans.strategies``, and the base class of state machines is in ``memsource.sim.runs.machine``.

The package imports a public name at the first use of the name, because every test run loads the pytest plugin. The
plugin imports this package.

Reading order: the rooms ``memory``, ``kafka``, ``jetstream``, ``history``, ``checkers``, ``contract``, ``sim``,
``adapters``, ``explorer``; and ``personality``, ``cli``, ``pytest_plugin``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
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
    from memsource.checkers.report import Checked, Counts, check_files, counts, exit_status, render
    from memsource.history.reader import Gap, HistoryError, Segment, read, read_bytes
    from memsource.history.rows import Row
    from memsource.history.timeline import Timeline
    from memsource.memory.attempts import MemoryAttempts
    from memsource.memory.broker import MemoryBroker
    from memsource.memory.group import Group
    from memsource.memory.group_source import GroupSource
    from memsource.memory.locks import LockServer, MemoryLocks
    from memsource.memory.publisher import MemoryPublisher
    from memsource.memory.source import MemoryDeadLetters, MemorySource
    from memsource.memory.states import MemoryStates
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
    from memsource.sim.plans.faults import FaultBudget, faults
    from memsource.sim.plans.plan import Fault, Plan, Schedule
    from memsource.sim.plans.traffic import Traffic
    from memsource.sim.runs.campaign import Campaign, CampaignReport, Failure
    from memsource.sim.runs.run import Run
    from memsource.sim.runs.simulate import Simulation, simulate
    from memsource.sim.world.injection import InjectedFailure
    from memsource.sim.world.worker import App, Worker
    from memsource.sim.world.world import World

__all__ = [
    "CHECKERS",
    "App",
    "AtLeastOnce",
    "BoundedInFlight",
    "Campaign",
    "CampaignReport",
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
    "LockServer",
    "MemoryAttempts",
    "MemoryBroker",
    "MemoryDeadLetters",
    "MemoryLocks",
    "MemoryPublisher",
    "MemorySource",
    "MemoryStates",
    "NeverYields",
    "NoCommitPastUnfinished",
    "NoOverlap",
    "NoSettleBeforeEnd",
    "Nondeterministic",
    "Overtime",
    "PerKeyOrder",
    "Plan",
    "Refused",
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
    "memsource.memory.attempts": ("MemoryAttempts",),
    "memsource.memory.broker": ("MemoryBroker",),
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
    "memsource.memory.group": ("Group",),
    "memsource.memory.group_source": ("GroupSource",),
    "memsource.memory.locks": ("LockServer", "MemoryLocks"),
    "memsource.history.reader": ("Gap", "HistoryError", "Segment", "read", "read_bytes"),
    "memsource.checkers.report": ("Checked", "Counts", "check_files", "counts", "exit_status", "render"),
    "memsource.history.rows": ("Row",),
    "memsource.sim.runs.campaign": ("Campaign", "Failure", "CampaignReport"),
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
    "memsource.sim.plans.faults": ("FaultBudget", "faults"),
    "memsource.sim.world.injection": ("InjectedFailure",),
    "memsource.sim.plans.plan": ("Fault", "Plan", "Schedule"),
    "memsource.sim.runs.run": ("Run",),
    "memsource.sim.runs.simulate": ("Simulation", "simulate"),
    "memsource.sim.plans.traffic": ("Traffic",),
    "memsource.sim.world.worker": ("App", "Worker"),
    "memsource.sim.world.world": ("World",),
    "memsource.memory.publisher": ("MemoryPublisher",),
    "memsource.memory.source": ("MemoryDeadLetters", "MemorySource"),
    "memsource.memory.states": ("MemoryStates",),
    "memsource.history.timeline": ("Timeline",),
}
"""The public names of each module."""

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
