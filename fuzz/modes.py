"""In every order, poison policy and kind of source the engine does what a naive model does, batches included.

The state machine of ``tests.core.test_engine_modes_machine``, with longer runs.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis.stateful import get_state_machine_test

from tests.core.test_engine_modes_machine import ModesMachine

STEPS = 50


def properties(effort: settings, tick: Callable[[], None]) -> list[Callable[[], None]]:
    """Runs of up to ``STEPS`` times several dozen steps."""

    class Counted(ModesMachine):
        def __init__(self) -> None:
            super().__init__()
            tick()

        def teardown(self) -> None:
            # The bytes of a guided fuzzer may have ended before there was an engine.
            if hasattr(self, "engine"):
                super().teardown()

    return [get_state_machine_test(Counted, settings=settings(effort, stateful_step_count=STEPS))]
