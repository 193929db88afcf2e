"""About as many events fail as requested, and the same events fail in every process."""

from __future__ import annotations

from collections import Counter

from demo.events import generate
from demo.faults import POISON, Faults


def test_about_one_in_a_hundred_fails_once_or_twice_and_a_few_always() -> None:
    faults = Faults()
    failures = Counter(faults.failures(event.case, event.step) for event in generate(55_628, 1))
    assert 200 < failures[1] < 360
    assert 200 < failures[2] < 360
    assert 3 <= failures[POISON] <= 25
    assert sum(failures.values()) == 55_628


def test_without_planned_failures_no_event_fails() -> None:
    faults = Faults(fail_every=0, poison_every=0)
    assert {faults.failures(event.case, event.step) for event in generate(2_000, 1)} == {0}


def test_every_event_fails_if_all_failures_are_planned() -> None:
    assert {Faults(poison_every=1).failures("a", step) for step in range(9)} == {POISON}
    assert {Faults(poison_every=0, fail_every=1).failures("a", step) for step in range(99)} == {1, 2}
