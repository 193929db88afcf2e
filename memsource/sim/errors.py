"""What a simulation can end with beside its findings."""

from __future__ import annotations

from lanes.errors import LanesError

__all__ = [
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
]


class SimulationError(LanesError):
    """A simulation could not be run, or could not go on."""


class Refused(SimulationError):
    """What runs in a simulation asked for something that has no virtual time: a thread, a socket, a signal, a sleep
    by the wall clock. Names it, and what to use instead."""


class Deadlock(SimulationError):
    """Every task waits for another one, and none for a time. Names the tasks and where they wait."""


class Livelock(SimulationError):
    """So many turns in which no time has passed. Names the tasks that take them."""


class NeverYields(Livelock):
    """One step of a task does not end: it has to await something. Names the task, and the line it is at."""


class Overtime(SimulationError):
    """The test did not end in its virtual time. Names what it waits for, and where the other tasks wait."""


class ImpossiblePlan(SimulationError):
    """A plan asks for what cannot happen: names the field, its value, and what it may be."""


class TokenRefused(SimulationError):
    """A replay token is damaged, or of another version of lanes or another minor version of Python."""


class Nondeterministic(SimulationError):
    """The same plan gave two different runs. Names the first row in which they differ, and what to look for."""


class SimulationFailed(AssertionError):
    """A simulated test has failed: what was found, in which smallest run, and the token that repeats it."""
