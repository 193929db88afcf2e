"""The first failure and the first message given up are log lines. For 10 s, further failures of a type are counted."""

from __future__ import annotations

import logging

import pytest

from lanes import MessageError, Nak, Term
from lanes.core import effects as fx
from lanes.core.types import Failure, Message
from lanes.handlers import fill_data
from lanes.observe.failures import FailedAttempts
from tests.core.builders import assigned, deliver, new_engine

INFINITY = float("inf")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "lanes")
    return caplog


def messages(*positions: int) -> list[Message]:
    engine = new_engine()
    return deliver(engine, assigned(engine), *positions, key=None)


def held(message: Message, error: Exception, delay: float = 0.5) -> fx.Held:
    return fx.Held(message, Failure(error), "hold", delay)


def lines(log: pytest.LogCaptureFixture) -> list[str]:
    """Return the log lines so far, and clear the log."""
    found = log.messages.copy()
    log.clear()
    return found


def test_the_first_failure_names_handler_place_type_attempt_and_the_next_attempt(
    log: pytest.LogCaptureFixture,
) -> None:
    failures = FailedAttempts("orders", "charge")
    (message,) = messages(17)
    failures.failed(held(message, ValueError("card 4711")), 5.0)
    (record,) = log.records
    assert record.levelno == logging.WARNING
    place = f"{message.partition.id} position 17"
    assert lines(log) == [f"orders: charge failed at {place} with ValueError, attempt 1; next attempt in 0.50 s"]
    assert record.exc_info is None
    assert failures.next_at() == INFINITY
    message.attempt = 2
    failures.failed(held(message, ValueError()), 5.5)
    failures.due(99.0)
    failures.end(99.0)
    assert lines(log) == []


def test_a_reason_that_the_handler_chose_is_in_the_line(log: pytest.LogCaptureFixture) -> None:
    failures = FailedAttempts("orders", "charge")
    (message,) = messages(17)
    failures.failed(held(message, Nak("busy\x1b", delay=3)), 5.0)
    failures.failed(held(message, Nak()), 25.0)
    assert [line.split(" with ")[1].split(",")[0] for line in lines(log)] == [r"Nak (busy\x1b)", "Nak"]


def test_the_members_of_a_group_are_in_the_line(log: pytest.LogCaptureFixture) -> None:
    failures = FailedAttempts("orders", "charge")
    (message,) = messages(17)
    failures.failed(held(message, ExceptionGroup("of tasks", [Nak("busy"), ValueError("secret")])), 5.0)
    many = [ValueError(), ExceptionGroup("inner", [KeyError(), OSError(), EOFError()]), KeyError()]
    failures.failed(held(message, ExceptionGroup("of tasks", many)), 25.0)
    assert [line.split(" with ")[1].split(", attempt")[0] for line in lines(log)] == [
        "ExceptionGroup of Nak (busy), ValueError",
        "ExceptionGroup of ValueError, KeyError, OSError and 2 more",
    ]


def test_further_failures_of_a_type_are_counted(log: pytest.LogCaptureFixture) -> None:
    failures = FailedAttempts("orders", "charge")
    run = messages(*range(242))
    failures.failed(held(run[0], ValueError()), 5.0)
    failures.failed(held(run[1], OSError()), 6.0)
    assert [line.split(" with ")[1].split(",")[0] for line in lines(log)] == ["ValueError", "OSError"]
    for message in run[2:]:
        failures.failed(held(message, ValueError()), 7.0)
    assert failures.next_at() == 15.0
    failures.due(14.9)
    assert lines(log) == []
    failures.due(15.0)
    place = f"{run[0].partition.id} position 241"
    assert lines(log) == [
        f"orders: charge failed with ValueError at 240 more message(s) in 10.0 s, the last at {place}"
    ]
    # The summary line starts the next period of 10 s.
    failures.failed(held(run[3], ValueError()), 16.0)
    assert (lines(log), failures.next_at()) == ([], 25.0)
    failures.end(18.0)
    assert [line.split(" the last")[0] for line in lines(log)] == [
        "orders: charge failed with ValueError at 1 more message(s) in 3.0 s,"
    ]
    # A period without failures ends the counting.
    failures.failed(held(run[4], ValueError()), 30.0)
    assert len(lines(log)) == 1
    assert repr(failures) == "<FailedAttempts 2 types>"


