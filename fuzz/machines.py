"""The state machines of the tests, with longer runs and a count of their examples."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test


def machine_properties(
    machine: type[RuleBasedStateMachine], steps: int, effort: settings, tick: Callable[[], None]
) -> list[Callable[[], None]]:
    """Return a test of ``machine`` with runs of up to ``steps`` steps. Each run calls ``tick`` once."""

    class Counted(machine):  # type: ignore[valid-type,misc]
        def __init__(self) -> None:
            super().__init__()
            tick()

        def teardown(self) -> None:
            # The bytes of a guided fuzzer may have ended before there was an engine.
            if hasattr(self, "engine"):
                super().teardown()

    return [get_state_machine_test(Counted, settings=settings(effort, stateful_step_count=steps))]
