"""Attacks one target with batches of random examples, until the time is over or an example fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from hypothesis import HealthCheck, settings

EFFORT: Final = settings(
    deadline=None,
    # Each batch must have new examples, even under a CI profile that repeats examples.
    derandomize=False,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


class Properties(Protocol):
    """A function that makes the tests of a target."""

    def __call__(self, effort: settings, tick: Callable[[], None]) -> list[Callable[[], None]]:
        """Return Hypothesis tests under ``effort``; each calls ``tick`` for every example."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A target of attacks.

    Attributes:
        name: Name of the target.
        invariant: Statement that must be true for every example.
        properties: Function that makes the tests.
        batch: Number of examples that take about a second.
    """

    name: str
    invariant: str
    properties: Properties
    batch: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of an attack on a target.

    Attributes:
        name: Name of the target.
        examples: Number of random examples.
        seconds: Duration of the attack.
        failure: Exception of an example that broke the invariant, with the example; None = the invariant held.
        guided: Number of inputs of the coverage-guided fuzzer, not counted in ``examples``.
    """

    name: str
    examples: int
    seconds: float
    failure: BaseException | None
    guided: int = 0


def run(target: Target, seconds: float, *, batch: int | None = None) -> Result:
    """Attack for ``seconds``, with at least one batch, and stop at the first failure.

    After a failure, the search for a smaller failing example may take minutes.
    """
    examples = 0

    def tick() -> None:
        nonlocal examples
        examples += 1

    effort = settings(EFFORT, max_examples=batch or target.batch)
    failure: BaseException | None = None
    begin = time.monotonic()
    while failure is None:
        try:
            for each in target.properties(effort, tick):
                each()
        except Exception as error:
            failure = error
        if time.monotonic() - begin >= seconds:
            break
    return Result(name=target.name, examples=examples, seconds=time.monotonic() - begin, failure=failure)
