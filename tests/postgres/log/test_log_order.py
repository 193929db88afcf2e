"""The positions of a log follow the commits: no reader skips a message, and no dependent pair is inverted."""

from __future__ import annotations

import contextlib
import threading

import psycopg
import pytest

from lanes.core import ring
from lanes_postgres import Record
from tests.components import wait_until
from tests.conftest import PostgresFactory
from tests.postgres.log.logs import Logs


def test_a_late_commit_is_read_after_what_was_read_before_it(logs: Logs) -> None:
    with logs.connect() as late:
        logs.append(late, "late")
        logs.commit("early")
        assert logs.values() == ["early"]
        late.commit()
    assert logs.values() == ["early", "late"]


def test_a_commit_between_ticket_and_visibility_is_not_skipped(logs: Logs) -> None:
    # The trigger of the first transaction takes its ticket now, and its COMMIT comes after the second one was read.
    with logs.connect() as slow:
        logs.append(slow, "slow")
        slow.execute("SET CONSTRAINTS ALL IMMEDIATE")
        logs.commit("fast")
        assert logs.values() == ["fast"]
        assert logs.execute("SELECT holes FROM {}.lanes_log_sequencings ORDER BY id DESC LIMIT 1") == [([1],)]
        logs.commit("later")
        assert logs.values() == ["fast", "later"]
        slow.commit()
    assert logs.values() == ["fast", "later", "slow"]


def test_a_ticket_of_a_rolled_back_transaction_is_forgotten(logs: Logs) -> None:
    with logs.connect() as slow:
        logs.append(slow, "never")
        slow.execute("SET CONSTRAINTS ALL IMMEDIATE")
        logs.commit("fast")
        assert logs.values() == ["fast"]
        slow.rollback()
    logs.commit("next")
    assert logs.values() == ["fast", "next"]
    assert logs.sequence() == 0
    assert logs.execute("SELECT holes FROM {}.lanes_log_sequencings ORDER BY id DESC LIMIT 1") == [([],)]


def test_a_pair_ordered_by_a_row_lock_keeps_its_order(logs: Logs) -> None:
    logs.execute("CREATE TABLE {}.accounts (id integer PRIMARY KEY, balance integer)")
    logs.execute("INSERT INTO {}.accounts VALUES (1, 0)")
    update = logs.query("UPDATE {}.accounts SET balance = balance + 1 WHERE id = 1")
    with logs.connect() as second, logs.connect() as first:
        # The second transaction has the lower transaction id and the lower batch, and waits for the first one.
        second.execute("SELECT pg_current_xact_id()")
        logs.append(second, "second")
        first.execute(update)
        waiting = threading.Thread(target=second.execute, args=(update,))
        waiting.start()
        wait_until(lambda: _waits_for_a_lock(logs, second.info.backend_pid), "the second transaction to wait")
        logs.append(first, "first")
        first.commit()
        waiting.join()
        second.commit()
    assert logs.values() == ["first", "second"]


def test_crossing_appends_over_partitions_do_not_deadlock(four: Logs) -> None:
    one, other = _keys_of_two_partitions()
    with four.connect() as forwards, four.connect() as backwards:
        four.append(forwards, "a1", key=one)
        four.append(backwards, "b1", key=other)
        four.append(forwards, "a2", key=other)
        four.append(backwards, "b2", key=one)
        # Each COMMIT ends although the other transaction is open.
        forwards.commit()
        backwards.commit()
    assert sorted(four.read().values()) == [["a1", "b2"], ["a2", "b1"]]


def test_a_rollback_to_a_savepoint_takes_its_messages_back(logs: Logs) -> None:
    with logs.connect() as connection:
        logs.append(connection, "1")
        with contextlib.suppress(ZeroDivisionError), connection.transaction():
            logs.append(connection, "rolled back")
            raise ZeroDivisionError
        with connection.transaction():
            logs.append(connection, "2")
        logs.append(connection, "3")
    assert logs.values() == ["1", "2", "3"]


def test_a_rolled_back_transaction_leaves_no_message_and_no_gap(logs: Logs) -> None:
    logs.commit("1")
    with logs.connect() as connection:
        logs.append(connection, "rolled back")
        connection.rollback()
    logs.commit("2")
    assert logs.values() == ["1", "2"]


