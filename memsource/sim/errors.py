"""The errors of a simulation, and which exceptions of the user are findings."""

from __future__ import annotations

import sys
from typing import Any

from lanes.errors import LanesError


class SimulationError(LanesError):
    """A simulation could not run, or could not go on."""


class Refused(SimulationError):
    """Code in a simulation used something without virtual time.

    Examples are a thread, a socket, a signal, and a sleep by the wall clock.
    The message names it and its replacement.
    """


class Deadlock(SimulationError):
    """Every task waits for another task, and none for a time. The message names the tasks and where they wait."""


class Livelock(SimulationError):
    """No time passed during too many turns. The message names the tasks that took them."""


class NeverYields(Livelock):
    """A step of a task does not end; it must await something. The message names the task and its line."""


class Overtime(SimulationError):
    """The test did not end in its virtual time. The message names the lines where it and the other tasks wait."""


class ImpossiblePlan(SimulationError):
    """A plan asks for something that cannot happen. The message names the field, its value and its range."""


class TokenRefused(SimulationError):
    """A replay token is damaged, or belongs to another version of lanes or another minor version of Python."""


class Nondeterministic(SimulationError):
    """The same plan gave two different runs. The message names the first different row and likely causes."""


class SimulationFailed(AssertionError):
    """A simulated test failed. The message has the finding, the smallest failing run, and the token that repeats it."""


def is_finding(error: BaseException) -> bool:
    """Whether an exception says that the code under test is wrong.

    Any ``Exception`` does, and so does the failure of ``pytest.fail``.
    Bad use of the simulation is no finding. Neither is an exception for the runner of the test: Ctrl-C, an exit,
    ``pytest.skip``.
    """
    if isinstance(error, Exception):
        return not isinstance(error, ImpossiblePlan | Refused)
    # Code that raises it has imported it.
    pytest: Any = sys.modules.get("pytest")
    return (
        pytest is not None
        and isinstance(error, pytest.fail.Exception)
        and not isinstance(error, pytest.xfail.Exception)
    )


def notable(error: BaseException) -> BaseException:
    """The first exception of a group that is more than an ``Exception``, or bad use; otherwise the group itself."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            found = notable(each)
            if not isinstance(found, Exception) or not is_finding(found):
                return found
    return error
