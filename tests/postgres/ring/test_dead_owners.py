"""A killed or frozen owner never wedges a range: the next owner begins when its lease has ended, and not before."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lanes.ring import Range
from lanes_postgres import Record
from tests.components import PostgresServer, wait_until
from tests.postgres.log.logs import Logs
from tests.postgres.ring.ranged import HALF, LOW, Ring, some

LEASE = 3.0
UPPER = Range(HALF // 2, HALF - 1)


@pytest.fixture
def ring(postgres: PostgresServer, schema: str) -> Ring:
    logs = Logs.make(postgres, schema)
    logs.execute("CREATE TABLE {}.handled (id serial PRIMARY KEY, member text, value text, what text)")
    return Ring(logs)


@pytest.fixture
def members(ring: Ring) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    running: dict[str, subprocess.Popen[bytes]] = {}
    for name in "ab":
        arguments = [ring.logs.url, ring.logs.schema, name, str(LEASE)]
        running[name] = subprocess.Popen([sys.executable, "-m", "tests.postgres.ring.ranged_member", *arguments])
    yield running
    for each in running.values():
        each.kill()
        each.wait()


def begun(ring: Ring, member: str) -> list[str]:
    rows = ring.logs.execute(f"SELECT value FROM {{}}.handled WHERE member = '{member}' AND what = 'begin' ORDER BY id")
    return [value for (value,) in rows]


@pytest.mark.process
@pytest.mark.timeout(180)
@pytest.mark.parametrize("moved", [LOW, UPPER], ids=["the whole range", "a part"])
def test_dead_prior_owner_does_not_wedge_range(
    ring: Ring, members: dict[str, subprocess.Popen[bytes]], moved: Range
) -> None:
    fail(ring, members, moved, signal.SIGKILL)


@pytest.mark.process
@pytest.mark.timeout(180)
@pytest.mark.parametrize("moved", [LOW, UPPER], ids=["the whole range", "a part"])
def test_sticky_range_reassign_drains_by_expiry(
    ring: Ring, members: dict[str, subprocess.Popen[bytes]], moved: Range
) -> None:
    """The former owner is frozen, and its lease expires while a handler of the range has not ended."""
    fail(ring, members, moved, signal.SIGSTOP)


def fail(ring: Ring, members: dict[str, subprocess.Popen[bytes]], moved: Range, fault: signal.Signals) -> None:
    ring.assign(LOW, "a")
    first, key = some(Range(0, UPPER.lo - 1), 1)[0], some(UPPER, 1)[0]
    with ring.logs.connect() as connection:
        ring.logs.log.append(connection, [Record("first", first), Record("stuck", key), Record("later", key)])
    wait_until(lambda: set(begun(ring, "a")) == {"first", "stuck"}, "the first owner to begin")
    members["a"].send_signal(fault)
    ring.assign(moved, "b")
    with ring.logs.connect() as connection:
        ring.logs.log.append(connection, [Record("end", some(UPPER, 2)[1])])
    # The message without a result runs again, and delays its key alone.
    wait_until(lambda: {"stuck", "end"} <= set(begun(ring, "b")), "the next owner to begin", seconds=LEASE + 40)
    assert "later" not in begun(ring, "b")
    if moved == UPPER:
        assert "first" not in begun(ring, "b")
    if fault == signal.SIGSTOP:
        members["a"].send_signal(signal.SIGCONT)
    with ring.logs.connect() as connection:
        ring.logs.log.append(connection, [Record("more", some(UPPER, 3)[2])])
    wait_until(lambda: "more" in begun(ring, "b"), "the next owner to go on")
    assert begun(ring, "a").count("stuck") == 1
