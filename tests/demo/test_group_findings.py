"""The figures of a group count overlaps and repeats, and name the cause of each repeat."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import pytest

from demo.group.findings import Fault, FaultKind, Knowledge, findings
from demo.lateness import Delay
from demo.membership import Snapshot
from tests.demo.test_membership import look
from tests.memsource.checkers.rows import (
    Rows,
    ack,
    assigned,
    at,
    confirmed,
    delivered,
    ended,
    message,
    owned,
    parsed,
    ran,
    segment,
    sent,
    started,
)

# m-1 runs position 0 of key k from 101 s to 104 s; m-2 owns the partition from 102 s on and starts position 1 of k.
RUNS = at(101.0, assigned(), delivered(0), started(0)) + at(104.0, ended(0))
STARTS = at(102.0, assigned(), delivered(1), started(1)) + at(105.0, ended(1))
# The broker removed m-1 before, or after, m-2 started.
BEFORE = [look(101.0, m_1="a:0"), look(101.5, m_2="b:0")]
AFTER = [look(102.5, m_1="a:0"), look(103.0, m_2="b:0")]
NEVER_REMOVED = [look(101.0, m_1="a:0"), look(103.0, m_1="a:0")]
REVOKED = at(105.0, owned("revoking"), owned("drained"), owned("revoked"))
LOST = at(103.0, owned("lost"))


def known(
    first: Rows,
    second: Rows | None = None,
    looks: Sequence[Snapshot] = (),
    faults: Sequence[Fault] = (),
    *,
    crashed: bool = False,
) -> Knowledge:
    """The knowledge of a run in which m-1 wrote the first rows, and m-2 the second rows."""
    segments = [segment(first, end=None if crashed else "drained")]
    if second:
        segments.append(segment(second, member="m-2", pid=2, start=100.5))
    return Knowledge(parsed(*segments), looks, faults)


class Overlap(NamedTuple):
    first: Rows
    second: Rows
    looks: Sequence[Snapshot]
    overlaps: int
    at_loss: int


OVERLAPS = {
    "removed before the later start": Overlap(RUNS, STARTS, BEFORE, 0, 1),
    "removed after the later start": Overlap(RUNS, STARTS, AFTER, 1, 0),
    "never removed": Overlap(RUNS + REVOKED, STARTS, NEVER_REMOVED, 1, 0),
    "gave it up by itself": Overlap(RUNS[:-1] + LOST, STARTS, NEVER_REMOVED, 0, 1),
    "another key": Overlap(RUNS, at(102.0, assigned(), delivered(1, "j"), started(1, "j")), NEVER_REMOVED, 0, 0),
    "ended before": Overlap(RUNS + REVOKED, at(104.5, assigned(), delivered(1), started(1)), NEVER_REMOVED, 0, 0),
    # The removed member starts another message of the key, because it does not know of its loss.
    "the later one was removed": Overlap(
        at(101.0, assigned(), delivered(0), delivered(2)) + at(103.0, started(2)), STARTS, BEFORE, 0, 1
    ),
    "two of a key in one process": Overlap(RUNS[:-1] + at(102.0, delivered(1), started(1)), [], NEVER_REMOVED, 1, 0),
    "two of a key in one process that was removed": Overlap(
        RUNS[:-1] + at(102.0, delivered(1), started(1)), [], BEFORE, 1, 0
    ),
    "started after it knew of the loss": Overlap(
        at(101.0, assigned(), delivered(0)) + LOST + at(103.5, started(0)), [], BEFORE, 1, 0
    ),
    "acknowledged after it knew of the loss": Overlap(RUNS[:-1] + LOST + at(104.0, ack(0)), [], BEFORE, 1, 0),
    "committed after it knew of the loss": Overlap(RUNS[:-1] + LOST + at(104.0, sent(1)), [], BEFORE, 1, 0),
    "committed after it was removed": Overlap(RUNS + at(104.5, sent(1), confirmed(1)), [], BEFORE, 1, 0),
    "refused after it was removed": Overlap(RUNS + at(104.5, sent(1)), [], BEFORE, 0, 0),
    "committed and never removed": Overlap(RUNS + at(104.5, sent(1), confirmed(1)), [], NEVER_REMOVED, 0, 0),
    "sent before it was removed": Overlap(
        at(101.0, assigned(), delivered(0), ran(0), sent(1)) + at(102.0, confirmed(1)), [], BEFORE, 0, 0
    ),
}


@pytest.mark.parametrize("case", OVERLAPS.values(), ids=OVERLAPS)
def test_overlapping_handlers_of_a_group_are_counted(case: Overlap) -> None:
    found = findings(known(case.first, case.second, case.looks))
    assert (found.overlaps, found.overlaps_at_loss) == (case.overlaps, case.at_loss)
    assert len(found.witnesses) == case.overlaps


RAN = at(101.0, assigned(), delivered(0), ran(0))
GAVE_UP = at(101.0, assigned(), delivered(0), started(0), ended(0, result="error"), message("dlq_sent", 0))
AGAIN = at(104.0, assigned(), delivered(0), ran(0))


def fault(kind: FaultKind, begun: float, ended: float, member: str = "m-1") -> Fault:
    return Fault(kind, member, begun, ended)


class Repeat(NamedTuple):
    first: Rows
    looks: Sequence[Snapshot]
    faults: Sequence[Fault]
    cause: str | None
    crashed: bool = False


REPEATS = {
    "killed": Repeat(RAN, [], [fault("kill", 101.5, 101.5)], "kill", crashed=True),
    "killed while it ran": Repeat(
        at(101.0, assigned(), delivered(0), started(0)), [], [fault("kill", 101.5, 101.5)], "kill", crashed=True
    ),
    "frozen past its session": Repeat(RAN + LOST, BEFORE, [fault("freeze", 101.1, 102.9)], "freeze"),
    "frozen, and lost what it held": Repeat(RAN + LOST, NEVER_REMOVED, [fault("pause", 101.1, 102.9)], "freeze"),
    "another one was frozen": Repeat(RAN + LOST, NEVER_REMOVED, [fault("freeze", 101.1, 102.9, "m-2")], "clean"),
    "lost in an outage": Repeat(RAN + LOST, NEVER_REMOVED, [fault("broker", 101.5, 102.0, "")], "broker"),
    "lost long after an outage": Repeat(RAN + LOST, NEVER_REMOVED, [fault("broker", 50.0, 87.0, "")], "clean"),
    "lost after an outage": Repeat(RAN + LOST, NEVER_REMOVED, [fault("broker", 80.0, 90.0, "")], "broker"),
    "handed over in an outage": Repeat(
        RAN + at(103.0, owned("revoked")), NEVER_REMOVED, [fault("broker", 101.5, 103.5, "")], "broker"
    ),
    "handed over after an outage": Repeat(
        RAN + at(103.0, owned("revoked")), NEVER_REMOVED, [fault("broker", 90.0, 97.0, "")], "clean"
    ),
    "handed over": Repeat(RAN + at(103.0, owned("revoked")), NEVER_REMOVED, [], "clean"),
    "given up and handed over": Repeat(
        GAVE_UP + at(102.1, message("dlq_confirmed", 0)) + at(103.0, owned("revoked")), NEVER_REMOVED, [], "clean"
    ),
    "handed over while its dead letter was on its way": Repeat(
        GAVE_UP + at(102.1, message("abandoned", 0), message("dlq_confirmed", 0)) + at(103.0, owned("revoked")),
        NEVER_REMOVED,
        [],
        None,
    ),
    # The message is held for a retry, because its first attempt failed.
    "handed over unfinished": Repeat(
        at(101.0, assigned(), delivered(0), started(0), ended(0, result="error")) + at(103.0, owned("revoked")),
        NEVER_REMOVED,
        [],
        None,
    ),
}


@pytest.mark.parametrize("case", REPEATS.values(), ids=REPEATS)
def test_each_repeated_message_has_one_cause(case: Repeat) -> None:
    found = findings(known(case.first, AGAIN, case.looks, case.faults, crashed=case.crashed))
    expected = {"kill": 0, "freeze": 0, "clean": 0} | ({} if case.cause is None else {case.cause: 1})
    assert found.duplicates == expected


@pytest.mark.parametrize(
    ("late", "last", "looks", "cause"),
    [
        # The broker removed m-1 before 101.6 s, and m-1 had 0.4 s for its last heartbeat.
        ([Delay(101.3, 101.5)], LOST, BEFORE, "late"),
        ([Delay(101.3, 101.45)], LOST, BEFORE, "clean"),
        ([Delay(101.6, 103.0)], LOST, BEFORE, "clean"),
        ([Delay(101.3, 103.0)], at(103.0, owned("revoked")), NEVER_REMOVED, "clean"),
    ],
    ids=["late", "late for a moment", "late after its removal", "handed over"],
)
def test_a_late_member_has_a_cause_for_the_end_of_its_session(
    late: Sequence[Delay], last: Rows, looks: Sequence[Snapshot], cause: str
) -> None:
    segments = [segment(RAN + last), segment(AGAIN, member="m-2", pid=2, start=100.5)]
    found = findings(Knowledge(parsed(*segments), looks, [], {"m-1": late}, 0.4))
    assert {name: count for name, count in found.duplicates.items() if count} == {cause: 1}


def test_a_removed_member_repeats_messages_of_its_next_owner() -> None:
    first = at(101.0, assigned(), delivered(0)) + at(103.0, ran(0))
    found = findings(known(first, at(102.0, assigned(), delivered(0), ran(0)), BEFORE, [fault("freeze", 101.1, 102.9)]))
    assert found.duplicates == {"kill": 0, "freeze": 1, "clean": 0}


class Recovery(NamedTuple):
    kind: FaultKind
    first: Rows
    second: Rows
    seconds: dict[str, float]
    more: Sequence[Fault] = ()
    looks: Sequence[Snapshot] = ()


RECOVERIES = {
    "killed": Recovery("kill", RAN, AGAIN, {"kill": 2.5}),
    "nobody took over": Recovery("kill", RAN, [], {"kill": inf}),
    "given to another at the end": Recovery(
        "kill", RAN, [], {"kill": 1.6}, [], [look(101.0, m_1="a:0"), look(103.0, m_2="b:0")]
    ),
    "its own to the end": Recovery("kill", RAN, [], {"kill": inf}, [], NEVER_REMOVED),
    "stopped": Recovery("stop", RAN, AGAIN, {"stop": 2.5}),
    "it came back itself": Recovery("freeze", RAN + LOST + at(103.5, assigned(assignment=2)), AGAIN, {"freeze": 2.0}),
    "the other one had had it before": Recovery(
        "kill", RAN, at(100.6, assigned(), owned("revoked")) + at(104.0, assigned(assignment=2)), {"kill": 2.5}
    ),
    "another one had begun it while it was cut off": Recovery("kill", RAN, at(101.3, assigned()), {}),
    "it held nothing any more": Recovery("kill", RAN + at(101.2, owned("revoked")), AGAIN, {}),
    "joined": Recovery("join", AGAIN, [], {"join": 2.5}),
    "joined in vain": Recovery("join", [], [], {"join": inf}),
    "given to it at the end": Recovery(
        "join", [], [], {"join": 1.6}, [], [look(101.0, m_2="b:0"), look(103.0, m_1="a:0")]
    ),
    "given to another instead": Recovery("join", [], [], {"join": inf}, [], AFTER),
    "killed while it joined": Recovery("join", [], [], {}, [fault("kill", 102.0, 102.0)]),
    "killed after it had joined": Recovery("join", AGAIN, [], {"join": 2.5}, [fault("stop", 105.0, 105.0)]),
    "frozen for a moment": Recovery("pause", RAN, AGAIN, {}),
}


@pytest.mark.parametrize("case", RECOVERIES.values(), ids=RECOVERIES)
def test_the_recovery_of_each_fault_is_measured(case: Recovery) -> None:
    found = findings(known(case.first, case.second, case.looks, [fault(case.kind, 101.5, 101.5), *case.more]))
    assert {kind: found.recovery[kind] for kind in found.recovery if kind == case.kind} == pytest.approx(case.seconds)
