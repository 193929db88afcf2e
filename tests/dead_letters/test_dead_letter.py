"""Dead letters have stable ids, bounded error texts, and no user data in their repr."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes import DeadLetter, MessageError
from lanes.core.types import Failure, Message, Partition, PartitionId
from lanes.dead_letter import ERROR_TEXT_LIMIT, REASON_LIMIT, dead_letter, dead_letter_id, error_text, reason_line
from lanes.dead_letters.box import message_of
from lanes.handlers import fill_data
from lanes.queues.registered import QueuePartition

SECRET = "customer-42"
# The separator of the parts of an id, and digits that could look like a length or a number.
NAMES = st.text(st.sampled_from("a:0123456789/ é"), max_size=6)
PLACES = st.tuples(NAMES, NAMES, st.integers(0, 99), st.integers(0, 99))


class Reader:
    def value(self, raw: object) -> bytes:
        return f"{raw} pays".encode()

    def headers(self, raw: object) -> Sequence[tuple[str, bytes]]:
        return [("who", str(raw).encode())]

    def subject(self, raw: object) -> str:
        return f"payments.{raw}"


class Hostile(Exception):
    """An error whose text cannot be rendered."""

    def __str__(self) -> str:
        raise RuntimeError(SECRET)


def letter(error: BaseException, place: QueuePartition | None = None) -> DeadLetter:
    partition = Partition(PartitionId("PAYMENTS", 3), Reader(), "2026-01-01T00:00:00Z")
    partition.assignment = 4
    message = Message(partition, 77, SECRET.encode(), 10, SECRET, "token")
    message.attempt = 5
    return dead_letter(message, Failure(error), 1_700_000_000.5, place)


def test_a_dead_letter_has_the_queue_that_was_registered() -> None:
    found = letter(ValueError(), QueuePartition("payments", 2))
    assert (found.source, found.queue, found.queue_partition) == ("PAYMENTS", "payments", 2)
    plain = letter(ValueError())
    assert (plain.queue, plain.queue_partition) == (None, None)
    assert plain.id == found.id


def test_a_dead_letter_has_the_broker_and_the_incarnation_of_its_origin() -> None:
    partition = Partition(PartitionId("PAYMENTS", 3), Reader(), "2026-01-01T00:00:00Z")
    message = Message(partition, 77, None, 10, SECRET, "token")
    found = dead_letter(message, Failure(ValueError()), 1.0, None, "nats")
    assert (found.system, found.incarnation) == ("nats", "2026-01-01T00:00:00Z")


# --- ids


def test_the_dead_letter_id_of_a_known_message_never_changes() -> None:
    # A literal, because other releases must recognise the dead letters of this release.
    assert dead_letter_id("ORDERS", "", 0, 1) == "b4d39d6f3843cb1024b1cc025403a643"
    assert dead_letter_id("ORDERS", "2026-01-01T00:00:00Z", 3, 2**63) == "9d434b3e3e56a0a59581b5c7354b0b3c"


def test_a_dead_letter_id_depends_on_neither_the_error_nor_the_time() -> None:
    one, other = letter(ValueError("one")), letter(KeyError("other"))
    assert one.id == other.id == dead_letter_id("PAYMENTS", "2026-01-01T00:00:00Z", 3, 77)


@given(one=PLACES, other=PLACES)
def test_messages_of_different_positions_have_different_dead_letter_ids(
    one: tuple[str, str, int, int], other: tuple[str, str, int, int]
) -> None:
    assert (dead_letter_id(*one) == dead_letter_id(*other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "b", 1, 2), ("ab", "", 1, 2)),
        (("a", "1:b", 1, 2), ("a1", "b", 1, 2)),
        (("a", "", 11, 1), ("a", "", 1, 11)),
        (("a", "1", 1, 1), ("a", "", 11, 1)),
        (("a", "b:1", 2, 3), ("a", "b", 12, 3)),
        (("a1:b", "", 1, 2), ("a", "b", 1, 2)),
        (("", "1:a", 1, 2), ("1:a", "", 1, 2)),
    ],
)
def test_crafted_names_of_topics_do_not_give_equal_dead_letter_ids(
    one: tuple[str, str, int, int], other: tuple[str, str, int, int]
) -> None:
    assert dead_letter_id(*one) != dead_letter_id(*other)


# --- the text of an error


def test_a_short_error_text_is_kept_whole() -> None:
    assert error_text(ValueError("no such account")) == "no such account"
    assert error_text(ValueError()) == ""


@pytest.mark.parametrize(
    ("length", "kept"),
    [(ERROR_TEXT_LIMIT, ERROR_TEXT_LIMIT), (ERROR_TEXT_LIMIT + 1, ERROR_TEXT_LIMIT - 1), (10**6, 499)],
)
def test_a_long_error_text_is_cut_and_marked(length: int, kept: int) -> None:
    text = error_text(ValueError("x" * length))
    assert len(text) <= ERROR_TEXT_LIMIT
    assert text.startswith("x" * kept)
    assert text.endswith("…") == (kept < length)


def test_an_exception_that_cannot_be_rendered_is_described_by_its_type() -> None:
    assert error_text(Hostile()) == "<Hostile.__str__ raised RuntimeError>"


def test_the_text_of_a_group_begins_with_its_members() -> None:
    group = ExceptionGroup(
        "unhandled errors in a TaskGroup", [ValueError("no stock"), ExceptionGroup("inner", [KeyError(), Hostile()])]
    )
    assert error_text(group) == (
        "ValueError: no stock; KeyError; Hostile: <Hostile.__str__ raised RuntimeError> (unhandled errors in a "
        "TaskGroup (2 sub-exceptions))"
    )


def test_an_exception_whose_str_returns_none_is_described_by_its_type() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            return None  # type: ignore[return-value]

    assert "Silent.__str__ raised TypeError" in error_text(Silent())


@given(text=st.text(max_size=600))
def test_an_error_text_can_be_encoded_and_is_bounded(text: str) -> None:
    written = error_text(ValueError(text))
    assert len(written) <= ERROR_TEXT_LIMIT
    written.encode()


@pytest.mark.parametrize("text", ["cannot read report-\udcff.csv", "\ud800" * 600], ids=["file name", "nothing else"])
def test_a_text_with_lone_surrogates_can_be_written(text: str) -> None:
    # A file name that is not UTF-8 reaches error messages as lone surrogates, which no dead letter can encode.
    written = error_text(ValueError(text))
    assert len(written) <= ERROR_TEXT_LIMIT
    written.encode()


# --- the dead letter


def test_a_dead_letter_has_the_message_and_the_error() -> None:
    made = letter(ValueError("no such account"))
    assert (made.source, made.partition, made.position, made.epoch) == ("PAYMENTS", 3, 77, 4)
    assert (made.subject, made.key, made.value) == ("payments.customer-42", b"customer-42", b"customer-42 pays")
    assert made.headers == [("who", b"customer-42")]
    assert (made.attempts, made.error_type, made.error_text) == (5, "ValueError", "no such account")
    assert made.time == 1_700_000_000.5


def test_an_exception_whose_str_raises_is_named_in_the_dead_letter() -> None:
    made = letter(Hostile())
    assert (made.error_type, made.error_text) == ("Hostile", "<Hostile.__str__ raised RuntimeError>")


def test_the_repr_of_a_dead_letter_has_its_origin_and_no_user_data() -> None:
    made = letter(ValueError(SECRET))
    assert repr(made) == f"<DeadLetter {made.id} of PAYMENTS/3 position 77>"
    assert SECRET not in repr(made) + repr([made]) + f"{made}"


@pytest.mark.parametrize(
    ("kind", "text", "shown"),
    [
        ("ValueError", "no such tariff", "ValueError: no such tariff"),
        ("ValueError", "", "ValueError"),
        ("Term", "no such customer", "no such customer"),
        ("Nak", "busy", "busy"),
        ("MessageError", "no order: amount: Field required", "no order: amount: Field required"),
        ("Term", "", "Term"),
        ("OSError", "one\ntwo\x1b[2J", r"OSError: one\ntwo\x1b[2J"),
    ],
)
def test_a_reason_is_one_line_with_the_text_of_the_exception(kind: str, text: str, shown: str) -> None:
    assert reason_line(kind, text) == shown


@given(kind=st.text(max_size=100), text=st.text(max_size=600))
def test_a_reason_is_bounded_and_printable(kind: str, text: str) -> None:
    shown = reason_line(kind, text)
    assert len(shown) <= REASON_LIMIT and shown.isprintable()


def test_a_long_reason_is_cut_and_says_so() -> None:
    assert reason_line("Term", "x" * REASON_LIMIT) == "x" * REASON_LIMIT
    assert reason_line("Term", "x" * 500) == "x" * (REASON_LIMIT - 1) + "…"


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        (
            ValueError("no such card"),
            "ValueError: no such card (decode failed with ValueError: correct decode=…, or t…",
        ),
        (ValueError(), "ValueError (decode failed with ValueError: correct decode=…, or the producer of…"),
        (ValueError("x" * 999), f"ValueError: {'x' * 67}…"),
    ],
)
def test_the_reason_of_an_unreadable_message_begins_with_the_error_of_the_decoder(
    raised: Exception, shown: str
) -> None:
    def decode(message: Message) -> object:
        raise raised

    (message,) = [Message(Partition(PartitionId("payments", 3), Reader()), 7, b"k", 1, SECRET, None)]
    with pytest.raises(MessageError) as failed:
        fill_data(message, decode)
    # Log lines show the text of the error itself, which has no text of the decoder.
    remedy = "decode failed with ValueError: correct decode=…, or the producer of such messages"
    assert str(failed.value) == remedy
    letter = dead_letter(message, Failure(failed.value), 5.0)
    assert reason_line(letter.error_type, letter.error_text) == shown
    assert letter.error_text.endswith(f" ({remedy})") and len(letter.error_text) <= ERROR_TEXT_LIMIT


def test_a_message_error_of_the_decoder_itself_is_the_whole_reason() -> None:
    def decode(message: Message) -> object:
        raise MessageError("no order") from ValueError(SECRET)

    message = Message(Partition(PartitionId("payments", 3), Reader()), 7, b"k", 1, SECRET, None)
    with pytest.raises(MessageError) as failed:
        fill_data(message, decode)
    assert dead_letter(message, Failure(failed.value), 5.0).error_text == "no order"


def test_the_size_of_a_dead_letter_as_a_message_is_in_bytes() -> None:
    partition = Partition(PartitionId("PAYMENTS", 3), Reader())
    found = dead_letter(Message(partition, 77, b"key", 0, "x", None), Failure(ValueError()), 0.0)
    for headers, size in (((), 0), ((("who", b"xy"),), 5), ((("größe", b""), ("\ud800", b"z")), 7 + 2)):
        message = message_of(dataclasses.replace(found, headers=headers))
        assert message.size == len(found.value) + 3 + size
