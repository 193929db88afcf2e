"""``NothingStranded`` finds each published message that no consumer handled, and counts orders that a change broke."""

from __future__ import annotations

from memsource import Verdict, check
from memsource.checkers import CHECKERS, NothingStranded
from tests.memsource.checkers.rows import Rows, assigned, handled, message, parsed, produced, segment

WIDE = {"partition": "S__p1/0"}


def judged(published: Rows, *consumers: Rows) -> Verdict:
    segments = [segment(published, end=None)]
    for number, rows in enumerate(consumers, 2):
        segments.append(segment([assigned(None)], rows, member=f"m-{number}", pid=number, start=100.0 + 10 * number))
    (verdict,) = check(parsed(*segments), [NothingStranded])
    return verdict


def test_messages_of_all_partitions_are_handled() -> None:
    published = [produced(0), produced(0, **WIDE), produced(1, "other")]
    dead = [message("dlq_confirmed", 1, "other")]
    verdict = judged(published, [*handled(0), *dead], handled(0, **WIDE))
    assert (verdict.status, verdict.checked, verdict.note) == ("passed", 3, "0 broken orders across partitions")


def test_a_message_that_nobody_reads_is_named() -> None:
    verdict = judged([produced(0), *(produced(each, **WIDE) for each in range(3))], handled(0))
    assert (verdict.status, verdict.violations) == ("violated", 3)
    assert verdict.witnesses[0].startswith("S__p1/0 position 0 key ")
    assert verdict.witnesses[0].endswith("was published, and no consumer has handled it")


def test_an_order_that_a_change_has_broken_is_counted() -> None:
    """The second message went to another partition, and is handled before the first one."""
    published = [produced(0), produced(0, **WIDE), produced(1, **WIDE), produced(5, "other"), produced(6, None)]
    rest = [*handled(5, "other"), *handled(6, None)]
    verdict = judged(published, [*handled(0, **WIDE), *handled(0), *handled(1, **WIDE), *rest])
    assert (verdict.status, verdict.note) == ("passed", "1 broken orders across partitions")


def test_a_stranded_message_is_overtaken_by_all_later_ones() -> None:
    published = [produced(0, **WIDE), produced(0), produced(1)]
    verdict = judged(published, [*handled(0), *handled(1)])
    assert (verdict.violations, verdict.note) == (1, "2 broken orders across partitions")


def test_without_the_rows_of_a_producer_nothing_is_proved() -> None:
    verdict = judged([], handled(0))
    assert (verdict.status, verdict.reasons) == ("unproven", ("1 histories lack the rows of their producers",))


def test_a_run_that_is_under_way_is_not_judged() -> None:
    assert NothingStranded not in CHECKERS