def test_a_long_unrelated_transaction_delays_nothing(logs: Logs) -> None:
    logs.execute("CREATE TABLE {}.other (id integer)")
    with logs.connect() as long:
        long.execute(logs.query("INSERT INTO {}.other VALUES (1)"))
        for number in range(20):
            logs.commit(str(number))
            assert logs.values()[-1] == str(number)
        long.commit()
    assert logs.values() == [str(number) for number in range(20)]


def test_a_long_transaction_that_appends_delays_nothing(logs: Logs) -> None:
    with logs.connect() as long:
        logs.append(long, "long")
        for number in range(20):
            logs.commit(str(number))
            assert logs.values()[-1] == str(number)
        long.commit()
    assert logs.values() == [*(str(number) for number in range(20)), "long"]


def test_a_prepared_transaction_is_read_once_it_commits(fresh_postgres: PostgresFactory) -> None:
    preparing = Logs.make(fresh_postgres(settings=("max_prepared_transactions=5",)), "lanes")
    with preparing.connect() as first:
        transaction = first.xid(1, "gtrid", "bqual")
        first.tpc_begin(transaction)
        preparing.append(first, "prepared")
        first.tpc_prepare()
        preparing.commit("other")
        assert preparing.values() == ["other"]
        first.tpc_commit()
    preparing.commit("next")
    assert preparing.values() == ["other", "prepared", "next"]


@pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
def test_an_append_in_a_stricter_isolation_never_conflicts_with_another(
    logs: Logs, level: psycopg.IsolationLevel
) -> None:
    with logs.connect() as strict:
        strict.isolation_level = level
        strict.execute("SELECT 1")
        logs.commit("other")
        logs.append(strict, "strict")
    assert logs.values() == ["other", "strict"]


def test_two_sequencers_give_each_message_one_position(four: Logs) -> None:
    done = threading.Event()
    failures: list[BaseException] = []

    def give() -> None:
        try:
            while not done.is_set():
                four.sequence()
        except BaseException as error:
            failures.append(error)

    def append(writer: int) -> None:
        try:
            with four.connect() as connection:
                for number in range(60):
                    four.log.append(connection, [Record(f"{writer}-{number}", str(writer)), Record("x", str(number))])
                    if number % 7 == 3:
                        connection.rollback()
                    else:
                        connection.commit()
        except BaseException as error:
            failures.append(error)

    givers = [threading.Thread(target=give) for _ in range(2)]
    writers = [threading.Thread(target=append, args=(writer,)) for writer in range(4)]
    for thread in (*givers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in givers:
        thread.join()
    assert not failures
    while four.sequence():
        pass
    found = four.read()
    for writer in range(4):
        expected = [f"{writer}-{number}" for number in range(60) if number % 7 != 3]
        (at,) = [values for values in found.values() if f"{writer}-0" in values]
        assert [value for value in at if value.startswith(f"{writer}-")] == expected


def _waits_for_a_lock(logs: Logs, pid: int) -> bool:
    found = logs.execute(f"SELECT wait_event_type FROM pg_stat_activity WHERE pid = {pid}")
    return found == [("Lock",)]


def _keys_of_two_partitions() -> tuple[str, str]:
    places = {key: ring.partition(key, 4) for key in map(str, range(20))}
    return "0", next(key for key, place in places.items() if place != places["0"])


def test_a_look_waits_for_the_disk_only_with_a_hole(logs: Logs) -> None:
    """Without a hole, a crash that undoes the look changes no position."""

    def waits() -> bool:
        with logs.connect() as connection:
            connection.execute(logs.query("SELECT {}.lanes_log_look(1000, 1, 1)"))
            ((setting,),) = connection.execute("SHOW synchronous_commit").fetchall()
        return str(setting) == "on"

    logs.commit("1")
    assert not waits()
    with logs.connect() as late:
        logs.append(late, "2")
        late.execute("SET CONSTRAINTS ALL IMMEDIATE")
        logs.commit("3")
        assert waits()
    assert waits()
    logs.commit("4")
    assert not waits()
    assert logs.values() == ["1", "3", "2", "4"]
