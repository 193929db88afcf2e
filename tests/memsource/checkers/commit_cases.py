"""Cases of the checkers of commits, bounds and drains."""

from __future__ import annotations

from typing import Any

from memsource.checkers import (
    BoundedBytes,
    CommitsInTime,
    CommitsRise,
    DrainInTime,
    DrainStartsNothing,
    DrainWaitsForRunning,
    HandedOverAfterDrain,
    MaxAhead,
    NoCommitAfterRevoke,
    OneCommitAtATime,
    PartitionBudgets,
    PauseAtBounds,
    StallNamed,
    UnknownCommitRepeated,
)
from tests.memsource.checkers.cases import CLOSES, COMMITS, Case
from tests.memsource.checkers.rows import (
    QUEUES,
    Fields,
    ack,
    assigned,
    at,
    confirmed,
    delivered,
    ended,
    handled,
    message,
    owned,
    ran,
    redelivered,
    sent,
    started,
)


def failed(floor: int, **more: Any) -> Fields:
    return owned("commit_failed", floor=floor, **more)


def reached(position: int | None = None, key: str = "a", **more: Any) -> Fields:
    if position is None:
        return owned("ahead_reached", **more)
    return message("ahead_reached", position, key, **more)


def flow(event: str, in_flight: int, size: int = 0) -> Fields:
    return {"event": event, "in_flight": in_flight, "bytes": size}


THREE = [delivered(0, "a"), delivered(1, "b"), delivered(2, "c")]
BEFORE = [redelivered(position, "settled", key) for position, key in enumerate("abc")]
END = {"event": "end", "reason": "drained"}
OPEN = {"end": None}
DRAIN = owned("revoking", timeout=30.0)
PREFIX = [delivered(0, "a"), delivered(1, "b"), *ran(1, "b"), started(0, "a"), ended(0, "a", result="error")]
FULL = [
    at(110.0, DRAIN),
    at(120.0, delivered(1, partition="S/1")),
    at(140.0, message("abandoned", 0, "a"), owned("drained")),
]
CANCELLED = ended(1, "b", result="cancelled")

