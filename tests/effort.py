"""The effort of tests with many runs: `make test` makes one run in ten, and `make campaign` makes all of them.

Such a test has the mark `sliced`, by which `make campaign` selects it. It asks this module for its number of runs. The
profile of Hypothesis decides: `full` in `make campaign`, and else `slice`. A test with `@given` has the mark
`hypothesis`, by which `make campaign` selects it too; the profile has its number of examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Final, TypeVar

from hypothesis import Phase, settings

SHARE: Final = 10
"""One run in so many is part of `make test`."""

_Job = TypeVar("_Job")
_Part = TypeVar("_Part")

FULL: Final = "full"
SLICE: Final = "slice"

# No deadline, because a busy machine may be slow. No explain phase, which traces every line: on Python 3.11, an alarm
# during that tracing made the interpreter hang.
_PHASES: Final = [phase for phase in Phase if phase is not Phase.explain]


_EXAMPLES: Final = 100
"""Examples of a test with `@given` that names no number of its own."""


def register() -> None:
    """Register both profiles, and load `slice`; `--hypothesis-profile full` then loads the other one."""
    for name, examples in ((FULL, _EXAMPLES), (SLICE, _EXAMPLES // SHARE)):
        settings.register_profile(name, deadline=None, phases=_PHASES, max_examples=examples)
    settings.load_profile(SLICE)


def is_full() -> bool:
    """Whether this session makes all runs."""
    return settings.get_current_profile_name() == FULL


def runs(every: int, *, least: int = 1) -> int:
    """Return the number of runs in this session.

    Args:
        every: Number of all runs.
        least: Number of runs that the test needs.
    """
    return every if is_full() else max(least, every // SHARE)


def processes() -> int:
    """Return the number of processes for the runs of a sliced test.

    ``make test`` has a worker for each core and few runs, and a new process needs seconds for its imports.
    """
    return 2 if is_full() else 1


def spread(function: Callable[[_Job], _Part], jobs: Sequence[_Job], processes: int) -> Iterator[_Part]:
    """Call a function for each job, in several processes or in this one, and yield the results in order.

    Args:
        function: A function of a module, so that another process can import it.
        jobs: The jobs.
        processes: Number of processes; 1 = this process.
    """
    if processes == 1:
        yield from map(function, jobs)
        return
    # A forked process would have the threads' locks of this one.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(function, jobs)
