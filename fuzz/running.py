"""Running a target for a time: batches of examples until it is over, or until one fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hypothesis import HealthCheck, settings


class Attack(Protocol):
    """One batch of examples."""

    def __call__(self, effort: settings, tick: Callable[[], None]) -> None:
        """Run a test under ``effort``, calling ``tick`` for every example. Raises what an example raises."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Something to attack. ``batch``: examples that take about a second."""

    name: str
    invariant: str
    attack: Attack
    batch: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """What an attack on a target came to. ``failure`` is what a falsifying example raised, with the example."""

    name: str
    examples: int
    seconds: float
    failure: BaseException | None


def run(target: Target, seconds: float, *, batch: int | None = None) -> Result:
    """Attack for so long, with one batch at least; stops at the first failure. Making one small takes minutes."""
    effort = settings(
        max_examples=batch or target.batch,
        deadline=None,
        # Each batch has to be another one, also where a profile for CI says otherwise.
        derandomize=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    examples = 0

    def tick() -> None:
        nonlocal examples
        examples += 1

    failure: BaseException | None = None
    begin = time.monotonic()
    while failure is None:
        try:
            target.attack(effort, tick)
        except Exception as error:
            failure = error
        if time.monotonic() - begin >= seconds:
            break
    return Result(name=target.name, examples=examples, seconds=time.monotonic() - begin, failure=failure)
