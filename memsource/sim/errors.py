"""The errors of a simulation, and the test that tells a finding from another exception."""

from __future__ import annotations

import sys
from typing import Any

from lanes.errors import LanesError


class SimulationError(LanesError):
    """The base of the errors of a simulation that cannot start or cannot continue."""


class Refused(SimulationError):
    """Code in a simulation used something without virtual time.

    Examples are a thread, a socket, a signal, and a sleep by the wall clock.
    The message names the call and its replacement.
    """


class Deadlock(SimulationError):
    """Every task waits for another task, and no task waits for a time.

    The message names the tasks and the lines where they wait.
    """


class Livelock(SimulationError):
    """No time passed during too many turns. The message names the tasks that took most of these turns."""


class NeverYields(Livelock):
    """A step of a task does not end. The task must await something. The message names the task and its line."""


class Overtime(SimulationError):
    """The test did not end in its virtual time. The message names the lines where the test and the other tasks wait."""


class ImpossiblePlan(SimulationError):
    """An argument asks for something that cannot happen. The message names the argument, its value and its range."""


class TokenRefused(SimulationError):
    """A replay token is damaged, or belongs to another version of lanes or another minor version of Python."""


class Nondeterministic(SimulationError):
    """One plan produced two different runs. The message names the first different row and likely causes."""


class SimulationFailed(AssertionError):
    """A simulated test failed. The message has the finding, the smallest failing run, and the token of that run."""


def is_finding(error: BaseException) -> bool:
    """Return whether an exception shows a fault of the code under test.

    Each ``Exception`` and the failure of ``pytest.fail`` are findings. ``ImpossiblePlan`` and ``Refused`` are no
    findings, because they report bad use of the simulation. An exception for the runner of the test is no finding
    either: Ctrl-C, an exit, ``pytest.skip``.
    """
    if isinstance(error, Exception):
        return not isinstance(error, ImpossiblePlan | Refused)
    # Code that raises an exception of pytest has imported pytest.
    pytest: Any = sys.modules.get("pytest")
    return (
        pytest is not None
        and isinstance(error, pytest.fail.Exception)
        and not isinstance(error, pytest.xfail.Exception)
    )


def notable(error: BaseException) -> BaseException:
    """Return the first exception of a group that is no finding; without one return the group itself."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            found = notable(each)
            if not isinstance(found, Exception) or not is_finding(found):
                return found
    return error