COMMITTING: list[Case] = [
    Case(
        make=CommitsRise,
        what="from where it began",
        keeps=[assigned(2), sent(2), confirmed(2), sent(4)],
        breaks=[assigned(2), sent(1)],
        witness="the floor fell from 2",
        checked=2,
    ),
    Case(
        make=OneCommitAtATime,
        what="answered first",
        keeps=[assigned(), sent(1), confirmed(1), sent(2), failed(2), sent(2)],
        breaks=[assigned(), sent(1), sent(2)],
        witness="committed while the commit of 1 (row 3) was under way",
        checked=3,
    ),
    Case(
        make=NoCommitAfterRevoke,
        what="lost",
        keeps=[assigned(), sent(1), owned("lost"), failed(1), assigned(0, assignment=2), sent(1, assignment=2)],
        breaks=[assigned(), owned("lost"), sent(1)],
        witness="committed after its assignment was lost",
    ),
    Case(
        make=NoCommitAfterRevoke,
        what="followed by another assignment",
        keeps=[assigned(), assigned(0, assignment=2), sent(1, assignment=2)],
        breaks=[assigned(), assigned(0, assignment=2), sent(1)],
        witness="committed in assignment 1, the newest is 2",
    ),
    Case(
        make=CommitsInTime,
        what="of a handler",
        rules=COMMITS,
        asks="commit_interval",
        more=OPEN,
        keeps=[assigned(), delivered(0), ran(0), at(105.9, sent(1)), at(130.0, END)],
        breaks=[assigned(), delivered(0), ran(0), at(102.0, delivered(1)), at(107.1, sent(1)), at(130.0, END)],
        witness="a finished message was not committed in time, 6.096 s late",
    ),
    Case(
        make=CommitsInTime,
        what="never, of a dead letter",
        rules=COMMITS,
        asks="commit_interval",
        more=OPEN,
        keeps=[assigned(), delivered(0), message("dlq_confirmed", 0), at(101.0, sent(1)), at(130.0, END)],
        breaks=[assigned(), delivered(0), message("dlq_confirmed", 0), at(102.0, delivered(1)), at(130.0, END)],
        witness="a finished message was not committed in time, 28.997 s late",
    ),
    Case(
        make=CommitsInTime,
        what="also messages that a predecessor had completed",
        rules=COMMITS,
        asks="commit_interval",
        more=OPEN,
        keeps=[assigned(), delivered(0), redelivered(0, "settled"), at(101.0, sent(1)), at(130.0, END)],
        breaks=[assigned(), delivered(0), redelivered(0, "settled"), at(102.0, delivered(1)), at(130.0, owned("lost"))],
        witness="a finished message was not committed in time, 28.997 s late",
    ),
    Case(
        make=CommitsInTime,
        what="when the one before is confirmed",
        rules=COMMITS,
        asks="commit_interval",
        more=OPEN,
        keeps=[assigned(), ran(0), sent(1), ran(1), at(140.0, confirmed(1)), at(141.0, sent(2)), at(150.0, END)],
        breaks=[assigned(), ran(0), sent(1), ran(1), at(140.0, confirmed(1)), at(150.0, sent(2), END)],
        witness="a finished message was not committed in time, 10.000 s late",
        checked=2,
    ),
    Case(
        make=UnknownCommitRepeated,
        what="within a second",
        more=OPEN,
        keeps=[assigned(), sent(1), failed(1), at(101.0, sent(1)), at(101.1, failed(1), DRAIN), at(130.0, END)],
        breaks=[assigned(), sent(1), failed(1), at(102.0, delivered(1)), at(130.0, END)],
        witness="a commit that had failed was not repeated, 28.997 s late",
    ),
    Case(
        make=MaxAhead,
        what="of the confirmed floor",
        rules={"max_ahead": 2},
        asks="max_ahead",
        keeps=[assigned(), THREE, ran(0, "a"), sent(1), confirmed(1), started(1, "b"), started(2, "c")],
        breaks=[assigned(), THREE, ran(0, "a"), sent(1), failed(1), started(1, "b"), started(2, "c")],
        witness="started 3 deliveries above the confirmed floor, max_ahead is 2",
        checked=3,
    ),
    Case(
        make=StallNamed,
        what="with the message that holds the floor",
        rules={"max_ahead": 3},
        asks="max_ahead",
        keeps=[assigned(), delivered(0, "a"), THREE[1:], reached(0), ran(1, "b")],
        breaks=[assigned(), delivered(0, "a"), THREE[1:], reached(1, "b"), ran(1, "b")],
        witness="named position 1 as the holder of the floor, it is position 0",
        checked=1,
    ),
    Case(
        make=StallNamed,
        what="before anything else happens",
        rules={"max_ahead": 3},
        asks="max_ahead",
        keeps=[assigned(), THREE, reached(0), ran(1, "b"), delivered(3, "d"), started(3, "d")],
        breaks=[assigned(), THREE, ran(1, "b"), reached(0)],
        witness="its partition reached max_ahead, and no row reports it",
    ),
    Case(
        make=StallNamed,
        what="without a message when all has finished",
        rules={"max_ahead": 3},
        asks="max_ahead",
        keeps=[assigned(), THREE[:2], ran(0, "a"), ran(1, "b"), THREE[2:], redelivered(2, "settled", "c"), reached()],
        breaks=[assigned(), THREE[:2], ran(0, "a"), ran(1, "b"), THREE[2:], reached()],
        witness="named no message as the holder of the floor, it is position 2",
    ),
    Case(
        make=StallNamed,
        what="without a message that waits for it",
        rules={"max_ahead": 3},
        asks="max_ahead",
        keeps=[assigned(), THREE, delivered(3, "d"), BEFORE, reached()],
        breaks=[assigned(), THREE, delivered(3, "d"), BEFORE, reached(3, "d")],
        witness="named position 3 as the holder of the floor, it is none",
    ),
    Case(
        make=StallNamed,
        what="again when it is reached again",
        rules={"max_ahead": 3},
        asks="max_ahead",
        keeps=[assigned(), THREE, reached(0), ran(0, "a"), sent(1), confirmed(1), owned("ahead_left"), started(1, "b")],
        breaks=[
            assigned(),
            THREE,
            *[reached(0), *ran(0, "a"), sent(1), confirmed(1), owned("ahead_left"), delivered(3, "d"), started(1, "b")],
        ],
        witness="its partition reached max_ahead, and no row reports it",
    ),
]

TWO = [delivered(0, "a"), delivered(1, "b")]
AGAIN = {"assignment": 2}

