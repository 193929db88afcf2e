"""``UnownedNeverFed`` compares the receiver of each message with the map of ranges."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from lanes.ring import SLOTS
from memsource import Verdict, check
from memsource.checkers import CHECKERS, SlotOwner, UnownedNeverFed
from tests.memsource.checkers.rows import (
    Rows,
    ack,
    assigned,
    at,
    delivered,
    ended,
    parsed,
    renumbered,
    segment,
    started,
)

PIECE: dict[str, Any] = {"partition": "S/0#1"}
RECEIVED = [delivered(0, **PIECE), started(0, **PIECE), ended(0, **PIECE), ack(0, **PIECE)]
EPOCH, CLAIMED = 7, 90.0


def history(*rows: Rows) -> Rows:
    """The history of the member ``m-1``, which begins at the time 100."""
    return renumbered(segment(*rows, rules={"exclusive": False}))


def owned_by(consumer: str, time: float = 0.0) -> SlotOwner:
    return SlotOwner(time, 0, SLOTS - 1, consumer)


def judged(rows: Rows, *owners: SlotOwner, consumer: str | None = "a") -> Verdict:
    consumers = {} if consumer is None else {"m-1": consumer}
    claims = {("S/0#1", EPOCH): CLAIMED}
    (verdict,) = check(parsed(rows), [partial(UnownedNeverFed, owners=owners, consumers=consumers, claims=claims)])
    assert verdict.checked == 1
    return verdict


HELD = history([assigned(epoch=EPOCH, **PIECE)], at(130.0, *RECEIVED))


@pytest.mark.parametrize(
    ("owners", "consumer"),
    [
        ([owned_by("a")], "a"),
        ([owned_by("b"), owned_by("a", 90.0)], "a"),
        ([owned_by("a"), owned_by("b", 120.0)], "a"),
        ([owned_by("a"), owned_by("b", 95.0)], "a"),
        ([owned_by("b")], None),
    ],
    ids=["owned", "moved here", "moved away since", "moved away after the claim", "unknown consumer"],
)
def test_a_message_for_an_owner_is_no_violation(owners: list[SlotOwner], consumer: str | None) -> None:
    assert judged(HELD, *owners, consumer=consumer).status == "passed"


@pytest.mark.parametrize(
    ("owners", "said"),
    [
        ([owned_by("b")], "delivered to the consumer a, and its slot {} belonged to b"),
        ([owned_by("b"), owned_by("a", 131.0)], "delivered to the consumer a, and its slot {} belonged to b"),
        ([owned_by("a"), owned_by("b", 80.0)], "delivered to the consumer a, and its slot {} belonged to b"),
        ([owned_by("a", 131.0)], "delivered, and nobody owned its slot {}"),
    ],
    ids=["never named", "named afterwards", "moved away before the assignment", "nobody"],
)
def test_a_message_for_another_owner_is_named(owners: list[SlotOwner], said: str) -> None:
    verdict = judged(HELD, *owners)
    assert (verdict.status, verdict.violations) == ("violated", 1)
    before, _, after = said.partition("{}")
    assert before in verdict.witnesses[0] and verdict.witnesses[0].endswith(after)


def test_no_other_checker_compares_the_receiver_with_the_map() -> None:
    assert [verdict.name for verdict in check(parsed(HELD), CHECKERS) if verdict.status == "violated"] == []
