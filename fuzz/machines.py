"""State machines of tests, run for longer and counted."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test


def machine_properties(
    machine: type[RuleBasedStateMachine], steps: int, effort: settings, tick: Callable[[], None]
) -> list[Callable[[], None]]:
    """Runs of up to ``steps`` steps of a machine that makes an ``engine``; ``tick`` is called with each."""

    class Counted(machine):  # type: ignore[valid-type,misc]
        def __init__(self) -> None:
            super().__init__()
            tick()

        def teardown(self) -> None:
            # The bytes of a guided fuzzer may have ended before there was an engine.
            if hasattr(self, "engine"):
                super().teardown()

    return [get_state_machine_test(Counted, settings=settings(effort, stateful_step_count=steps))]
