"""Cases of the checkers of ranges.

A process hands a part of its piece over, and another process continues with the part.
"""

from __future__ import annotations

from typing import Any

from memsource.checkers import DrainBeforeFeed, ExclusiveSlot
from tests.memsource.checkers.cases import COMMITS, Case
from tests.memsource.checkers.message_cases import OPEN, abandoned, drained, failed
from tests.memsource.checkers.rows import (
    Fields,
    assigned,
    at,
    confirmed,
    delivered,
    ended,
    message,
    owned,
    sent,
    started,
)

PIECE: dict[str, Any] = {"partition": "S/0#1"}
PART: dict[str, Any] = {"partition": "S/0#2"}
OTHER: dict[str, Any] = {"partition": "S/1#2"}


def given(position: int, key: str | None = "k") -> Fields:
    return delivered(position, key, **PIECE)


def begun(position: int, key: str | None = "k") -> list[Fields]:
    return [given(position, key), started(position, key, **PIECE)]


HANDED_OVER = [{**row, **PIECE} for row in drained(abandoned(0))]

LETTER = [failed(0, **PIECE), message("dlq_sent", 0, **PIECE), message("dlq_confirmed", 0, **PIECE)]

LATER = at(101.0, given(9, "other"))
"""A row after those of the next owner, because the end of a process is the end of its messages."""

SLOTS: list[Case] = [
    Case(
        make=ExclusiveSlot,
        what="given back before the next owner has it",
        rules=COMMITS,
        more=OPEN,
        keeps=[assigned(**PIECE), given(0), abandoned(0, **PIECE), at(101.0, given(1, "other"))],
        breaks=[assigned(**PIECE), given(0), at(101.0, abandoned(0, **PIECE))],
        then=[assigned(**PART), delivered(0, **PART)],
        witness="delivered while position 0 of its slot was in flight (S/0#1, m-1 pid 1 row 3)",
        checked=3,
    ),
    Case(
        make=ExclusiveSlot,
        what="a failed message is in flight until it is given back",
        rules=COMMITS,
        more=OPEN,
        keeps=[assigned(**PIECE), begun(0), failed(0, **PIECE), abandoned(0, **PIECE), at(101.0, given(1, "other"))],
        breaks=[assigned(**PIECE), begun(0), failed(0, **PIECE), at(101.0, given(1, "other"))],
        then=[assigned(**PART), delivered(2, **PART)],
        witness="delivered while position 0 of its slot was in flight (S/0#1, m-1 pid 1 row 3)",
    ),
    Case(
        make=ExclusiveSlot,
        what="messages without a key are one slot",
        rules=COMMITS,
        more=OPEN,
        keeps=[assigned(**PIECE), begun(0, None), ended(0, None, **PIECE), at(101.0, given(1, "other"))],
        breaks=[assigned(**PIECE), begun(0, None), at(101.0, ended(0, None, **PIECE))],
        then=[assigned(**PART), delivered(1, None, **PART)],
        witness="delivered while position 0 of its slot was in flight (S/0#1, m-1 pid 1 row 3)",
    ),
    Case(
        make=ExclusiveSlot,
        what="two pieces of one process",
        rules=COMMITS,
        keeps=[assigned(**PIECE), given(0), HANDED_OVER, delivered(0, **PART, assignment=2)],
        breaks=[assigned(**PIECE), given(0), delivered(0, **PART, assignment=2)],
        witness="delivered while position 0 of its slot was in flight (S/0#1, m-1 pid 1 row 3)",
    ),
    Case(
        make=ExclusiveSlot,
        what="a slot has messages in other partitions",
        rules=COMMITS,
        more=OPEN,
        keeps=[assigned(**PIECE), given(0), at(101.0, abandoned(0, **PIECE))],
        breaks=[assigned(**PIECE), given(0), at(101.0, abandoned(0, **PIECE))],
        then=[assigned(**OTHER), delivered(0, **OTHER)],
        then_breaks=[assigned(**PART), delivered(0, **PART)],
        witness="delivered while position 0 of its slot was in flight (S/0#1, m-1 pid 1 row 3)",
    ),
    Case(
        make=ExclusiveSlot,
        what="after the deadline of the lease",
        rules=COMMITS,
        more=OPEN,
        keeps=[assigned(**PIECE), given(0), owned("leased", deadline=100.2, **PIECE), at(101.0, given(1, "other"))],
        breaks=[assigned(**PIECE), given(0), owned("leased", deadline=100.9, **PIECE), at(101.0, given(1, "other"))],
        then=[assigned(**PART), delivered(0, **PART)],
        witness="delivered while position 0 of its slot was in flight (S/0#1, m-1 pid 1 row 3)",
    ),
    Case(
        make=DrainBeforeFeed,
        what="the running message is settled",
        rules=COMMITS,
        more=OPEN,
        keeps=[
            assigned(**PIECE),
            begun(0),
            ended(0, **PIECE),
            sent(1, **PIECE),
            confirmed(1, **PIECE),
            LATER,
        ],
        breaks=[assigned(**PIECE), begun(0), at(101.0, ended(0, **PIECE))],
        then=[assigned(**PART), delivered(1, **PART)],
        witness="delivered while position 0 of its slot was running at the former owner (S/0#1, m-1 pid 1 row 4)",
        checked=3,
    ),
    Case(
        make=DrainBeforeFeed,
        what="a commit before its end does not settle a message",
        rules=COMMITS,
        more=OPEN,
        keeps=[assigned(**PIECE), begun(0), ended(0, **PIECE), sent(0, 1, **PIECE), confirmed(0, **PIECE), LATER],
        breaks=[assigned(**PIECE), begun(0), sent(0, **PIECE), ended(0, **PIECE), confirmed(0, **PIECE), LATER],
        then=[assigned(**PART), delivered(1, **PART)],
        witness="delivered while position 0 of its slot was not settled at the former owner (S/0#1, m-1 pid 1 row 6)",
    ),
    Case(
        make=DrainBeforeFeed,
        what="a failed message is given back",
        rules=COMMITS,
        more=OPEN,
        keeps=[assigned(**PIECE), begun(0), failed(0, **PIECE), abandoned(0, **PIECE), LATER],
        breaks=[assigned(**PIECE), begun(0), at(101.0, failed(0, **PIECE))],
        then=[assigned(**PART), delivered(0, **PART)],
        witness="delivered while position 0 of its slot was running at the former owner (S/0#1, m-1 pid 1 row 4)",
    ),
    Case(
        make=DrainBeforeFeed,
        what="a late dead letter of a message that is given back does not count",
        rules=COMMITS,
        more=OPEN,
        keeps=[assigned(**PIECE), begun(0), LETTER[:2], abandoned(0, **PIECE), LETTER[2:], LATER],
        breaks=[assigned(**PIECE), begun(0), LETTER, LATER],
        then=[assigned(**PART), delivered(0, **PART)],
        witness="delivered while position 0 of its slot was not settled at the former owner (S/0#1, m-1 pid 1 row 7)",
    ),
    Case(
        make=DrainBeforeFeed,
        what="a lost piece is not waited for",
        rules=COMMITS,
        more=OPEN,
        keeps=[assigned(**PIECE), begun(0), owned("lost", **PIECE), at(101.0, ended(0, **PIECE))],
        breaks=[assigned(**PIECE), begun(0), at(101.0, ended(0, **PIECE))],
        then=[assigned(**PART), delivered(0, **PART)],
        witness="delivered while position 0 of its slot was running at the former owner (S/0#1, m-1 pid 1 row 4)",
    ),
]
