"""The choosers for simulated adapters draw faults from a seed, aim further faults, and repeat given decisions."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Final

from memsource.adapters.choices import DELIVER, KINDS, OF_REQUESTS, PHASES, Choice, Decision, Drawn, Given, Kind, Place

ALL: Final = frozenset(KINDS)
COMMIT: Final = Place("a", "commit", "commit", ALL)


def drawn(seed: int, places: int = 3_000, place: Place = COMMIT, kinds: frozenset[Kind] = ALL) -> list[Choice]:
    chooser = Drawn(f"{seed}", kinds, (6.0,))
    return [chooser.choose(number, place) for number in range(places)]


def faults(choices: list[Choice]) -> list[Choice]:
    return [choice for choice in choices if choice is not DELIVER]


def test_a_seed_always_draws_the_same_faults() -> None:
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_boundary_draws_only_the_faults_that_it_offers() -> None:
    offers: frozenset[Kind] = frozenset({"crash", "delay"})
    for seed in range(50):
        assert {choice.kind for choice in faults(drawn(seed, place=COMMIT._replace(offers=offers)))} <= offers


def test_the_broker_decides_which_kinds_exist() -> None:
    kinds: frozenset[Kind] = frozenset({"freeze"})
    for seed in range(50):
        assert {choice.kind for choice in faults(drawn(seed, kinds=kinds))} <= kinds


def test_each_run_draws_the_kinds_that_exist() -> None:
    firsts = Counter(found[0].kind for seed in range(400) if (found := faults(drawn(seed))))
    assert set(firsts) == ALL
    # A run of few kinds repeats them, which a run of all kinds seldom does.
    runs = [faults(drawn(seed)) for seed in range(600)]
    assert any(len({choice.kind for choice in found}) <= 2 for found in runs if len(found) > 3)


def test_a_fault_is_followed_by_the_same_fault_on_the_retry() -> None:
    repeated = 0
    for seed in range(300):
        chooser = Drawn(f"{seed}", ALL, ())
        chosen = [
            chooser.choose(number, COMMIT._replace(call=("commit", "fetch")[number % 2])) for number in range(3_000)
        ]
        at = [number for number, choice in enumerate(chosen) if choice.kind in OF_REQUESTS]
        repeated += any(after - before == 2 and chosen[before] == chosen[after] for before, after in pairwise(at))
    assert repeated > 30


def test_a_fault_may_last_until_about_a_deadline_of_the_client() -> None:
    amounts = {choice.amount for seed in range(300) for choice in faults(drawn(seed))}
    assert {6.0 * 0.9, 6.0 * 1.1} <= amounts


def test_a_fault_is_aimed_at_another_member_after_a_fault_that_moves_partitions() -> None:
    aimed = 0
    for seed in range(200):
        chooser = Drawn(f"{seed}", ALL, (), waits=True)
        if any(chooser.choose(number, COMMIT) != DELIVER for number in range(50)):
            aimed += any(aim.others and aim.member == "a" for aim in chooser._aims)
    assert aimed


def test_some_faults_of_a_process_happen_between_two_boundaries() -> None:
    choices = []
    for seed in range(100):
        chooser = Drawn(f"{seed}", ALL, (), waits=True)
        choices += faults([chooser.choose(number, COMMIT) for number in range(500)])
    assert {choice.later for choice in choices if choice.kind == "crash"} > {0.0, 0.3}
    assert {choice.later for choice in choices if choice.kind in OF_REQUESTS} == {0.0}


def test_a_drawn_plan_ends_after_its_last_fault() -> None:
    for seed in range(100):
        chooser = Drawn(f"{seed}", ALL, ())
        # A fault that is aimed at a phase, or at another member, waits for it.
        places = [COMMIT._replace(phase=phase, member=member) for phase in PHASES for member in "ab"]
        for number in range(20_000):
            chooser.choose(number, places[number % len(places)])
        assert chooser.over
        assert chooser.choose(20_000, COMMIT) is DELIVER


def test_a_recorded_list_of_decisions_is_repeated() -> None:
    crash, delay = Choice("crash", 1.0), Choice("delay", 0.5)
    chooser = Given([Decision(1, crash), Decision(3, delay)])
    assert [chooser.choose(number, COMMIT) for number in range(3)] == [DELIVER, crash, DELIVER]
    over = [chooser.over]
    assert chooser.choose(3, COMMIT._replace(offers=frozenset())) is DELIVER
    assert [*over, chooser.over, Given([]).over] == [False, True, True]
