"""The figures of a cohort count moves, overlaps and repeats, and name the cause of each repeat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.group.findings import Fault, FaultKind, Knowledge, findings
from demo.history import Seen, examine
from demo.lateness import Delay
from demo.membership import Member, Moves, Snapshot, deadlines, handovers, least_moves, moves
from tests.demo.test_report import report
from tests.memsource.checkers.rows import (
    Fields,
    Rows,
    ack,
    assigned,
    at,
    delivered,
    encoded,
    ended,
    owned,
    parsed,
    ran,
    segment,
    started,
)

ONE = ("m-1", "S/0", 1)


def leased(deadline: float) -> Fields:
    return owned("leased", deadline=deadline)


def known(first: Rows, second: Rows | None = None, faults: Sequence[Fault] = (), *, crashed: bool = False) -> Knowledge:
    """The knowledge of a run in which m-1 wrote the first rows, and m-2 the second rows."""
    segments = [segment(first, end=None if crashed else "drained")]
    if second:
        segments.append(segment(second, member="m-2", pid=2, start=100.5))
    return Knowledge(parsed(*segments), [], faults)


def flat(*parts: Fields | Rows) -> Rows:
    return [row for part in parts for row in ([part] if isinstance(part, dict) else part)]


# m-1 runs position 0 of key k from 101 s on, under a lease until 105 s.
RUNS = flat(at(101.0, assigned(None), leased(105.0), delivered(0), started(0)))
ENDS = at(108.0, ended(0, result="cancelled"))
LOST = at(107.0, owned("lost", deadline=105.0))


def starts(moment: float) -> Rows:
    return at(moment, assigned(None), leased(120.0), delivered(1), *ran(1))


class Overlap(NamedTuple):
    first: Rows
    second: Rows
    overlaps: int
    at_loss: int
    crashed: bool = False


OVERLAPS = {
    "from the deadline on": Overlap(flat(RUNS, LOST, ENDS), starts(105.0), 0, 1),
    "before the deadline": Overlap(flat(RUNS, LOST, ENDS), starts(104.9), 1, 0),
    "before the deadline, and lost before that": Overlap(
        flat(RUNS, at(104.0, owned("lost", deadline=105.0)), ENDS), starts(104.9), 1, 0
    ),
    "after a loss that was not noted": Overlap(flat(RUNS, ENDS), starts(105.5), 0, 1),
    "killed, before its deadline": Overlap(RUNS, starts(104.9), 1, 0, crashed=True),
    "killed, from its deadline on": Overlap(RUNS, starts(105.0), 0, 0, crashed=True),
    "ended in order, before its deadline": Overlap(
        flat(RUNS, at(102.0, ended(0), ack(0), owned("revoking"), owned("drained"), owned("revoked"))),
        starts(104.0),
        0,
        0,
    ),
    "its own deadline": Overlap(flat(RUNS, at(105.0, delivered(2, "j"), *ran(2, "j"))), [], 1, 0),
    "acknowledged behind its deadline": Overlap(flat(RUNS, at(106.0, ended(0), ack(0))), [], 1, 0),
    "acknowledged before": Overlap(flat(RUNS, at(104.0, ended(0), ack(0))), [], 0, 0),
}


@pytest.mark.parametrize("case", OVERLAPS.values(), ids=OVERLAPS)
def test_overlapping_handlers_of_a_cohort_are_counted(case: Overlap) -> None:
    found = findings(known(case.first, case.second, crashed=case.crashed))
    assert (found.overlaps, found.overlaps_at_loss) == (case.overlaps, case.at_loss), found.witnesses


def sessions(*there: tuple[float, str]) -> list[Snapshot]:
    """Reports of a server that frees the partitions of a session at its end: m-1 has these sessions at these times."""
    return [
        Snapshot(
            moment, moment + 0.1, "STABLE", {"m-1": Member(session, frozenset())} if session else {}, sessions=True
        )
        for moment, session in there
    ]


SESSION_OVERLAPS = {
    "killed, and the session has ended": (RUNS, True, sessions((101.0, "1"), (103.0, "")), 0, 0),
    "the session was replaced": (flat(RUNS, LOST, ENDS), False, sessions((101.0, "1"), (103.0, "2")), 0, 1),
    "the session is still there": (flat(RUNS, ENDS), False, sessions((101.0, "1"), (103.0, "1")), 1, 0),
}


@pytest.mark.parametrize(
    ("first", "crashed", "snapshots", "overlaps", "at_loss"), SESSION_OVERLAPS.values(), ids=SESSION_OVERLAPS
)
def test_the_end_of_a_session_frees_its_partitions_before_the_deadline(
    first: Rows, crashed: bool, snapshots: Sequence[Snapshot], overlaps: int, at_loss: int
) -> None:
    segments = (
        segment(first, end=None if crashed else "drained"),
        segment(starts(104.0), member="m-2", pid=2, start=100.5),
    )
    found = findings(Knowledge(parsed(*segments), snapshots, []))
    assert (found.overlaps, found.overlaps_at_loss, found.moves) == (overlaps, at_loss, None), found.witnesses


@pytest.mark.parametrize(
    ("first", "crashed", "faults", "cause"),
    [
        (flat(RUNS, at(102.0, ended(0))), True, ["kill"], "kill"),
        (flat(RUNS, at(102.0, ended(0)), LOST), False, ["freeze"], "freeze"),
        (flat(RUNS, at(102.0, ended(0)), LOST), False, ["cut"], "cut"),
        (flat(RUNS, at(102.0, ended(0)), LOST), False, [], "clean"),
        (flat(RUNS, at(102.0, ended(0), ack(0)), at(104.0, owned("drained"), owned("revoked"))), False, [], "clean"),
    ],
    ids=["killed", "frozen", "cut off", "lost for nothing", "given back"],
)
def test_each_repeated_message_of_a_cohort_has_one_cause(
    first: Rows, crashed: bool, faults: list[FaultKind], cause: str
) -> None:
    again = at(110.0, assigned(None), leased(120.0), delivered(0), *ran(0))
    done = [Fault(kind, "m-1", 103.0, 106.0) for kind in faults]
    found = findings(known(first, again, done, crashed=crashed))
    assert {name: count for name, count in found.duplicates.items() if count} == {cause: 1}


GAVE_BACK = at(106.0, owned("drained"), owned("revoked"))


class Loss(NamedTuple):
    late: Sequence[Delay]
    cause: str
    last: Rows = LOST
    member: str = "m-1"
    renewal: float = 2.0


# The lease of m-1 ends at 105 s, so its renewal had the time from 103 s on.
LOSSES = {
    "late for half of the time": Loss([Delay(103.2, 104.2)], "late"),
    "late several times": Loss([Delay(103.1, 103.5), Delay(103.8, 104.1), Delay(104.5, 105.5)], "late"),
    "late before the renewal was due too": Loss([Delay(100.0, 104.0)], "late"),
    "in time": Loss([], "clean"),
    "late for less than half of the time": Loss([Delay(103.2, 104.1)], "clean"),
    "two measurements of one delay": Loss([Delay(103.2, 103.8), Delay(103.2, 103.8)], "clean"),
    "late before the renewal was due": Loss([Delay(101.0, 103.5)], "clean"),
    "late only after the deadline": Loss([Delay(104.5, 107.0)], "clean"),
    "another member was late": Loss([Delay(103.0, 105.0)], "clean", member="m-2"),
    "late, and handed over": Loss([Delay(103.0, 105.0)], "clean", GAVE_BACK),
    "late, and lost before the deadline": Loss(
        [Delay(102.0, 104.0)], "clean", at(104.5, owned("lost", deadline=105.0))
    ),
    "late for an unknown time of a renewal": Loss([Delay(103.0, 105.0)], "clean", renewal=0.0),
}


@pytest.mark.parametrize("case", LOSSES.values(), ids=LOSSES)
def test_only_a_late_member_has_a_cause_for_the_loss_of_its_lease(case: Loss) -> None:
    first = segment(flat(RUNS, at(102.0, ended(0)), case.last))
    again = segment(at(110.0, assigned(None), leased(120.0), delivered(0), *ran(0)), member="m-2", pid=2, start=100.5)
    knowledge = Knowledge(parsed(first, again), [], [], {case.member: case.late}, case.renewal)
    assert {name: count for name, count in findings(knowledge).duplicates.items() if count} == {case.cause: 1}


def test_a_late_member_repeats_no_more_messages_than_a_crash(tmp_path: Path) -> None:
    """With 100 messages in flight, the loss of a lease repeats at most 200 finished messages of a partition."""
    seen = Seen([], [], {"m-1": [Delay(103.0, 105.0)]}, 2.0)
    for count, status in ((200, "passed"), (201, "violated")):
        finished = range(1, count + 1)
        before = flat(RUNS, *(at(102.0, *ran(position)) for position in finished), LOST)
        again = flat(at(110.0, assigned(None), leased(120.0)), *(at(111.0, *ran(position)) for position in finished))
        segments = [segment(before), segment(again, member="m-2", pid=2, start=100.5)]
        (tmp_path / "history.jsonl").write_bytes(encoded(*segments))
        found = examine(tmp_path, seen)
        assert found.group is not None and found.group.duplicates == {"kill": 0, "freeze": 0, "clean": 0, "late": count}
        (verdict,) = [one for one in found.verdicts if one.name == "BoundedRepeats"]
        assert verdict.status == status


@pytest.mark.parametrize(
    ("outage", "forgotten"),
    [((90.0, 92.0), True), ((80.0, 87.0), False), ((102.0, 104.0), True), ((103.5, 104.0), False)],
    ids=["over shortly before", "over long before", "when it died", "begun behind it"],
)
def test_an_outage_may_excuse_lost_acknowledgements(
    tmp_path: Path, outage: tuple[float, float], forgotten: bool
) -> None:
    """After the death of m-1 at 103 s, an outage at about that time excuses lost acknowledgements. Otherwise the bound
    of a crash holds: 200 repeats with 100 messages in flight."""
    before = flat(RUNS, *(at(102.0, *ran(position)) for position in range(1, 300)), at(103.0, delivered(999)))
    again = flat(at(110.0, assigned(None), leased(120.0)), *(at(111.0, *ran(position)) for position in range(1, 300)))
    knowledge = known(before, again, [Fault("broker", "", *outage)], crashed=True)
    assert (ONE in knowledge.forgotten) == forgotten
    segments = [segment(before, end=None), segment(again, member="m-2", pid=2, start=100.5)]
    (tmp_path / "history.jsonl").write_bytes(encoded(*segments))
    found = examine(tmp_path, Seen([], knowledge.faults))
    (verdict,) = [one for one in found.verdicts if one.name == "BoundedRepeats"]
    assert verdict.status == ("passed" if forgotten else "violated")


def test_a_lost_partition_has_the_last_recorded_deadline_of_its_lease() -> None:
    rows = flat(RUNS, at(103.0, leased(106.0), started(0, attempt=2)), LOST)
    assert deadlines(parsed(segment(rows[:6], end=None))) == {ONE: 106.0}
    assert deadlines(parsed(segment(rows, end=None))) == {ONE: 105.0}
    assert deadlines(parsed(segment(starts(101.0)[:1], end=None))) == {}


def planned(generation: int, *owners: str | None) -> Snapshot:
    return Snapshot(float(generation), float(generation), "STABLE", {}, generation, owners)


def test_moves_of_partitions_are_counted() -> None:
    assert moves([]) == Moves(0, 0)
    looks = [
        planned(0),
        planned(1, "a", "a", "a", None),
        # The same plan, read again.
        planned(1, "a", "a", "a", None),
        # One partition moves, which is necessary; another partition gets its first owner.
        planned(2, "a", "a", "b", "b"),
        # c gets two partitions, although one move would be sufficient.
        planned(3, "a", "c", "c", "b"),
        # c has left.
        planned(4, "a", "a", "b", "b"),
    ]
    assert moves(looks) == Moves(1 + 2 + 2, 1 + 1 + 2)


@given(st.data())
def test_least_moves_is_the_smallest_number_of_moves_of_any_even_plan(data: st.DataObject) -> None:
    names = "abc"
    owners = data.draw(st.lists(st.sampled_from([*names, "gone", None]), min_size=1, max_size=6))
    members = data.draw(st.sets(st.sampled_from(names), min_size=1))

    def even() -> Iterator[Sequence[str]]:
        for plan in product(sorted(members), repeat=len(owners)):
            counts = [plan.count(member) for member in members]
            if max(counts) - min(counts) <= 1:
                yield plan

    fewest = min(sum(a is not None and a != b for a, b in zip(owners, plan, strict=True)) for plan in even())
    assert least_moves(owners, members) == fewest


def test_the_report_has_the_duration_of_handovers() -> None:
    back = flat(
        at(101.0, assigned(None)),
        at(102.0, owned("revoking")),
        at(103.0, owned("drained")),
        at(103.2, owned("revoked")),
    )
    given_to = at(103.5, assigned(None))
    segments = [segment(back, end=None), segment(given_to, member="m-2", pid=2, start=100.5, end=None)]
    assert handovers(parsed(*segments)) == [pytest.approx(0.5)]
    # No successor, the same member again, and a loss instead of a release.
    assert handovers(parsed(segments[0])) == []
    again = flat(back, at(103.4, assigned(None, assignment=2)))
    assert handovers(parsed(segment(again, end=None), segments[1])) == []
    lost = flat(back[:3], at(103.2, owned("lost", deadline=103.0)))
    assert handovers(parsed(segment(lost, end=None), segments[1])) == []


def test_the_report_of_a_cohort_has_the_number_of_moves() -> None:
    knowledge = known(flat(RUNS, at(104.0, ended(0), ack(0))))
    found = findings(knowledge)
    assert (found.moves, found.handover) == (Moves(0, 0), None)
    said = report(group=found).json()
    assert '"moved": 0, "moved_minimum": 0, "handover_ms": null' in said
