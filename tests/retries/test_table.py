"""The table of retry loops has every loop of the code, and no loop that was removed."""

from __future__ import annotations

from pathlib import Path

import pytest

import lanes
from tests.retries.loops import ROOTS, found
from tests.retries.table import OTHERS, PLAYED

TOP = Path(lanes.__file__).parent.parent

LOOP = """
import time
RETRY_DELAY = 1.0
class Writer:
    def write(self):
        def inner():
            time.sleep(1)
        {body}
"""


def test_every_loop_with_a_pause_is_in_the_table() -> None:
    """A new loop gets a scene in ``harness`` or ``stubs``, or a reason in ``OTHERS``."""
    assert found(TOP) == sorted(PLAYED | OTHERS.keys())
    assert not PLAYED & OTHERS.keys()


@pytest.mark.parametrize(
    ("body", "is_found"),
    [
        ("while self.send():\n            time.sleep(1)", True),
        ("for _ in range(3):\n            self.event.wait(0.1)", True),
        ("self.later(RETRY_DELAY)", True),
        ("while self.send():\n            self.event.wait()", False),
        ("time.sleep(1)", False),
        ("while self.send():\n            pass", False),
    ],
)
def test_a_loop_is_found_by_its_pause(tmp_path: Path, body: str, *, is_found: bool) -> None:
    folder = tmp_path / ROOTS[0]
    folder.mkdir()
    (folder / "made.py").write_text(LOOP.format(body=body))
    assert found(tmp_path) == (["lanes.made:Writer.write"] if is_found else [])