def test_a_stored_attempt_is_the_first_failure_of_its_assignment(log: pytest.LogCaptureFixture) -> None:
    failures = FailedAttempts("orders", "charge")
    (message,) = messages(17)
    message.partition.recalled = {17: 4}
    message.attempt = 4
    failures.failed(held(message, ValueError()), 5.0)
    assert "attempt 4" in lines(log)[0]


def test_a_failure_during_a_drain_names_the_next_owner(log: pytest.LogCaptureFixture) -> None:
    failures = FailedAttempts("orders", "charge")
    (message,) = messages(17)
    failures.failed(fx.Interrupted(message, Failure(ValueError()), "hold"), 5.0)
    (line,) = lines(log)
    assert line.endswith("attempt 1; its partition is handed over, so the next owner runs the message again")


def test_every_failure_is_a_debug_line_with_its_traceback(log: pytest.LogCaptureFixture) -> None:
    log.set_level(logging.DEBUG, "lanes")
    failures = FailedAttempts("orders", "charge")
    first, second = messages(1, 2)
    error = ValueError("no")
    for message, attempt in ((first, 1), (first, 2), (second, 1)):
        message.attempt = attempt
        failures.failed(held(message, error), 5.0)
    debug = [record for record in log.records if record.levelno == logging.DEBUG]
    assert [record.exc_info is not None and record.exc_info[1] is error for record in debug] == [True] * 3
    assert len(log.records) == 4


def test_many_types_are_counted_together(log: pytest.LogCaptureFixture) -> None:
    failures = FailedAttempts("orders", "charge")
    kinds = [type(f"Odd{number}", (Exception,), {}) for number in range(60)]
    for message, kind in zip(messages(*range(60)), kinds, strict=True):
        failures.failed(held(message, kind()), 5.0)
    assert len(lines(log)) == 50
    failures.due(15.0)
    (line,) = lines(log)
    assert "failed with other exceptions at 10 more message(s)" in line
    (message,) = messages(61)
    failures.failed(held(message, kinds[55]()), 30.0)
    assert len(lines(log)) == 1


def test_a_silenced_log_costs_no_line_and_no_timer(log: pytest.LogCaptureFixture) -> None:
    log.set_level(logging.ERROR, "lanes")
    failures = FailedAttempts("orders", "charge")
    for message in messages(1, 2):
        failures.failed(held(message, ValueError()), 5.0)
    assert (lines(log), failures.next_at(), repr(failures)) == ([], INFINITY, "<FailedAttempts 0 types>")


def unread(message: Message, error: Exception) -> MessageError:
    """Return the outcome of a message whose decoder raises an exception."""

    def decode(_: Message) -> object:
        raise error

    with pytest.raises(MessageError) as raised:
        fill_data(message, decode)
    # pytest adds the frames of this file, and the workers of lanes are the callers otherwise.
    assert raised.value.__traceback__ is not None
    return raised.value.with_traceback(raised.value.__traceback__.tb_next)


