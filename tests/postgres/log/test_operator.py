"""``lanes postgres`` on real logs: a trim keeps what a subscription has not finished, and a drop begins it again."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from lanes import Consumer
from lanes.errors import SourceError
from lanes_postgres import connecting
from lanes_postgres.cli import retention
from tests.postgres.log.logs import Logs
from tests.postgres.log.test_subscriptions import Seen, member, suffix
from tests.postgres.test_commands import Command, lanes

__all__ = ["lanes"]

Operate = Callable[..., tuple[object, str, str]]


@pytest.fixture
def operate(lanes: Command, logs: Logs) -> Operate:
    def run(*arguments: str) -> tuple[object, str, str]:
        return lanes("postgres", *arguments, "--dsn", logs.url, "--schema", logs.schema)

    return run


def listed(operate: Operate) -> list[dict[str, Any]]:
    status, out, err = operate("subscriptions", "list", "--json")
    assert (status, err) == (0, "")
    found: list[dict[str, Any]] = json.loads(out)
    return found


def read(logs: Logs, count: int, subscription: str, **arguments: Any) -> list[str]:
    async def run() -> list[str]:
        return await suffix(logs, count, subscription=subscription, **arguments)

    return anyio.run(run)


def commit_each(logs: Logs, *values: str) -> None:
    for value in values:
        logs.commit(value)


def test_a_list_shows_lag_and_start(operate: Operate, logs: Logs) -> None:
    assert listed(operate) == []
    commit_each(logs, "1", "2", "3")
    assert read(logs, 3, "billing") == ["1", "2", "3"]
    commit_each(logs, "4", "5")
    (one,) = listed(operate)
    assert one == {
        "log": "orders",
        "name": "billing",
        "start": "beginning",
        "partitions": 1,
        "lag": 2,
        "members": one["members"],
    }
    status, out, _ = operate("subscriptions", "list")
    assert status == 0 and "billing" in out and "beginning" in out


def test_a_trim_keeps_what_the_slowest_subscription_has_not_finished(operate: Operate, logs: Logs) -> None:
    commit_each(logs, "1", "2", "3")
    assert read(logs, 3, "slow") == ["1", "2", "3"]
    commit_each(logs, "4", "5")
    assert read(logs, 5, "fast") == ["1", "2", "3", "4", "5"]
    assert operate("trim", "--older-than", "0", "--log", "orders") == (0, "orders: 3 messages deleted\n", "")
    assert operate("trim", "--older-than", "0", "--log", "orders") == (0, "orders: 0 messages deleted\n", "")
    assert read(logs, 2, "slow") == ["4", "5"]
    commit_each(logs, "6")
    assert operate("trim", "--older-than", "0", "--log", "orders") == (0, "orders: 2 messages deleted\n", "")
    assert read(logs, 1, "slow") == ["6"] and read(logs, 1, "fast") == ["6"]
    # A new subscription begins at the first message that is left.
    assert read(logs, 1, "new") == ["6"]


def test_a_trim_keeps_the_last_batch_so_that_positions_continue(operate: Operate, logs: Logs) -> None:
    commit_each(logs, "1", "2")
    assert read(logs, 2, "billing") == ["1", "2"]
    assert operate("trim", "--older-than", "0", "--log", "orders")[1] == "orders: 1 messages deleted\n"
    commit_each(logs, "3")
    assert read(logs, 1, "billing") == ["3"]
    assert logs.execute("SELECT position FROM {}.lanes_log_entries ORDER BY 1") == [(1,), (2,)]


def test_a_trim_of_many_batches_takes_several_transactions(
    operate: Operate, logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BATCHES", 3)
    commit_each(logs, *map(str, range(11)))
    assert len(read(logs, 11, "billing")) == 11
    assert operate("trim", "--older-than", "0", "--log", "orders")[1] == "orders: 10 messages deleted\n"


def test_young_messages_stay(operate: Operate, logs: Logs) -> None:
    commit_each(logs, "1", "2", "3", "4")
    assert len(read(logs, 4, "billing")) == 4
    logs.execute("UPDATE {}.lanes_log_messages SET time = time - interval '2 hours' WHERE value IN ('1', '3')")
    assert operate("trim", "--log", "orders", "--older-than", "1")[1] == "orders: 1 messages deleted\n"
    assert [value for (value,) in logs.execute("SELECT value FROM {}.lanes_log_messages ORDER BY batch")] == [
        b"2",
        b"3",
        b"4",
    ]


def test_a_forced_trim_reaches_the_loser_as_out_of_range(operate: Operate, logs: Logs) -> None:
    commit_each(logs, "1")
    assert read(logs, 1, "billing") == ["1"]
    commit_each(logs, "2", "3", "4")
    assert operate("trim", "--older-than", "0", "--log", "orders")[1] == "orders: 1 messages deleted\n"
    assert operate("trim", "--older-than", "0", "--log", "orders", "--force")[1] == "orders: 2 messages deleted\n"

    async def loses() -> None:
        with anyio.fail_after(20.0):
            await Consumer(member(logs), Seen()).run()

    with pytest.raises(SourceError, match='set out_of_range to "earliest" or "latest"'):
        anyio.run(loses)
    assert read(logs, 1, "billing", out_of_range="earliest") == ["4"]


def test_a_trim_without_a_subscription_keeps_what_the_others_have_not_finished(operate: Operate, logs: Logs) -> None:
    commit_each(logs, "1")
    assert read(logs, 1, "slow") == ["1"]
    commit_each(logs, "2")
    assert read(logs, 2, "mail") == ["1", "2"]
    commit_each(logs, "3", "4")
    assert read(logs, 4, "fast") == ["1", "2", "3", "4"]
    assert operate("trim", "--older-than", "0", "--log", "orders")[1] == "orders: 1 messages deleted\n"
    trim = ("trim", "--older-than", "0", "--log", "orders", "--without", "slow")
    assert operate(*trim) == (0, "orders: 1 messages deleted\n", "")
    assert read(logs, 2, "mail") == ["3", "4"]
    status, _, err = operate(*trim, "--without", "mall")
    assert (
        status == 3
        and "log 'orders' has no subscription 'mall' (did you mean 'mail'?); run" in err
        and "correct --without" in err
    )
    status, _, err = operate(*trim, "--without", "mail", "--without", "fast")
    assert status == 3 and "has no other subscription" in err and "add --force" in err


def test_a_trim_without_an_age_is_refused(operate: Operate, logs: Logs) -> None:
    commit_each(logs, "1")
    status, _, err = operate("trim", "--log", "orders", "--force")
    assert status != 0 and "--older-than" in err


def test_a_log_without_a_subscription_is_not_trimmed(operate: Operate, logs: Logs) -> None:
    commit_each(logs, "1", "2")
    status, _, err = operate("trim", "--older-than", "0", "--log", "orders")
    assert status == 3 and "'orders' has no subscription" in err and "add --force" in err
    status, _, err = operate("trim", "--older-than", "0", "--log", "order")
    assert status == 3 and "has no log 'order' (did you mean 'orders'?); correct --log or --schema" in err
    assert logs.values() == ["1", "2"]


def test_a_dropped_subscription_begins_again(operate: Operate, logs: Logs) -> None:
    commit_each(logs, "1", "2")
    assert read(logs, 2, "billing") == ["1", "2"] and read(logs, 2, "mail") == ["1", "2"]
    status, out, err = operate("subscriptions", "drop", "billing", "--log", "orders", "--force")
    assert (status, out, err) == (0, "billing: dropped from log orders\n", "")
    assert [each["name"] for each in listed(operate)] == ["mail"]
    assert read(logs, 2, "billing") == ["1", "2"]
    status, _, err = operate("subscriptions", "drop", "bill", "--log", "orders")
    assert status == 3 and "log 'orders' has no subscription 'bill'" in err
    said = operate("subscriptions", "drop", "biling", "--log", "orders")[2]
    assert "has no subscription 'biling' in the schema" in said and " (did you mean 'billing'?); run" in said
    assert " (did you mean 'orders'?); run" in operate("subscriptions", "drop", "billing", "--log", "ordrs")[2]


def test_a_subscription_with_running_members_is_not_dropped(operate: Operate, logs: Logs) -> None:
    commit_each(logs, "1")
    assert read(logs, 1, "billing") == ["1"]
    logs.execute(
        "INSERT INTO {0}.lanes_subscription_members (log, subscription, member, owned, waits) "
        "SELECT id, 'billing', 'host-7', 1, false FROM {0}.lanes_logs"
    )
    status, _, err = operate("subscriptions", "drop", "billing", "--log", "orders")
    assert status == 3 and "has running members ('host-7')" in err and "--force" in err
    assert listed(operate)[0]["members"] >= 1


def test_the_doctor_looks_at_a_log_and_its_subscription(lanes: Command, logs: Logs) -> None:
    def looked(*options: str) -> tuple[object, dict[str, dict[str, Any]]]:
        status, out, _ = lanes("doctor", "postgres", "--dsn", logs.url, "--schema", logs.schema, *options, "--json")
        found = json.loads(out)
        assert found["usable"] is (status == 0)
        return status, {check["name"]: check for check in found["checks"]}

    status, checks = looked()
    assert (status, checks["logs"]["ok"], checks["logs"]["detail"]) == (0, True, "orders (1 partitions)")
    assert "--log NAME and --subscription NAME" in checks["logs"]["remedy"]
    status, checks = looked("--log", "orders")
    assert status == 0 and checks["log orders"]["detail"] == "1 partitions"
    assert checks["subscriptions"]["detail"] == "no consumer has read the log yet"
    commit_each(logs, "1")
    assert read(logs, 1, "billing") == ["1"]
    status, checks = looked("--log", "orders")
    assert checks["subscriptions"]["detail"] == "billing"
    assert checks["subscriptions"]["remedy"] == "--subscription NAME checks one of them"
    status, checks = looked("--log", "orders", "--subscription", "billing")
    assert status == 0 and checks["subscription billing"]["ok"] is True
    assert checks["subscription billing"]["detail"] == "began at 'beginning', 0 running members"
    status, checks = looked("--log", "orders", "--subscription", "biling")
    assert status == 0 and checks["subscription biling"]["ok"] is None
    assert checks["subscription biling"]["detail"] == "no consumer has used it yet (did you mean 'billing'?)"
    status, checks = looked("--log", "order", "--subscription", "billing")
    assert status == 3 and checks["log order"]["ok"] is False
    assert checks["log order"]["detail"].endswith("has no such log (did you mean 'orders'?)")
    assert "correct --log" in checks["log order"]["remedy"]


def test_the_doctor_finds_a_disabled_trigger(lanes: Command, logs: Logs) -> None:
    def trigger() -> tuple[object, dict[str, Any]]:
        status, out, _ = lanes("doctor", "postgres", "--dsn", logs.url, "--schema", logs.schema, "--json")
        (found,) = [check for check in json.loads(out)["checks"] if check["name"] == "trigger"]
        return status, found

    status, found = trigger()
    assert status == 0 and found["ok"] is True
    logs.execute("ALTER TABLE {}.lanes_log_messages DISABLE TRIGGER lanes_log_ticket")
    status, found = trigger()
    assert status == 3 and "is disabled on" in found["detail"] and "appended messages are never read" in found["detail"]
    logs.execute(found["remedy"].replace("{", "{{"))
    assert trigger()[0] == 0
    logs.execute("DROP TRIGGER lanes_log_ticket ON {}.lanes_log_messages")
    status, found = trigger()
    assert status == 3 and "is missing" in found["detail"]


def test_a_command_ends_when_the_server_never_answers(lanes: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGCONNECT_TIMEOUT", raising=False)
    monkeypatch.setattr(connecting, "_TIMEOUT", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"postgresql://127.0.0.1:{silent.getsockname()[1]}/none"
        status, out, err = lanes("postgres", "subscriptions", "list", "--dsn", address)
    assert status != 0 and out == ""
    assert "timeout" in err and err.endswith("start the server, or correct the connection string\n")
