"""Lease machines keep their promises under every fault at every call, and these tests find every planted bug."""

from __future__ import annotations

import pytest

from lanes.core.cohort import lease_machine, phases
from lanes.core.cohort.actions import (
    LeaseReleased,
)
from lanes.core.cohort.lease_machine import LeaseMachine
from lanes.core.cohort.phases import TRANSITIONS
from tests.core.cohort import test_acquire_lease as cases
from tests.core.cohort.walks import Walk, scenarios
from tests.mutants import lease_machines as mutants

RETENTIONS = ("limits", "workqueue", "interest")
WALKS = 200


@pytest.mark.long
@pytest.mark.parametrize("retention", RETENTIONS)
def test_every_fault_at_every_call_keeps_every_promise(retention: str) -> None:
    # A stream with interest retention has no separate step.
    worlds = list(scenarios(retention, step=3 if retention == "interest" else 1))
    assert all(world.settled() for world in worlds)
    # The faults had effects: only orders with a fault handle a message twice.
    assert worlds[0].repeats == 0
    assert sum(world.repeats > 0 for world in worlds) > 20


@pytest.mark.parametrize("retention", RETENTIONS)
def test_random_walks_of_members_keep_every_promise_of_a_cohort(retention: str) -> None:
    worlds = [Walk(seed, retention, members=2 + seed % 2).run() for seed in range(WALKS)]
    assert sum(world.repeats > 0 for world in worlds) > 3
    assert sum(LeaseReleased() in world.seen for world in worlds) > 50


@pytest.mark.long
def test_random_walks_use_every_transition_of_the_lease_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    met = set()

    def following(partition: int, phase: str, event: str) -> str:
        met.add((phase, event))
        return phases.following(partition, phase, event)

    monkeypatch.setattr(lease_machine, "following", following)
    for retention in ("workqueue", "interest"):
        for seed in range(WALKS):
            Walk(seed, retention).run()
        for _ in scenarios(retention, step=4):
            pass
    cases.test_a_consumer_name_taken_by_another_acquisition_leads_to_a_new_epoch()
    for phase in phases.TAKING - {phases.REFINDING}:
        cases.test_a_takeover_that_outlives_the_lease_is_lost(phase)
    for planned in (True, False):
        cases.test_on_a_work_queue_a_late_lower_consumer_is_deleted_before_the_next_try(planned)
    assert set(TRANSITIONS) - met == set()


FOUND_ON = {mutants.NoServerClock: "workqueue", mutants.DeleteFirst: "interest"}


@pytest.mark.long
@pytest.mark.parametrize(
    # The third value is a call whose faults show the bug, so that no earlier faults are played in vain.
    ("mutant", "broken", "first"),
    [
        (mutants.NoVerify, "(f)", 7),
        (mutants.NoBump, "(g)", 1),
        (mutants.NoServerClock, "(f)", 30),
        (mutants.ReleaseBeforeState, "(d)", 1),
        (mutants.ReleaseBeforeDrain, "(b)", 1),
        (mutants.StateWithoutLedger, "(d)", 1),
        (mutants.DrainWithoutLedger, "(d)", 1),
        (mutants.AdoptedAfterRestart, "(b)", 1),
        (mutants.UnfencedState, "(i)", 14),
        (mutants.UnknownIsMine, "(a)", 4),
        (mutants.NoGrace, "(a)", 11),
        (mutants.TakesWhatIsHeld, "(a)", 1),
        (mutants.NoDeadline, "(a)", 13),
        (mutants.RenewedAfterLoss, "(a)", 13),
        (mutants.DeadlineFromTheAnswer, "(a)", 40),
        (mutants.DeleteFirst, "(c)", 1),
        (mutants.PullBeforeDelete, "(e)", 32),
        (mutants.NoSweep, "(g)", 28),
        (mutants.StaleState, "(i)", 14),
        (mutants.ResumedAfterRelease, "(a)", 21),
        (mutants.FloorUnread, "(h)", 34),
    ],
)
def test_random_walks_find_each_planted_bug_of_the_lease_machine(
    mutant: type[LeaseMachine], broken: str, first: int
) -> None:
    with pytest.raises(AssertionError) as found:
        for _ in scenarios(FOUND_ON.get(mutant, "limits"), mutant, first=first):
            pass
    assert str(found.value).startswith(broken)


def test_each_planted_bug_of_the_table_is_tried() -> None:
    marks = test_random_walks_find_each_planted_bug_of_the_lease_machine.pytestmark  # type: ignore[attr-defined]
    (parametrized,) = [mark for mark in marks if mark.name == "parametrize"]
    assert [mutant for mutant, *_ in parametrized.args[1]] == mutants.MUTANTS
