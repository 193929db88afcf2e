"""The engine agrees with a naive model in every order, poison policy and kind of source, batches included.

The target is the state machine of ``tests.core.test_engine_modes_machine``, with longer runs.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings

from fuzz.machines import machine_properties
from tests.core.test_engine_modes_machine import ModesMachine

STEPS = 50


def properties(effort: settings, tick: Callable[[], None]) -> list[Callable[[], None]]:
    """Return tests of runs of up to ``STEPS`` rules. Each rule performs several steps."""
    return machine_properties(ModesMachine, STEPS, effort, tick)
