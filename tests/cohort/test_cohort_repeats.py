"""What a dead or frozen owner had finished runs again at the next one only as far as it was not written down."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Final

import pytest

from lanes.cohort.membership import CohortSettings, Membership
from memsource import Verdict, check
from memsource.checkers import BoundedRepeats
from memsource.jetstream.epoch_consumers import Retention
from memsource.sim.runs.run import Run
from memsource.sim.world.worker import Worker
from tests.cohort.cases import case_of
from tests.cohort.slices import repeated_too_often
from tests.cohort.stage import PATIENT, Stage, staged

EVERY: Final = 5
"""Messages finished above a stuck one, after which the ledger is written down."""

IN_FLIGHT: Final = 8
FINISHED: Final = 44
"""Four at a time, so that the last four are finished and not written down."""

Ending = Callable[[Stage, Worker], None]


def crashes(stage: Stage, worker: Worker) -> None:
    stage.crash(worker)


def freezes(stage: Stage, worker: Worker) -> None:
    stage.freeze(worker, 3 * CohortSettings().lease)


def has_ended(stage: Stage, count: int) -> bool:
    return len(stage.ends()) == count


def played(ending: Ending, retention: Retention) -> tuple[list[int], Run]:
    """What runs again when an owner that is stuck with one message has finished many behind it, and is gone."""
    again: list[int] = []

    async def scene(stage: Stage) -> None:
        worker, first = stage.join()
        await stage.owns(first, 0)
        stuck = stage.publish(0)
        stage.closed.update(stuck)
        while len(stage.ends()) < FINISHED:
            wanted = len(stage.ends()) + len(stage.publish(0, 0, 0, 0))
            await stage.wait(partial(has_ended, stage, wanted), "everything else is done")
        finished = stage.ends()
        ending(stage, worker)
        _, second = stage.join()
        await stage.owns(second, 0)
        stage.closed.clear()
        await stage.wait(lambda: set(stuck) <= set(stage.starts("w-2")), "it gets on with the stuck one")
        await stage.world.settled()
        again.extend(sorted(position for position in stage.starts("w-2") if position in finished))

    settings = dataclasses.replace(PATIENT, max_in_flight=IN_FLIGHT)
    return again, staged(scene, settings=settings, retention=retention, in_flight=EVERY)


def judged(run: Run) -> Verdict:
    """What the checker says of it."""
    (verdict,) = check(run.segments, [partial(BoundedRepeats, written_every=EVERY)])
    return verdict


@pytest.mark.parametrize("ending", [crashes, freezes])
def test_a_stuck_key_does_not_make_a_loss_repeat_everything_behind_it(ending: Ending) -> None:
    again, run = played(ending, "limits")
    # What came after the last write, and nothing before it.
    assert 0 < len(again) <= EVERY + 1
    assert again == list(range(again[-1] + 1 - len(again), again[-1] + 1))
    verdict = judged(run)
    assert (verdict.status, verdict.note) == ("passed", f"at most {len(again)} repeated of one assignment")


@pytest.mark.parametrize("ending", [crashes, freezes])
@pytest.mark.parametrize("retention", ["workqueue", "interest"])
def test_where_a_stream_keeps_only_what_is_unfinished_nothing_runs_again(ending: Ending, retention: Retention) -> None:
    again, run = played(ending, retention)
    assert (again, judged(run).status) == ([], "passed")


def test_a_ledger_that_is_never_written_down_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, "checkpoint", lambda *_: None)
    again, run = played(crashes, "limits")
    assert len(again) == FINISHED
    verdict = judged(run)
    assert verdict.status == "violated"
    bound = EVERY + IN_FLIGHT
    assert verdict.witnesses[0].endswith(f"in assignment 1, which may leave {bound} of them to be run again")
    # The campaign finds it too, unless the bucket was lost that had it.
    case = next(seed for seed in range(100) if case_of(seed).in_flight == EVERY)
    run = dataclasses.replace(run, plan=dataclasses.replace(run.plan, seed=case))
    assert repeated_too_often(run) == {"BoundedRepeats": verdict.witnesses[0]}
    run.happened["fault: lost"] += 1
    assert repeated_too_often(run) == {}
