"""Makes dead letters for tests."""

from __future__ import annotations

import itertools
from typing import Any

import lanes
from memsource.contract.dead_letter_harness import Origin, dead_letter_from

_positions = itertools.count(1)


class _Orders:
    origin = Origin("orders", 3, "orders")


def dead_letter(**changes: Any) -> lanes.DeadLetter:
    """A dead letter with a new position."""
    ours: dict[str, Any] = {
        "key": b"customer-42",
        "value": b"payload",
        "headers": (("color", b"red"), ("color", b"blue"), ("Lanes-Error", b"spoofed")),
        "attempts": 5,
    }
    return dead_letter_from(_Orders(), next(_positions), **(ours | changes))
