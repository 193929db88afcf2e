"""Tools around a run of ``lanes``: brokers in memory, histories, checkers of promises, and the simulator.

``simulate`` runs a user's own handler through many orders of events and faults; ``README.md`` has an example. The suite
that every source passes is in ``memsource.contract``. Plans as Hypothesis strategies are in
``memsource.sim.plans.strategies``, and the base class of state machines is in ``memsource.sim.runs.machine``.

A public name is imported at its first use, because every test run loads the pytest plugin and with it this package.

Reading order: the rooms ``memory``, ``kafka``, ``jetstream``, ``history``, ``checkers``, ``contract``, ``sim``,
``explorer``; and ``personality``, ``cli``, ``pytest_plugin``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from functools import cache
from typing import TYPE_CHECKING

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
    from memsource.memory.source import MemoryDeadLetters, MemorySource
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


@cache
def _homes() -> dict[str, str]:
    """Return the module of each public name, which the imports above say."""
    tree = ast.parse(inspect.getsource(sys.modules[__name__]))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(_homes()[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
