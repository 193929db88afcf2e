"""A kill at any statement of an append, a claim, a store or a release loses, doubles and inverts nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import Spawn
from tests.postgres.log.killed import MESSAGES
from tests.postgres.log.logs import Logs

SOME = 7
"""One point of so many in a quick test."""


def killed(logs: Logs, spawn: Spawn, kind: str, every: int) -> dict[str, Any]:
    process = spawn("-m", "tests.postgres.log.killed", logs.url, logs.schema, kind, str(every))
    out, err = process.communicate()
    assert process.returncode == 0, err
    said: dict[str, Any] = json.loads(out.splitlines()[-1])
    return said


@pytest.mark.process
def test_a_kill_in_an_append_keeps_change_and_message_together(logs: Logs, spawn: Spawn) -> None:
    logs.execute("CREATE TABLE {}.made (name text, number integer, PRIMARY KEY (name, number))")
    said = killed(logs, spawn, "append", 1)
    # A transaction has a BEGIN, a change, an append and a COMMIT. A notification follows.
    assert said["points"] >= 5 * MESSAGES and said["killed"] == len(said["names"]) == 2 * said["points"]
    while logs.sequence():
        pass
    rows = logs.execute(
        "SELECT log.name, array_agg(convert_from(value, 'UTF8') ORDER BY position + index) FROM {0}.lanes_logs AS log "
        "JOIN {0}.lanes_log_entries AS entry ON entry.log = log.id JOIN {0}.lanes_log_messages USING (batch) GROUP BY 1"
    )
    found = dict(rows)
    expected = [text for number in range(MESSAGES) for text in (str(number), f"{number} again")]
    assert {name: found.get(name) for name in said["names"] if found.get(name) != expected} == {}


@pytest.mark.process
@pytest.mark.parametrize("kind", ["shared", "apart"])
@pytest.mark.parametrize(
    "every",
    [pytest.param(SOME, id="some"), pytest.param(1, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_a_kill_of_a_member_at_any_statement_loses_and_inverts_nothing(
    logs: Logs, spawn: Spawn, kind: str, every: int
) -> None:
    logs.execute("CREATE TABLE {}.effects (id serial, name text, position bigint, epoch bigint)")
    logs.commit(*(str(number) for number in range(MESSAGES)))
    said = killed(logs, spawn, kind, every)
    assert said["points"] >= 20 and said["killed"] >= 0.8 * len(said["names"])
    wrong = {}
    for name in said["names"]:
        rows = logs.execute(f"SELECT position, epoch FROM {{}}.effects WHERE name = '{name}' ORDER BY id")
        positions, epochs = [position for position, _ in rows], [epoch for _, epoch in rows]
        # A repeated message follows its first effect. No effect of a former owner follows one of the next owner.
        if kind == "apart":
            positions = list(dict.fromkeys(positions))
        if positions != list(range(MESSAGES)) or epochs != sorted(epochs):
            wrong[name] = rows
    assert wrong == {}
    floors = dict(logs.execute("SELECT subscription, floor FROM {}.lanes_states"))
    assert {floors[name] for name in said["names"]} == {MESSAGES}
