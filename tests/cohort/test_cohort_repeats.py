"""After the death or freeze of an owner, the next owner repeats only messages that were not written as finished."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Final

import anyio
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
"""Number of messages finished above a stuck one that causes a write of the ledger."""

IN_FLIGHT: Final = 8
FINISHED: Final = 44
"""Four at a time, so that the last four are finished but not written down."""

RATE: Final = 300
"""Messages a second of a paced run."""

RARELY: Final = 3600.0
"""A ``commit_interval`` so long that only the number of unwritten messages causes a write."""

Ending = Callable[[Stage, Worker], None]


def crashes(stage: Stage, worker: Worker) -> None:
    stage.crash(worker)


def freezes(stage: Stage, worker: Worker) -> None:
    stage.freeze(worker, 3 * CohortSettings().lease)


def has_ended(stage: Stage, count: int) -> bool:
    return len(stage.ends()) == count


def played(ending: Ending, retention: Retention) -> tuple[list[int], Run]:
    """The repeated messages after the loss of an owner that finished many messages above a stuck one."""
    again: list[int] = []

    async def scene(stage: Stage) -> None:
        worker, first = stage.join()
        await stage.owns(first, 0)
        stuck = stage.publish(0)
        stage.closed.update(stuck)
        while len(stage.ends()) < FINISHED:
            wanted = len(stage.ends()) + len(stage.publish(0, 0, 0, 0))
            await stage.wait(partial(has_ended, stage, wanted), "all other messages are done")
        finished = stage.ends()
        ending(stage, worker)
        _, second = stage.join()
        await stage.owns(second, 0)
        stage.closed.clear()
        await stage.wait(lambda: set(stuck) <= set(stage.starts("w-2")), "the next owner handles the stuck message")
        await stage.world.settled()
        again.extend(sorted(position for position in stage.starts("w-2") if position in finished))

    settings = dataclasses.replace(PATIENT, max_in_flight=IN_FLIGHT, commit_interval=RARELY)
    return again, staged(scene, settings=settings, retention=retention, in_flight=EVERY)


def judged(run: Run) -> Verdict:
    """The verdict of the checker."""
    (verdict,) = check(run.segments, [partial(BoundedRepeats, written_every=EVERY)])
    return verdict


@pytest.mark.parametrize("ending", [crashes, freezes])
def test_a_loss_with_a_stuck_key_repeats_only_unwritten_messages(ending: Ending) -> None:
    again, run = played(ending, "limits")
    # Only messages that finished after the last write are repeated.
    assert 0 < len(again) <= EVERY + 1
    assert again == list(range(again[-1] + 1 - len(again), again[-1] + 1))
    verdict = judged(run)
    assert (verdict.status, verdict.note) == ("passed", f"at most {len(again)} repeats of one assignment")


@pytest.mark.parametrize("ending", [crashes, freezes])
@pytest.mark.parametrize("retention", ["workqueue", "interest"])
def test_a_work_queue_repeats_no_finished_message(ending: Ending, retention: Retention) -> None:
    again, run = played(ending, retention)
    assert (again, judged(run).status) == ([], "passed")


def repeats_at_a_steady_rate(messages: int, commit_interval: float) -> int:
    """The repeated messages after a crash while a key is stuck, after that many messages at ``RATE``."""
    again: list[int] = []

    async def scene(stage: Stage) -> None:
        worker, first = stage.join()
        await stage.owns(first, 0)
        stuck = stage.publish(0)
        stage.closed.update(stuck)
        for _ in range(messages):
            stage.publish(0)
            await anyio.sleep(1 / RATE)
        finished = stage.ends()
        assert len(finished) >= messages - 1
        stage.crash(worker)
        _, second = stage.join()
        await stage.owns(second, 0)
        stage.closed.clear()
        await stage.wait(lambda: set(stuck) <= set(stage.starts("w-2")), "the next owner handles the stuck message")
        await stage.world.settled()
        again.extend(position for position in stage.starts("w-2") if position in finished)

    staged(scene, settings=dataclasses.replace(PATIENT, commit_interval=commit_interval))
    return len(again)


def test_a_crash_at_300_messages_a_second_repeats_at_most_a_twentieth_of_a_second() -> None:
    """The member writes the finished messages down 20 times a second, and rarely with a long ``commit_interval``."""
    found = [repeats_at_a_steady_rate(messages, commit_interval=1.0) for messages in (100, 104, 109, 113)]
    assert max(found) <= RATE / 20 + 1, found
    assert max(found) > 0, "no crash happened between two writes"
    assert repeats_at_a_steady_rate(100, commit_interval=RARELY) >= 99


def test_the_bound_on_repeats_finds_a_ledger_that_is_never_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, "checkpoint", lambda *_: None)
    again, run = played(crashes, "limits")
    assert len(again) == FINISHED
    verdict = judged(run)
    assert verdict.status == "violated"
    bound = EVERY + IN_FLIGHT
    assert verdict.witnesses[0].endswith(f"in assignment 1, which may leave {bound} of its messages to be repeated")
    # The campaign finds this fault too, unless the bucket was lost.
    case = next(seed for seed in range(100) if case_of(seed).in_flight == EVERY)
    run = dataclasses.replace(run, plan=dataclasses.replace(run.plan, seed=case))
    assert repeated_too_often(run) == {"BoundedRepeats": verdict.witnesses[0]}
    run.happened["fault: lost"] += 1
    assert repeated_too_often(run) == {}
