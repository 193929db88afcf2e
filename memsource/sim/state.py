"""The user's state at the end of a run: copied, and compared with that of another run."""

from __future__ import annotations

import copy
import inspect
import reprlib
from collections.abc import Callable
from itertools import count

from memsource.sim.errors import ImpossiblePlan

__all__ = ["apart", "copied"]


def copied(state: Callable[[], object]) -> object:
    """What ``state`` returns now, as it is now.

    Raises ``ImpossiblePlan`` for what is no plain function, and for what has to be awaited or cannot be copied.
    """
    if not callable(state) or inspect.iscoroutinefunction(state):
        raise ImpossiblePlan(
            f"check(state={state!r:.200}): must be a plain function that returns the state, such as "
            "lambda: rows; what has to be awaited is awaited before"
        )
    found = state()
    if inspect.isawaitable(found):
        if inspect.iscoroutine(found):
            found.close()
        raise ImpossiblePlan(
            f"check(state=…): the function returned {found!r:.200}: await it before, and let the function "
            "return the result"
        )
    try:
        return copy.deepcopy(found)
    except Exception as error:
        raise ImpossiblePlan(
            f"check(state=…): what the function returned cannot be copied ({error}): let it return plain values, such "
            "as a dict of them"
        ) from error


def apart(found: object, expected: object) -> str:
    """The first difference of two states, in a line."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in [*expected, *(key for key in found if key not in expected)]:
            if key not in found:
                return f"{reprlib.repr(key)} is missing, expected {reprlib.repr(expected[key])}"
            if key not in expected:
                return f"{reprlib.repr(key)} is {reprlib.repr(found[key])}, not expected at all"
            if found[key] != expected[key]:
                return f"{reprlib.repr(key)} is {reprlib.repr(found[key])}, expected {reprlib.repr(expected[key])}"
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        for number in count():
            if number >= len(found) or number >= len(expected):
                break
            if found[number] != expected[number]:
                return f"item {number} is {reprlib.repr(found[number])}, expected {reprlib.repr(expected[number])}"
        return f"{len(found)} items, expected {len(expected)}"
    return f"{reprlib.repr(found)}, expected {reprlib.repr(expected)}"
