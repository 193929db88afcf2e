"""The repeats after a crash, a loss and a handover of a partition under a lease are bounded."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import pytest

from memsource import Verdict, check
from memsource.checkers.repeats import BoundedRepeats
from tests.memsource.checkers.rows import Rows, assigned, ended, message, owned, parsed, ran, segment

LEASED: Rows = [assigned(None), owned("leased", deadline=110.0)]
CRASHED: Rows = []
LOST: Rows = [owned("lost", deadline=110.0)]
HANDED_OVER: Rows = [owned("revoking"), owned("drained"), owned("revoked")]
OTHER: Rows = [assigned(None), owned("leased", deadline=210.0)]


def runs(count: int) -> Rows:
    """The rows of ``count`` messages from position 0."""
    return [row for position in range(count) for row in ran(position)]


def judged(
    rows: Rows, *, again: int, written_every: int | None = None, excused: Collection[tuple[str, str, int]] = ()
) -> Verdict:
    """The first owner has at most 3 of 20 messages in flight; the second one repeats the first ``again`` of them."""
    first = segment(rows, max_in_flight=3, end=None)
    second = segment(OTHER, runs(again), member="m-2", pid=2, start=200.0)
    make = partial(BoundedRepeats, written_every=written_every, excused=excused)
    (verdict,) = check(parsed(first, second), [make])
    return verdict


@pytest.mark.parametrize("ending", [CRASHED, LOST], ids=["crashed", "lost"])
@pytest.mark.parametrize(("written_every", "bound"), [(None, 6), (1, 4)])
def test_a_crash_repeats_unwritten_messages(ending: Rows, written_every: int | None, bound: int) -> None:
    rows = [*LEASED, *runs(20), *ending]
    kept = judged(rows, again=bound, written_every=written_every)
    assert (kept.status, kept.checked, kept.note) == ("passed", 1, f"at most {bound} repeats of one assignment")
    broken = judged(rows, again=bound + 2, written_every=written_every)
    # Each assignment counts once.
    assert (broken.status, broken.violations) == ("violated", 1)
    assert broken.witnesses[0].startswith(f"S/0 position {bound} ")
    assert broken.witnesses[0].endswith(
        f"had finished at m-1 pid 1 in assignment 1, which may leave {bound} of its messages to be repeated"
    )


def test_a_clean_hand_over_repeats_nothing() -> None:
    rows = [*LEASED, *runs(20), *HANDED_OVER]
    assert judged(rows, again=0).status == "passed"
    broken = judged(rows, again=1)
    assert broken.witnesses[0].endswith("in assignment 1, which handed it over cleanly")


def test_an_unfinished_message_is_no_repeat() -> None:
    failed = [ended(position, result="error") for position in range(20)]
    assert judged([*LEASED, *failed, *HANDED_OVER], again=20).status == "passed"
    letter = [message("abandoned", 0), message("dlq_confirmed", 0)]
    assert judged([*LEASED, *letter, *HANDED_OVER], again=1).status == "passed"
    assert judged([*LEASED, *reversed(letter), *HANDED_OVER], again=1).status == "violated"


def test_messages_that_the_broker_forgot_are_excused() -> None:
    rows = [*LEASED, *runs(20)]
    assert judged(rows, again=20, excused=[("m-1", "S/0", 1)]).status == "passed"
    assert judged(rows, again=20, excused=[("m-1", "S/0", 2), ("m-2", "S/0", 1)]).status == "violated"


def test_assignments_without_a_lease_are_not_judged() -> None:
    assert judged([assigned(None), *runs(20)], again=20).status == "passed"


def test_a_history_without_max_in_flight_proves_nothing() -> None:
    rows = [*LEASED, *runs(20)]
    first, second = segment(rows, end=None), segment(OTHER, runs(1), member="m-2", pid=2, start=200.0)
    del first[0]
    (verdict,) = check(parsed(first, second), [BoundedRepeats])
    assert verdict.status == "unproven"