BOUNDED: list[Case] = [
    Case(
        make=PauseAtBounds,
        what="goes on at the low water mark",
        more={"max_in_flight": 20},
        keeps=[flow("paused", 20), flow("resumed", 15, 500)],
        breaks=[flow("paused", 20), flow("resumed", 16, 500)],
        witness="intake restarted with 16 of 20 messages and 500 of 1000 bytes in flight",
        checked=2,
    ),
    Case(
        make=PauseAtBounds,
        what="goes on above the low water mark after a while, if there is room",
        more={"max_in_flight": 20},
        keeps=[*at(1.0, flow("paused", 20)), *at(1.5, flow("resumed", 19, 999))],
        breaks=[*at(1.0, flow("paused", 20)), *at(1.5, flow("resumed", 20, 500))],
        witness="intake restarted with 20 of 20 messages and 500 of 1000 bytes in flight",
    ),
    Case(
        make=PauseAtBounds,
        what="goes on at a higher mark with a bound per partition",
        more={"max_in_flight": 20},
        rules={"max_in_flight_per_partition": 15},
        keeps=[flow("paused", 20), flow("resumed", 19, 500)],
        breaks=[flow("paused", 20), flow("resumed", 20, 500)],
        witness="intake restarted with 20 of 20 messages and 500 of 1000 bytes in flight",
    ),
    Case(
        make=PauseAtBounds,
        what="goes on at the low water mark of bytes",
        more={"max_in_flight": 20},
        keeps=[flow("paused", 3, 1000), flow("resumed", 1, 500)],
        breaks=[flow("paused", 3, 1000), flow("resumed", 1, 501)],
        witness="intake restarted with 1 of 20 messages and 501 of 1000 bytes in flight",
    ),
    Case(
        make=PauseAtBounds,
        what="stops at a bound",
        more={"max_in_flight": 20},
        keeps=[flow("paused", 20), handled(0), flow("resumed", 0)],
        breaks=[flow("paused", 19, 999), handled(0), flow("resumed", 0)],
        witness="intake stopped with 19 of 20 messages and 999 of 1000 bytes in flight",
    ),
    Case(
        make=PauseAtBounds,
        what="stops for completed messages, and goes on at once",
        more={"max_in_flight": 20},
        keeps=[delivered(0), redelivered(0, "settled"), flow("paused", 15), handled(1), flow("resumed", 0)],
        breaks=[delivered(0), redelivered(0, "held"), flow("paused", 15), handled(1), flow("resumed", 0)],
        witness="intake stopped with 15 of 20 messages and 0 of 1000 bytes in flight",
    ),
    Case(
        make=PauseAtBounds,
        what="one transition after the other",
        more={"max_in_flight": 20},
        keeps=[flow("paused", 20), flow("resumed", 0), flow("paused", 20)],
        breaks=[flow("paused", 20), flow("paused", 20)],
        witness="intake stopped a second time",
    ),
    Case(
        make=PauseAtBounds,
        what="goes on only where it had stopped",
        more={"max_in_flight": 20},
        keeps=[flow("paused", 20), flow("resumed", 0)],
        breaks=[flow("resumed", 0)],
        witness="intake restarted without a stop",
    ),
    Case(
        make=BoundedBytes,
        what="one batch above it",
        keeps=[delivered(0, "a", size=999), delivered(1, "b", size=999), started(0, "a"), started(1, "b")],
        breaks=[delivered(0, "a", size=999), delivered(1, "b", size=1), started(0, "a"), delivered(2, "c", size=1)],
        witness="received while 1000 bytes were in flight, max_in_flight_bytes is 1000",
        checked=2,
    ),
    Case(
        make=BoundedBytes,
        what="one message above it runs alone",
        keeps=[delivered(0, size=5000), ran(0), ack(0), delivered(1, size=5000)],
        breaks=[delivered(0, size=5000), ran(0), delivered(1, size=5000)],
        witness="received while 5000 bytes were in flight, max_in_flight_bytes is 1000",
    ),
    Case(
        make=PartitionBudgets,
        what="messages of a partition",
        rules={"max_in_flight_per_partition": 2},
        keeps=[TWO, delivered(2, "c", partition="S/1"), ran(0, "a"), ack(0, "a"), delivered(3, "d"), ran(3, "d")],
        breaks=[TWO, delivered(3, "d"), ran(0, "a"), ack(0, "a")],
        witness="3 of a partition in flight, max_in_flight_per_partition is 2",
    ),
    Case(
        make=PartitionBudgets,
        what="handlers of a partition",
        rules={"concurrency_per_partition": 1},
        keeps=[TWO, delivered(2, "c", partition="S/1"), started(0, "a"), started(2, "c", partition="S/1")],
        breaks=[TWO, delivered(2, "c", partition="S/1"), started(0, "a"), started(1, "b")],
        witness="2 handlers of its partition run, concurrency_per_partition is 1",
    ),
    Case(
        make=PartitionBudgets,
        what="messages of the partitions of a physical queue",
        rules={"max_in_flight_per_partition": 2, "queues_share_bounds": True},
        keeps=[*QUEUES, delivered(0, "a"), delivered(1, "b", partition="S/1"), delivered(2, "c", partition="T/0")],
        breaks=[*QUEUES, TWO, delivered(2, "c", partition="S/1")],
        witness="3 of a partition in flight, max_in_flight_per_partition is 2",
    ),
    Case(
        make=PartitionBudgets,
        what="messages of a drained partition do not count for its queue",
        rules={"max_in_flight_per_partition": 2, "queues_share_bounds": True},
        keeps=[*QUEUES, TWO, started(0, "a"), started(1, "b"), owned("drained"), delivered(2, "c", partition="S/1")],
        breaks=[*QUEUES, TWO, started(0, "a"), started(1, "b"), delivered(2, "c", partition="S/1")],
        witness="3 of a partition in flight, max_in_flight_per_partition is 2",
    ),
    Case(
        make=PartitionBudgets,
        what="handlers of the partitions of a physical queue",
        rules={"concurrency_per_partition": 1, "queues_share_bounds": True},
        keeps=[*QUEUES, TWO, delivered(2, "c", partition="T/0"), started(0, "a"), started(2, "c", partition="T/0")],
        breaks=[*QUEUES, TWO, delivered(2, "c", partition="S/1"), started(0, "a"), started(2, "c", partition="S/1")],
        witness="2 handlers of its partition run, concurrency_per_partition is 1",
    ),
    Case(
        make=PartitionBudgets,
        what="each partition alone, in a history of an earlier version",
        rules={"concurrency_per_partition": 1},
        keeps=[*QUEUES, TWO, delivered(2, "c", partition="S/1"), started(0, "a"), started(2, "c", partition="S/1")],
        breaks=[*QUEUES, TWO, delivered(2, "c", partition="S/1"), started(0, "a"), started(1, "b")],
        witness="2 handlers of its partition run, concurrency_per_partition is 1",
    ),
    Case(
        make=PartitionBudgets,
        what="also a handler that runs after its assignment",
        rules={"concurrency_per_partition": 1},
        keeps=[
            TWO,
            started(0, "a"),
            owned("lost"),
            ended(0, "a"),
            delivered(1, "b", **AGAIN),
            started(1, "b", **AGAIN),
        ],
        breaks=[TWO, started(0, "a"), owned("lost"), delivered(1, "b", **AGAIN), started(1, "b", **AGAIN)],
        witness="2 handlers of its partition run, concurrency_per_partition is 1",
    ),
    Case(
        make=PartitionBudgets,
        what="a batch is one call",
        rules={"concurrency_per_partition": 1, "batch": 2},
        keeps=[TWO, delivered(2, "c"), started(0, "a"), started(1, "b")],
        breaks=[TWO, delivered(2, "c"), started(0, "a"), started(1, "b"), started(2, "c")],
        witness="3 handlers of its partition run, concurrency_per_partition is 1, with batches of 2",
    ),
]

