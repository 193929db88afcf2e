"""Copies of the user's state at the end of a run, and their comparison."""

from __future__ import annotations

import copy
import inspect
import reprlib
from collections.abc import Callable, Collection

from memsource.sim.errors import ImpossiblePlan


def copied(state: Callable[[], object]) -> object:
    """Call ``state``, and return a copy of its value.

    Args:
        state: Function that returns the state.

    Returns:
        A deep copy.

    Raises:
        ImpossiblePlan: The function is async, or its value is an awaitable, or cannot be copied and compared.
    """
    if not callable(state) or inspect.iscoroutinefunction(state):
        raise ImpossiblePlan(
            f"check(state={state!r:.200}): must be a plain function that returns the state, such as "
            "lambda: rows; await the state before the call"
        )
    found = state()
    if inspect.isawaitable(found):
        if inspect.iscoroutine(found):
            found.close()
        raise ImpossiblePlan(
            f"check(state=…): the function returned {found!r:.200}: await the result before check, and let the "
            "function return the result"
        )
    try:
        kept = copy.deepcopy(found)
        same = bool(kept == found)
    except Exception as error:
        raise ImpossiblePlan(
            f"check(state=…): the returned value cannot be copied and compared ({error}): let the function return "
            "plain values, such as a dict of them"
        ) from error
    if not same:
        raise ImpossiblePlan(
            f"check(state=…): the returned value is not equal to a copy of itself ({reprlib.repr(found)}), so "
            "it would differ in every run: let the function return plain values, such as a dict of them, or objects "
            "with __eq__"
        )
    return kept


def apart(found: object, expected: object, other: str = "") -> str:
    """Return a line about the first difference of two states, with its path in nested values.

    Args:
        found: A state.
        expected: The state to compare with.
        other: Name of the run with the state ``expected``, if this state may be wrong; "" = the state is right.

    Returns:
        The line.
    """
    has, lacks = _has(other), f"{other} lacks it" if other else "not expected at all"
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in [*expected, *(key for key in found if key not in expected)]:
            if key not in found:
                return f"{reprlib.repr(key)} is missing, {has} {reprlib.repr(expected[key])}"
            if key not in expected:
                return f"{reprlib.repr(key)} is {reprlib.repr(found[key])}, {lacks}"
            if _differ(found[key], expected[key]):
                return _within(reprlib.repr(key), found[key], expected[key], other)
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        for number, (one, wanted) in enumerate(zip(found, expected, strict=False)):
            if _differ(one, wanted):
                return _within(f"item {number}", one, wanted, other)
        return f"{len(found)} items, {has} {len(expected)}"
    if isinstance(found, set | frozenset) and isinstance(expected, set | frozenset):
        missing, more = _some(expected - found), _some(found - expected)
        extra = f"was found, {lacks}" if other else "was not expected"
        return "; ".join([*(f"{one} is missing" for one in missing), *(f"{one} {extra}" for one in more)])
    return f"{reprlib.repr(found)}, {has} {reprlib.repr(expected)}"


def _differ(one: object, other: object) -> bool:
    """Return whether two values differ, compared as containers compare: identical objects are equal."""
    return one is not other and one != other


def _within(where: str, found: object, expected: object, other: str) -> str:
    kinds = dict, list, tuple, set, frozenset
    if any(isinstance(found, kind) and isinstance(expected, kind) for kind in kinds):
        return f"in {where}: {apart(found, expected, other)}"
    return f"{where} is {reprlib.repr(found)}, {_has(other)} {reprlib.repr(expected)}"


def _has(other: str) -> str:
    return f"{other} has" if other else "expected"


def _some(items: Collection[object]) -> list[str]:
    """Return the text of the item whose text sorts first, which is the same in every process."""
    return sorted(map(reprlib.repr, items))[:1]
