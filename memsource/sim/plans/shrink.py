"""Shrinking of a failing plan: fewer and simpler faults, fewer deviations, fewer messages.

Delta debugging shortens the lists: A. Zeller and R. Hildebrandt, *Simplifying and Isolating Failure-Inducing Input*,
IEEE Transactions on Software Engineering 28(2), 2002. Unlike the published algorithm, ``ddmin`` never tests a part
alone, because one part seldom has all points that a failure needs. The search lowers each number by a large step, and
halves the step when the plan no longer fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from memsource.sim.errors import SimulationError
from memsource.sim.plans.plan import Fault, Plan, Schedule

ATTEMPTS: Final = 500
"""Default maximum number of runs: enough for 1,000 deviations of which about five are necessary."""

_LIMITS: Final = tuple(1 << power for power in range(11))

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The result of ``shrink``.

    Attributes:
        plan: The smallest failing plan.
        attempts: Number of runs of the search.
        complete: Whether the search finished; False = the search used up its attempts.
    """

    plan: Plan
    attempts: int
    complete: bool


def shrink(plan: Plan, fails: Callable[[Plan], bool], *, attempts: int = ATTEMPTS) -> Shrunk:
    """Search for the smallest failing plan. Blocks during the runs.

    The search changes neither personality nor seed. A ``complete`` result no longer fails without any one of its
    faults, deviations or jumps. Shrinking the plan of a ``complete`` result returns the same plan.

    Args:
        plan: A failing plan.
        fails: Runs a plan, and returns whether the plan fails as ``plan`` does. ``fails`` must return the same answer
            for the same plan; the search calls ``fails`` at most once for each plan.
        attempts: Maximum number of calls of ``fails``, 1 or more.

    Returns:
        The smallest failing plan of the search.

    Raises:
        SimulationError: ``plan`` itself does not fail.
        ValueError: ``attempts`` is below 1.
    """
    if attempts < 1:
        raise ValueError(f"attempts={attempts}: must be 1 or more; the first attempt runs the plan itself")
    search = _Search(fails, attempts)
    if not search.smaller(plan):
        raise SimulationError("the plan does not fail, so it cannot be shrunk; pass a plan that fails")
    complete = True
    try:
        before = None
        while before != search.best:
            before = search.best
            for step in (_less_schedule, _fewer_faults, _less_traffic, _simpler_faults, _simpler_schedule):
                step(search)
    except _OutOfAttemptsError:
        complete = False
    return Shrunk(search.best, search.attempts, complete)


class _OutOfAttemptsError(Exception):
    """The search has used up its attempts."""


class _Search:
    """The smallest failing plan, and the results of all plans."""

    def __init__(self, fails: Callable[[Plan], bool], limit: int) -> None:
        self.best = Plan()
        self.attempts = 0
        self._fails = fails
        self._limit = limit
        self._known: dict[Plan, bool] = {}

    def smaller(self, plan: Plan) -> bool:
        """Return whether a plan fails. A failing plan becomes the best plan."""
        known = self._known.get(plan)
        if known is None:
            if self.attempts == self._limit:
                raise _OutOfAttemptsError
            self.attempts += 1
            known = self._known[plan] = self._fails(plan)
        if known:
            self.best = plan
        return known


def _less_schedule(search: _Search) -> None:
    """Remove deviations and jumps, the last turns first, because the last turns may be after the failure."""
    schedule = search.best.schedule
    points = sorted([*schedule.deviations, *((turn, 0) for turn in schedule.jumps)])
    ddmin(points, lambda kept: search.smaller(replace(search.best, schedule=_schedule(kept))))


def _fewer_faults(search: _Search) -> None:
    ddmin(search.best.faults, lambda kept: search.smaller(replace(search.best, faults=tuple(kept))))


def _less_traffic(search: _Search) -> None:
    """Lower the limit of messages: first to a power of two with which the plan still fails, then in smaller steps."""

    def limited(limit: int) -> bool:
        return search.smaller(replace(search.best, limit=limit))

    limit = search.best.limit
    if limit is None:
        limit = next((each for each in _LIMITS if limited(each)), None)
    if limit is not None:
        _descend(limit, 1, limited)


def _simpler_faults(search: _Search) -> None:
    for number in range(len(search.best.faults)):
        fault = search.best.faults[number]
        others = [*search.best.faults[:number], *search.best.faults[number + 1 :]]
        simpler: Fault | None = fault
        while simpler is not None:
            plans = {each: replace(search.best, faults=tuple(sorted([*others, each]))) for each in _simpler(simpler)}
            simpler = next((each for each, plan in plans.items() if search.smaller(plan)), None)


def _simpler(fault: Fault) -> Iterator[Fault]:
    """Yield simpler variants of a fault: with a lower target, then a smaller amount, then an earlier boundary."""
    amounts = [amount for amount in (0.0, 1.0, float(int(fault.amount))) if abs(amount) < abs(fault.amount)]
    for target in dict.fromkeys((0, fault.target // 2)):
        if target < fault.target:
            yield replace(fault, target=target)
    for amount in dict.fromkeys(amounts):
        yield replace(fault, amount=amount)
    step = fault.at
    while step:
        yield replace(fault, at=fault.at - step)
        step //= 2


def _simpler_schedule(search: _Search) -> None:
    """Lower the index of each deviation, which then chooses an earlier task of the queue."""
    for number, (_, index) in enumerate(search.best.schedule.deviations):

        def changed(to: int, number: int = number) -> bool:
            schedule = search.best.schedule
            deviations = [*schedule.deviations]
            deviations[number] = (deviations[number][0], to)
            return search.smaller(replace(search.best, schedule=replace(schedule, deviations=tuple(deviations))))

        _descend(index, 1, changed)


def _schedule(points: Sequence[tuple[int, int]]) -> Schedule:
    """Make a schedule of points (turn, index), where index 0 stands for a jump."""
    return Schedule(tuple(point for point in points if point[1]), tuple(turn for turn, index in points if index == 0))


def ddmin(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> None:
    """Remove items without which the plan still fails: first all items, then halves, smaller parts and single items.

    An item that became unnecessary by a later removal remains; the next call removes the item.

    Args:
        items: The items.
        fails: Returns whether the remaining items still fail.
    """
    size = len(items)
    while items and size:
        for start in range((len(items) - 1) // size * size, -1, -size):
            rest = [*items[:start], *items[start + size :]]
            if fails(rest):
                items = rest
        size //= 2


def _descend(value: int, least: int, fails: Callable[[int], bool]) -> None:
    """Lower a number in decreasing steps, until the plan no longer fails with the next lower number."""
    step = value - least
    while step:
        if fails(value - step):
            value -= step
            step = min(step, value - least)
        else:
            step //= 2
