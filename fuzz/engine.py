"""The engine does what a naive model does, whatever the order of its calls.

The state machine of ``tests.core.test_engine_machine``, with far longer runs.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis.stateful import get_state_machine_test

from tests.core.test_engine_machine import EngineMachine

STEPS = 250


def properties(effort: settings, tick: Callable[[], None]) -> list[Callable[[], None]]:
    """Runs of up to ``STEPS`` steps."""

    class Counted(EngineMachine):
        def __init__(self) -> None:
            super().__init__()
            tick()

        def teardown(self) -> None:
            # The bytes of a guided fuzzer may have ended before there was an engine.
            if hasattr(self, "engine"):
                super().teardown()

    return [get_state_machine_test(Counted, settings=settings(effort, stateful_step_count=STEPS))]