def test_further_messages_given_up_with_a_type_are_counted(log: pytest.LogCaptureFixture) -> None:
    failures = FailedAttempts("orders", "charge")
    run = messages(*range(42))
    place = run[0].partition.id
    failures.given_up(run[0], ValueError("card 4711"), 5.0)
    failures.given_up(run[1], Term("no such card"), 5.0)
    assert {record.levelno for record in log.records} == {logging.ERROR}
    ends = "; the message goes to the dead letters"
    assert lines(log) == [
        f"orders: giving up {place} position 0 after 1 attempt(s) with ValueError{ends}",
        f"orders: giving up {place} position 1 after 1 attempt(s) with Term (no such card){ends}",
    ]
    for message in run[2:]:
        failures.given_up(message, ValueError("card 4711"), 7.0)
    assert (lines(log), failures.next_at()) == ([], 15.0)
    failures.due(14.9)
    assert lines(log) == []
    failures.due(15.0)
    assert {record.levelno for record in log.records} == {logging.ERROR}
    (more,) = lines(log)
    assert more == (
        f"orders: gave up 40 more message(s) in 10.0 s with ValueError, the last at {place} position 41; these "
        "messages go to the dead letters"
    )
    failures.given_up(run[2], Term("no such bank"), 16.0)
    failures.given_up(run[3], Term("no such bank"), 17.0)
    failures.end(18.0)
    assert [line.split(", the last")[0].split(" after")[0] for line in lines(log)] == [
        f"orders: giving up {place} position 2",
        "orders: gave up 1 more message(s) in 2.0 s with Term",
    ]


def test_failed_and_given_up_messages_of_a_type_are_counted_apart(log: pytest.LogCaptureFixture) -> None:
    failures = FailedAttempts("orders", "charge")
    first, second = messages(1, 2)
    failures.failed(held(first, ValueError()), 5.0)
    failures.given_up(second, ValueError(), 6.0)
    assert [record.levelno for record in log.records] == [logging.WARNING, logging.ERROR]


def test_every_message_given_up_is_a_line_at_debug(log: pytest.LogCaptureFixture) -> None:
    log.set_level(logging.DEBUG, "lanes")
    failures = FailedAttempts("orders", "charge")
    for message in messages(1, 2, 3):
        failures.given_up(message, ValueError(), 5.0)
    assert [record.levelno for record in log.records] == [logging.ERROR, logging.DEBUG, logging.DEBUG]
    assert [f"position {number} after" in line for number, line in enumerate(lines(log), 1)] == [True] * 3


def test_unreadable_messages_are_counted_by_the_error_of_the_decoder(log: pytest.LogCaptureFixture) -> None:
    failures = FailedAttempts("orders", "charge")
    run = messages(*range(4))
    for message, error in zip(
        run, [KeyError("card"), ValueError("4711"), KeyError("card"), KeyError("x")], strict=True
    ):
        failures.given_up(message, unread(message, error), 5.0)
    first, second = lines(log)
    said = "MessageError (decode failed with {}: correct decode=…, or the producer of such messages)"
    assert said.format("KeyError") in first
    assert said.format("ValueError") in second
    failures.end(6.0)
    (more,) = lines(log)
    assert f"gave up 2 more message(s) in 1.0 s with {said.format('KeyError')}, the last at" in more


def test_the_traceback_of_an_unreadable_message_has_only_frames_of_the_decoder(log: pytest.LogCaptureFixture) -> None:
    failures = FailedAttempts("orders", "charge")
    (message,) = messages(17)
    failures.given_up(message, unread(message, KeyError("card")), 5.0)
    (record,) = log.records
    shown = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
    assert shown.count("Traceback") == 1
    assert [line.split(", in ")[1] for line in shown.splitlines() if line.startswith("  File ")] == ["decode"]
    assert shown.endswith("KeyError: 'card'")


def test_a_decoders_own_message_error_keeps_its_text_in_the_traceback(log: pytest.LogCaptureFixture) -> None:
    failures = FailedAttempts("orders", "charge")
    (message,) = messages(17)
    failures.given_up(message, unread(message, MessageError("no field card")), 5.0)
    (record,) = log.records
    assert "with MessageError; the message" in record.getMessage()
    shown = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
    assert [line.split(", in ")[1] for line in shown.splitlines() if line.startswith("  File ")] == ["decode"]
    assert shown.endswith("MessageError: no field card")


def test_a_silenced_log_counts_no_message_given_up(log: pytest.LogCaptureFixture) -> None:
    log.set_level(logging.CRITICAL, "lanes")
    failures = FailedAttempts("orders", "charge")
    for message in messages(1, 2):
        failures.given_up(message, ValueError(), 5.0)
    assert (lines(log), failures.next_at()) == ([], INFINITY)