DRAINING: list[Case] = [
    Case(
        make=DrainStartsNothing,
        what="not even messages below",
        rules=COMMITS,
        keeps=[assigned(), THREE, started(2, "c"), DRAIN, ended(2, "c")],
        breaks=[assigned(), THREE, started(2, "c"), DRAIN, started(1, "b")],
        asks="batch, settles and hands_over",
        witness="started while its partition was drained",
        checked=1,
    ),
    Case(
        make=DrainStartsNothing,
        what="nothing above the prefix",
        rules=CLOSES,
        keeps=[assigned(), THREE, started(1, "b"), DRAIN, started(0, "a")],
        breaks=[assigned(), THREE, started(1, "b"), DRAIN, started(2, "c")],
        witness="started while its partition was drained",
    ),
    Case(
        make=DrainStartsNothing,
        what="the prefix is closed while there is time",
        rules=CLOSES,
        keeps=[assigned(), THREE, started(1, "b"), DRAIN, at(110.0, CANCELLED, started(0, "a"))],
        breaks=[assigned(), THREE, started(1, "b"), DRAIN, at(131.0, CANCELLED, started(0, "a"))],
        witness="started after the timeout of its drain had cancelled its handlers",
    ),
    Case(
        make=DrainStartsNothing,
        what="messages of a call that has ended",
        rules={"batch": 3},
        keeps=[assigned(), THREE, started(0, "a"), DRAIN, at(101.0, ended(0, "a"), ran(1, "b"))],
        breaks=[assigned(), THREE, started(0, "a"), DRAIN, at(101.0, ended(0, "a")), at(102.0, started(1, "b"))],
        witness="started while its partition was drained",
    ),
    Case(
        make=DrainStartsNothing,
        what="nothing after a loss",
        keeps=[delivered(0), started(0), ended(0), DRAIN, owned("lost")],
        breaks=[delivered(0), owned("lost"), started(0)],
        witness="started after its partition was lost",
    ),
    Case(
        make=DrainStartsNothing,
        what="nothing after a handover",
        keeps=[delivered(0), started(0), DRAIN, ended(0), owned("drained"), owned("revoked")],
        breaks=[delivered(0), DRAIN, owned("drained"), owned("revoked"), started(0)],
        witness="started after its partition was handed over",
    ),
    Case(
        make=DrainWaitsForRunning,
        what="and for nothing else",
        more=OPEN,
        keeps=[delivered(0), started(0), DRAIN, at(110.0, ended(0), owned("drained"))],
        breaks=[delivered(0), DRAIN, at(101.0, delivered(1, partition="S/1")), at(120.0, owned("drained"))],
        witness="drained when its last handler had ended, 19.998 s late",
        checked=1,
    ),
    Case(
        make=DrainWaitsForRunning,
        what="and for the prefix, which waits for a slot, but for no held lane",
        more=OPEN,
        rules=CLOSES,
        keeps=[*PREFIX, message("retry", 0, "a", delay=1.0), *FULL],
        breaks=[*PREFIX, message("retry", 0, "a", delay=90.0), *FULL],
        witness="drained when its last handler had ended, 30.000 s late",
    ),
    Case(
        make=DrainInTime,
        what="with one grace",
        asks="drain_timeout and grace",
        more=OPEN,
        keeps=[owned("revoking"), at(136.9, owned("drained"), owned("revoked"))],
        breaks=[owned("revoking"), at(133.0, delivered(1)), at(139.0, owned("drained"))],
        witness="drained 6.999 s late",
        checked=1,
    ),
    Case(
        make=DrainInTime,
        what="within its timeout, and handed over",
        asks="drain_timeout and grace",
        more=OPEN,
        keeps=[owned("revoking", timeout=5.0), at(112.0, owned("drained")), at(126.9, owned("revoked"))],
        breaks=[
            owned("revoking", timeout=5.0),
            at(112.0, owned("drained")),
            at(123.0, delivered(1, partition="S/1")),
            at(129.0, owned("revoked")),
        ],
        witness="handed over 6.999 s late",
    ),
    Case(
        make=DrainInTime,
        what="sooner when it is asked to",
        asks="drain_timeout and grace",
        more=OPEN,
        keeps=[DRAIN, at(101.0, owned("hastened", timeout=1.0)), at(108.0, owned("drained"))],
        breaks=[DRAIN, at(101.0, owned("hastened", timeout=1.0)), at(104.0, delivered(1)), at(110.0, owned("drained"))],
        witness="drained 6.000 s late",
    ),
    Case(
        make=HandedOverAfterDrain,
        what="none runs",
        rules={"drain_timeout": 30.0},
        asks="drain_timeout",
        keeps=[delivered(0), started(0), owned("revoking"), ended(0), owned("drained"), owned("revoked")],
        breaks=[delivered(0), started(0), owned("revoking"), owned("drained"), owned("revoked"), ended(0)],
        witness="drained 0.001 s after its drain began while 1 of its handlers ran; its timeout is 30 s",
        checked=1,
    ),
    Case(
        make=HandedOverAfterDrain,
        what="or the time is up",
        keeps=[delivered(0), started(0), DRAIN, at(130.0, owned("drained"), owned("revoked"))],
        breaks=[delivered(0), started(0), DRAIN, at(120.0, owned("drained"), owned("revoked"))],
        witness="drained 19.997 s after its drain began while 1 of its handlers ran; its timeout is 30 s",
    ),
    Case(
        make=HandedOverAfterDrain,
        what="drained at all",
        keeps=[assigned(), DRAIN, owned("drained"), owned("revoked")],
        breaks=[assigned(), DRAIN, owned("revoked")],
        witness="handed over before it was drained",
    ),
]
