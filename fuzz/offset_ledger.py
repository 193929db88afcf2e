"""The ledger of a source that commits agrees with dicts and sets of every delivery.

The target is the property of ``tests.core.test_offset_ledger``, with longer runs.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.test_offset_ledger import STEPS, behaves_like_dicts_and_sets


def properties(effort: settings, tick: Callable[[], None]) -> list[Callable[[], None]]:
    """Return tests of floors, completed sets, and outcomes of the messages."""

    @effort
    @given(
        floor=st.integers(0, 3) | st.integers(0, 2**63),
        seeds=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), max_size=12),
        steps=st.lists(STEPS, max_size=120),
    )
    def offset_ledger(floor: int, seeds: list[tuple[int, int]], steps: list[tuple[str, list[int]]]) -> None:
        tick()
        behaves_like_dicts_and_sets(floor, seeds, steps)

    return [offset_ledger]
