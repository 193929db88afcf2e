"""The engine agrees with a naive model in any order of its calls.

The target is the state machine of ``tests.core.test_engine_machine``, with far longer runs.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings

from fuzz.machines import machine_properties
from tests.core.test_engine_machine import EngineMachine

STEPS = 250


def properties(effort: settings, tick: Callable[[], None]) -> list[Callable[[], None]]:
    """Return tests of runs of up to ``STEPS`` steps."""
    return machine_properties(EngineMachine, STEPS, effort, tick)
