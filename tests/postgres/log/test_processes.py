"""Members of a subscription as processes: one is killed, one is frozen, one is added, all are stopped."""

from __future__ import annotations

import itertools
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


@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_kill_a_freeze_and_a_new_member_lose_nothing_and_keep_the_order(logs: Logs, members: Members) -> None:
    begin(members, logs, "killed")
    begin(members, logs, "frozen")
    values = itertools.count()

    def append(count: int) -> None:
        for value in itertools.islice(values, count):
            logs.commit(str(value), key=f"key {value % 12}")

    def both_own() -> bool:
        # The member that starts first would finish a fixed number of messages before the other one has joined.
        append(12)
        return handled_by(logs, "killed") > 0 and handled_by(logs, "frozen") > 0

    wait_until(both_own, "both members to own something")
    members["killed"].kill()
    append(60)
    members["frozen"].send_signal(signal.SIGSTOP)
    append(60)
    begin(members, logs, "added")
    wait_until(lambda: _finished(logs) == _appended(logs), "the new member to finish what the others had")
    members["frozen"].send_signal(signal.SIGCONT)
    append(60)
    wait_until(lambda: _finished(logs) == _appended(logs), "the rest")
    for name in ("frozen", "added"):
        members[name].terminate()
    for name in ("frozen", "added"):
        assert members[name].wait(60) == 0

    rows = logs.execute("SELECT key, value FROM {}.handled ORDER BY id")
    assert {value for _, value in rows} == set(range(_appended(logs)))
    for key in {key for key, _ in rows}:
        first = list(dict.fromkeys(value for each, value in rows if each == key))
        assert first == sorted(first), f"{key} was handled out of order"


def _appended(logs: Logs) -> int:
    count: int = logs.execute("SELECT count(*) FROM {}.lanes_log_messages")[0][0]
    return count


def _finished(logs: Logs) -> int:
    """Number of messages that the stored positions cover."""
    rows = logs.execute("SELECT floor, completed FROM {}.lanes_states")
    return sum(
        floor + sum(end - start for start, end in zip(completed[::2], completed[1::2], strict=True))
        for floor, completed in rows
    )
