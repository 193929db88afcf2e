"""The engine does what a naive model does, whatever the order of its calls.

The state machine of ``tests.core.test_engine_machine``, with far longer runs.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.core.test_engine_machine import EngineMachine

STEPS = 250


def attack(effort: settings, tick: Callable[[], None]) -> None:
    """One batch of runs of up to ``STEPS`` steps."""

    class Counted(EngineMachine):
        def __init__(self) -> None:
            super().__init__()
            tick()

    run_state_machine_as_test(Counted, settings=settings(effort, stateful_step_count=STEPS))
