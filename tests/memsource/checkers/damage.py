"""Damage to legal histories, and the verdicts that are still allowed."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

from memsource import check, read_bytes
from tests.memsource.checkers.rows import Rows, encoded


def lose_rows(segments: list[Rows], damage: int) -> None:
    """Take rows out of the middle of some segments, or make them unreadable."""
    random = Random(damage)
    for _ in range(random.randint(1, 3)):
        rows = random.choice([rows for rows in segments if len(rows) > 1])
        first = random.randrange(len(rows) - 1)
        last = min(len(rows) - 1, first + random.choice([1, 1, 2, 5, 20]))
        # A segment without its end would look like a crash, which is no gap.
        rows[first:last] = [] if random.random() < 0.7 else [{"no": "row"}] * (last - first)


def assert_the_last_may_crash(segments: list[Rows], data: st.DataObject) -> None:
    """A crash of the process that wrote last: unsettled messages stay at the broker, and other verdicts still hold."""
    segments.sort(key=lambda rows: rows[-1]["mono"])
    alone = [rows for rows in segments if rows[0]["mono"] > segments[-2][-1]["mono"]]
    if not alone:
        return
    last = segments[-1]
    del last[data.draw(st.integers(1, len(last))) :]
    statuses = {verdict.name: verdict.status for verdict in check(read_bytes(encoded(*segments)))}
    assert statuses.pop("AtLeastOnce") in ("passed", "unproven")
    assert set(statuses.values()) == {"passed"}
