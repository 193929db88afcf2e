"""Members of a subscription as processes: one is killed, one is frozen, one is added, all are stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.components import PostgresServer, wait_until
from tests.postgres.log.logs import Logs

LEASE = 2.0

Members = dict[str, "subprocess.Popen[bytes]"]


@pytest.fixture
def logs(postgres: PostgresServer, schema: str) -> Logs:
    logs = Logs.make(postgres, schema, partitions=6)
    logs.execute("CREATE TABLE {}.handled (id serial PRIMARY KEY, member text, key text, value integer, epoch bigint)")
    return logs


@pytest.fixture
def members() -> Iterator[Members]:
    running: Members = {}
    yield running
    for each in running.values():
        each.kill()
        each.wait()


def begin(members: Members, logs: Logs, name: str) -> None:
    arguments = [logs.url, logs.schema, name, str(LEASE)]
    members[name] = subprocess.Popen([sys.executable, "-m", "tests.postgres.log.member", *arguments])


def handled_by(logs: Logs, name: str) -> int:
    count: int = logs.execute(f"SELECT count(*) FROM {{}}.handled WHERE member = '{name}'")[0][0]
    return count


def append(logs: Logs, values: range) -> None:
    for value in values:
        logs.commit(str(value), key=f"key {value % 12}")


@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_kill_a_freeze_and_a_new_member_lose_nothing_and_keep_the_order(logs: Logs, members: Members) -> None:
    begin(members, logs, "killed")
    begin(members, logs, "frozen")
    append(logs, range(60))
    wait_until(
        lambda: handled_by(logs, "killed") > 0 and handled_by(logs, "frozen") > 0, "both members to own something"
    )
    members["killed"].kill()
    append(logs, range(60, 120))
    members["frozen"].send_signal(signal.SIGSTOP)
    append(logs, range(120, 180))
    begin(members, logs, "added")
    wait_until(lambda: _finished(logs) == 180, "the new member to finish what the others had")
    members["frozen"].send_signal(signal.SIGCONT)
    append(logs, range(180, 240))
    wait_until(lambda: _finished(logs) == 240, "the rest")
    for name in ("frozen", "added"):
        members[name].terminate()
    for name in ("frozen", "added"):
        assert members[name].wait(60) == 0

    rows = logs.execute("SELECT key, value FROM {}.handled ORDER BY id")
    assert {value for _, value in rows} == set(range(240))
    for key in {key for key, _ in rows}:
        first = list(dict.fromkeys(value for each, value in rows if each == key))
        assert first == sorted(first), f"{key} was handled out of order"


def _finished(logs: Logs) -> int:
    """Number of messages that the stored positions cover."""
    rows = logs.execute("SELECT floor, completed FROM {}.lanes_states")
    return sum(
        floor + sum(end - start for start, end in zip(completed[::2], completed[1::2], strict=True))
        for floor, completed in rows
    )
