"""After the deadline of a lease a second member may handle the key, and the first member must not."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

import pytest

from lanes import Message, PartitionId
from lanes.core.types import Partition
from lanes.history.recorder import Recorder
from memsource import NoOverlap, Verdict, check, read
from memsource.memory.topic import RecordReader
from tests.memsource.checkers.rows import (
    Fields,
    Rows,
    ack,
    assigned,
    at,
    delivered,
    ended,
    owned,
    parsed,
    ran,
    segment,
    started,
)


def leased(deadline: float) -> Fields:
    return owned("leased", deadline=deadline)


def lost(deadline: float) -> Fields:
    return owned("lost", deadline=deadline)


def judged(
    first: Rows,
    second: Rows = (),  # type: ignore[assignment]
    *,
    taken: Collection[tuple[str, str, int]] = (),
) -> Verdict:
    """One partition, owned by m-1 from 100 s and by m-2 from 101 s."""
    segments = [segment([assigned(None), *first], end=None)]
    if second:
        segments.append(segment([assigned(None), *second], member="m-2", pid=2, start=101.0, end=None))
    (verdict,) = check(parsed(*segments), [NoOverlap], taken=taken)
    return verdict


RUNS_ON = [delivered(0), started(0), *at(103.0, lost(102.0), ended(0, result="cancelled"))]


def test_a_handler_may_start_at_the_deadline_of_a_member_that_lost_its_lease() -> None:
    assert judged([leased(102.0), *RUNS_ON], [leased(110.0), *at(102.0, *ran(1))]).status == "passed"


def test_a_handler_may_start_at_the_deadline_of_a_member_that_recorded_no_loss() -> None:
    unaware = [leased(102.0), delivered(0), started(0), *at(104.0, ended(0, result="cancelled"))]
    assert judged(unaware, [leased(110.0), *at(102.0, *ran(1))]).status == "passed"


def test_no_handler_may_start_before_the_deadline_of_the_owner() -> None:
    # The other member notes its loss later, and a report of the broker changes nothing.
    verdict = judged([leased(102.0), *RUNS_ON], [leased(110.0), *at(101.9, *ran(1))])
    assert (verdict.status, verdict.violations) == ("violated", 1)
    assert verdict.witnesses[0].endswith("started while position 0 of its key was running (m-1 pid 1 row 5)")


def test_a_taken_lease_ends_before_its_owner_notes_the_loss() -> None:
    first = [leased(105.0), delivered(0), started(0), *at(103.0, lost(103.0), ended(0, result="cancelled"))]
    taken = {("m-1", "S/0", 1)}
    assert judged(first, [leased(110.0), *at(102.0, *ran(1))], taken=taken).status == "passed"
    assert judged(first, [leased(110.0), *at(102.0, *ran(1))]).status == "violated"


def test_the_owner_of_a_taken_lease_may_start_a_handler_before_it_notes_the_loss() -> None:
    late = [*at(102.5, delivered(0), started(0)), *at(103.0, lost(103.0), ended(0, result="cancelled"))]
    second = [leased(110.0), *at(102.0, delivered(1), started(1)), *at(104.0, ended(1))]
    taken = {("m-1", "S/0", 1)}
    assert judged([leased(105.0), *late], second, taken=taken).status == "passed"
    assert judged([leased(105.0), *late], second).status == "violated"


def test_a_renewal_recorded_only_with_the_loss_counts() -> None:
    assert judged([leased(101.0), *RUNS_ON], [leased(110.0), *at(101.9, *ran(1))]).status == "violated"


def test_no_handler_may_start_after_its_own_deadline() -> None:
    assert judged([leased(101.0), *at(100.9, *ran(0))]).status == "passed"
    verdict = judged([leased(101.0), *at(101.0, *ran(0))])
    assert verdict.witnesses[0].endswith("started when its own lease had run out")
    # A later renewal of the lease changes nothing.
    assert judged([leased(101.0), *at(101.5, *ran(0)), leased(105.0), *at(102.0, *ran(1))]).violations == 1


@pytest.mark.parametrize("at_once", [False, True])
def test_no_message_may_be_acknowledged_after_the_deadline_or_the_loss(*, at_once: bool) -> None:
    before = [leased(102.0), delivered(0), *ran(0)]
    assert judged([*before, *at(101.9, ack(0))]).status == "passed"
    late = at(101.0, lost(102.0), ack(0)) if at_once else at(102.0, ack(0))
    assert judged([*before, *late]).witnesses[0].endswith("acknowledged when its lease had run out or was lost")


def test_a_history_has_the_deadline_of_each_lease(tmp_path: Path) -> None:
    history = Recorder(tmp_path, member="m-1")
    partition = Partition(PartitionId("S", 0), RecordReader(), deadline=20.0, fencing_token=9)
    partition.assignment = 1
    one, other = (Message(partition, position, b"k", 1, None, None) for position in range(2))
    history.open(source="S", concurrency=1, max_in_flight=2, max_in_flight_bytes=10, now=10.0, rules=None)
    history.delivered([one, other], 11.0)
    history.started(one, 12.0)
    history.ended(one, "ok", 13.0)
    history.started(one, 13.0)
    partition.deadline = 25.0
    history.started(other, 14.0)
    history.acks([one], 14.5)
    partition.deadline = 25.5
    history.acks([other], 14.5)
    partition.deadline = 26.0
    history.lost(partition, 30.0)
    history.close("stopped", 31.0)
    rows = read([tmp_path])[0].rows
    assert [(row.event, row.number) for row in rows if row.event in ("leased", "started", "ack", "lost")] == [
        ("leased", 20.000001),
        ("started", 0),
        ("started", 0),
        ("leased", 25.000001),
        ("started", 0),
        ("ack", 0),
        ("leased", 25.500001),
        ("ack", 0),
        ("lost", 26.000001),
    ]


def written(directory: Path, deadline: float, now: float) -> Verdict:
    """The rows of a handler call and its acknowledgement at ``now``, under a lease."""
    history = Recorder(directory, member="m-1")
    partition = Partition(PartitionId("S", 0), RecordReader(), deadline=deadline, fencing_token=9)
    partition.assignment = 1
    message = Message(partition, 0, b"k", 1, None, None)
    history.open(source="S", concurrency=1, max_in_flight=2, max_in_flight_bytes=10, now=now - 1.0, rules=None)
    history.assigned(partition, now - 1.0)
    history.delivered([message], now - 1.0)
    history.started(message, now)
    history.ended(message, "ok", now)
    history.acks([message], now)
    history.lost(partition, max(now, deadline))
    history.close("stopped", max(now, deadline))
    (verdict,) = check(read([directory]), [NoOverlap])
    return verdict


@pytest.mark.parametrize("deadline", [20.0, 213.49964152861537, 99.0000005, 86_400.9999995, 5_000_000.1234564])
def test_rounded_times_make_nothing_late(tmp_path: Path, deadline: float) -> None:
    for name, now in (("next", math.nextafter(deadline, 0.0)), ("half", deadline - 5e-7), ("one", deadline - 1e-6)):
        assert written(tmp_path / name, deadline, now).status == "passed", name
    late = written(tmp_path / "late", deadline, deadline + 3e-6)
    assert late.violations == 2
