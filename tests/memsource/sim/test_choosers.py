"""Each chooser makes its documented choices, and the same choices for the same seed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsource.sim.loop.choosers import Chooser, Fifo, Priorities, RandomWalk, Recording, Sparse, mixed
from memsource.sim.plans.plan import Schedule

SEEDS = st.integers(0, 10_000)


def answers(chooser: Chooser, asked: list[list[int]]) -> list[tuple[bool, int]]:
    return [(chooser.jump(turn), chooser.choose(turn, tasks)) for turn, tasks in enumerate(asked)]


ASKED = st.lists(st.lists(st.integers(1, 20), min_size=2, max_size=8, unique=True), max_size=40)


@given(seed=SEEDS, asked=ASKED)
@pytest.mark.parametrize("make", [RandomWalk, Priorities, mixed])
def test_a_seed_always_chooses_the_same_ready_task(make: type[RandomWalk], seed: int, asked: list[list[int]]) -> None:
    first = answers(make(seed), asked)
    assert first == answers(make(seed), asked)
    assert all(0 <= index < len(tasks) for (_, index), tasks in zip(first, asked, strict=True))


@pytest.mark.parametrize("make", [RandomWalk, Priorities])
def test_every_task_is_chosen_and_time_jumps_sometimes(make: type[RandomWalk]) -> None:
    got = answers(make(5), [[1, 2, 3]] * 3_000)
    assert {index for _, index in got} == {0, 1, 2}
    assert 5 < sum(jump for jump, _ in got) < 100


@given(seed=SEEDS, asked=ASKED)
def test_a_recorded_schedule_gives_the_same_answers(seed: int, asked: list[list[int]]) -> None:
    recording = Recording(RandomWalk(seed))
    first = answers(recording, asked)
    assert answers(Sparse(recording.schedule), asked) == first
    assert len(recording.schedule) == sum(index > 0 for _, index in first) + sum(jump for jump, _ in first)


def test_a_run_that_takes_tasks_first_in_first_out_records_no_deviation() -> None:
    recording = Recording(Fifo())
    assert answers(recording, [[4, 2], [2, 9]]) == [(False, 0)] * 2
    assert recording.schedule == Schedule()


def test_a_deviation_to_a_missing_task_is_ignored() -> None:
    sparse = Sparse(Schedule(((0, 1), (1, 2)), jumps=(1,)))
    assert answers(sparse, [[5, 6], [5, 6], [5, 6]]) == [(False, 1), (True, 0), (False, 0)]


def test_a_priority_belongs_to_the_task_and_not_to_its_place() -> None:
    chooser = Priorities(1, 0, mix=0)
    winner = [3, 1, 2][chooser.choose(0, [3, 1, 2])]
    for tasks in ([1, 2, 3], [2, 3, 1], [3, 1, 2]):
        assert tasks[chooser.choose(1, tasks)] == winner


def test_a_change_gives_the_winner_the_lowest_priority() -> None:
    # Each of the first two choices is a change: the winner has the lowest priority afterwards.
    chooser = Priorities(1, 2, span=2, mix=0)
    first = chooser.choose(0, [0, 1, 2])
    assert first == chooser.choose(1, [0, 1, 2]) == chooser.choose(2, [0, 1, 2])
    assert len({chooser._priorities[task] for task in range(3) if chooser._priorities[task] < 0}) == 2
    assert chooser._priorities[first] > 0


@pytest.mark.parametrize(("changes", "span", "mix"), [(-1, 10, 0.1), (11, 10, 0.1), (0, 0, 0.1), (1, 10, 1.5)])
def test_a_chooser_with_a_number_out_of_range_is_refused_by_name(changes: int, span: int, mix: float) -> None:
    with pytest.raises(ValueError, match=f"changes={changes}, span={span}, mix={mix}"):
        Priorities(1, changes, span=span, mix=mix)


def test_a_campaign_over_seeds_has_every_strategy() -> None:
    assert {type(mixed(seed)) for seed in range(3)} == {RandomWalk, Priorities}
