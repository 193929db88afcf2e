"""The errors of a simulation, and the function that distinguishes a finding from other exceptions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

from lanes.errors import LanesError


class SimulationError(LanesError):
    """Base class of the errors that stop a simulation at its start or during a run."""


class Refused(SimulationError):
    """Code in a simulation used something without virtual time.

    Examples are a thread, a socket, a signal, and a sleep by the wall clock.
    The message names the call and its replacement.
    """


class Deadlock(SimulationError):
    """Every task waits for another task, and no timer is set.

    The message names the tasks and the lines where they wait.
    """


class Livelock(SimulationError):
    """Too many turns of the loop passed without virtual time.

    The message names the tasks that took most of these turns.
    """


class NeverYields(Livelock):
    """A step takes too long, such as a loop without an ``await``. The message names the line, and the task if any."""


class Overtime(SimulationError):
    """The test did not end within ``time_limit`` seconds of virtual time.

    The message names the lines where the test and the other tasks wait.
    """


class ImpossiblePlan(SimulationError):
    """An argument describes something that cannot happen. The message names the argument, its value and the remedy."""


class TokenRefused(SimulationError):
    """A replay token is invalid, damaged, or of another version of lanes or another minor version of Python."""


class Nondeterministic(SimulationError):
    """Two runs of one plan differed. The message names the first difference and likely causes."""


class SimulationFailed(AssertionError):
    """A simulated test failed. The message has the finding, the smallest failing run, and the token of that run."""


_INTERNAL: Final = frozenset(("memsource", "lanes", "anyio", "asyncio", "contextlib"))
"""Packages whose frames ``users_frames`` leaves out."""


def users_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of simulator, ``lanes`` and event loop; None = no other frame."""
    frames = []
    while traceback is not None:
        if str(traceback.tb_frame.f_globals.get("__name__")).partition(".")[0] not in _INTERNAL:
            frames.append(traceback)
        traceback = traceback.tb_next
    kept: TracebackType | None = None
    for each in reversed(frames):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


def is_finding(error: BaseException) -> bool:
    """Return whether an exception shows a fault of the code under test.

    ``ImpossiblePlan`` and ``Refused`` are not findings, because they report wrong use of the simulation. Every other
    ``Exception`` and the failure of ``pytest.fail`` are findings. An exception for the test runner, such as Ctrl-C, an
    exit or ``pytest.skip``, is not a finding.
    """
    if isinstance(error, Exception):
        return not isinstance(error, ImpossiblePlan | Refused)
    # Only code that has imported pytest can raise an exception of pytest.
    pytest: Any = sys.modules.get("pytest")
    return (
        pytest is not None
        and isinstance(error, pytest.fail.Exception)
        and not isinstance(error, pytest.xfail.Exception)
    )


def notable(error: BaseException) -> BaseException:
    """Return the first exception of a group that is no finding; without such an exception, return ``error``."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            found = notable(each)
            if not isinstance(found, Exception) or not is_finding(found):
                return found
    return error


def cause_of(causes: Sequence[BaseException]) -> BaseException | None:
    """Return the first of these exceptions for ``raise … from``, without the frames that ``users_frames`` leaves out.

    Args:
        causes: Exceptions that led to findings. The first exception and its causes lose these frames.

    Returns:
        The exception; None without an exception.
    """
    waiting: list[BaseException | None] = [*causes[:1]]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = users_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__]
    return causes[0] if causes else None
