"""What an exception of the user's means for a run: something found, or the end of everything."""

from __future__ import annotations

import sys
from typing import Any

from memsource.sim.errors import ImpossiblePlan, Refused

__all__ = ["is_finding", "notable"]


def is_finding(error: BaseException) -> bool:
    """Whether it says that the code under test is wrong: any ``Exception``, and what ``pytest.fail`` raises.

    Bad use of the simulation is not, nor what is meant for whoever runs the test: Ctrl-C, an exit, ``pytest.skip``.
    """
    if isinstance(error, Exception):
        return not isinstance(error, ImpossiblePlan | Refused)
    # Whoever raises it has imported it.
    pytest: Any = sys.modules.get("pytest")
    return (
        pytest is not None
        and isinstance(error, pytest.fail.Exception)
        and not isinstance(error, pytest.xfail.Exception)
    )


def notable(error: BaseException) -> BaseException:
    """Of a group the first one that is more than an ``Exception``, or bad use; else the group itself."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            found = notable(each)
            if not isinstance(found, Exception) or not is_finding(found):
                return found
    return error
