"""The scopes that ``make test`` and ``make soak`` explore."""

from __future__ import annotations

from typing import Final

from memsource.explorer import GroupWorld, Scope, Violation, search
from tests.effort import is_full, runs


def keys(text: str) -> tuple[tuple[int, str], ...]:
    """One message of partition 0 for each letter, which is its key."""
    return tuple((0, key) for key in text)


def violation(scope: Scope) -> Violation | None:
    """The first violation of an exploration."""
    return search(GroupWorld(scope)).violation


STATES: Final = 50_000
"""About the number of states of a scope."""


def nearest_states() -> int | None:
    """The number of states that ``make test`` visits, those with the shortest paths; None = all states."""
    return None if is_full() else runs(STATES)


TWO_PARTITIONS: Final = ((0, "A"), (1, "B"), (0, "A"))

DAILY: Final = {
    # Two keys of three messages, up to their names.
    "AAB, a fault": Scope(messages=keys("AAB"), faults=1),
    "ABA, a fault": Scope(messages=keys("ABA"), faults=1),
    "ABB, a fault": Scope(messages=keys("ABB"), faults=1),
    "the prefix is closed, a fault": Scope(messages=keys("AAB"), faults=1, hands_over=False, close_prefix=True),
    "the prefix is closed, a failure": Scope(
        messages=keys("AAB"), moves=2, failures=1, hands_over=False, close_prefix=True
    ),
    "members come and go, a failure, an answer is missing": Scope(messages=keys("AAB"), moves=2, failures=1, unknown=1),
    "max_ahead, two failures": Scope(messages=keys("ABA"), failures=2, unknown=1, max_ahead=2, batch=3, settles=True),
    "max_in_flight, a failure": Scope(messages=keys("ABA"), moves=2, failures=1, concurrency=1, max_in_flight=2),
    "two partitions, a failure": Scope(messages=TWO_PARTITIONS, partitions=2, moves=2, failures=1, rotate=False),
    "two partitions, cooperative, a fault": Scope(
        messages=TWO_PARTITIONS, partitions=2, faults=1, rotate=False, cooperative=True
    ),
}

ACKS: Final = {
    "a redelivery, an acknowledgement is lost": (Scope(messages=keys("AAB"), unknown=1), 1),
    "a loss, a redelivery": (Scope(messages=keys("ABA"), faults=1), 1),
    "a failure, a redelivery": (Scope(messages=keys("AAB"), failures=1), 1),
}
"""Individual acknowledgements: a scope, and the number of early redeliveries."""

SOAK: Final = {
    "AABA, a fault": Scope(messages=keys("AABA"), faults=1),
    "ABAB, a fault": Scope(messages=keys("ABAB"), faults=1),
    "AABA, the prefix is closed, a fault": Scope(messages=keys("AABA"), faults=1, hands_over=False, close_prefix=True),
    "AABA, members come and go, a failure": Scope(messages=keys("AABA"), moves=2, failures=1),
    "AABA, a fault and a failure": Scope(messages=keys("AABA"), faults=1, failures=1),
    "AAB, a fault, an answer is missing": Scope(messages=keys("AAB"), faults=1, unknown=1),
    "AAB, a fault, members come and go": Scope(messages=keys("AAB"), moves=2, faults=1),
}
