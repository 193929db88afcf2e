"""Cases of the checkers of order, ownership, outcomes, retries and redeliveries."""

from __future__ import annotations

from typing import Any

from memsource.checkers import (
    AttemptsCount,
    DeliveredThenStarted,
    KeptAlive,
    LaneProgress,
    OneTerminalOutcome,
    OutputsAtLeastOnce,
    PartitionTurns,
    RedeliveryNotRun,
    RetryHoldsLane,
    ZombiesDoNotCount,
)
from tests.memsource.checkers.cases import COMMITS, Case
from tests.memsource.checkers.rows import (
    QUEUES,
    Fields,
    Rows,
    ack,
    assigned,
    at,
    delivered,
    ended,
    handled,
    key_hash,
    message,
    owned,
    ran,
    redelivered,
    sent,
    started,
)


def abandoned(position: int, key: str | None = "k", **more: Any) -> Fields:
    return message("abandoned", position, key, **more)


def zombie(position: int, key: str | None = "k", **more: Any) -> Fields:
    return message("zombie", position, key, **more)


def failed(position: int, key: str | None = "k", **more: Any) -> Fields:
    return ended(position, key, result="error", **more)


def retry(position: int, delay: float = 0.0, key: str | None = "k", **more: Any) -> Fields:
    return message("retry", position, key, delay=delay, **more)


def extended(*runs: list[int]) -> Fields:
    return owned("extended", runs=list(runs))


def drained(*before: Fields) -> Rows:
    return [owned("revoking"), *before, owned("drained"), owned("revoked")]


def done(position: int, key: str | None = "k") -> Rows:
    return [delivered(position, key), *ran(position, key)]


def published(position: int, key: str | None = "k") -> Rows:
    """A handler that has left an output, and its confirmation."""
    publishing = message("publishing", position, key, count=1)
    return [started(position, key), ended(position, key, result="outputs"), publishing, message("published", position)]


END = {"event": "end", "reason": "drained"}
OPEN = {"end": None}
CANCELLED: Rows = [delivered(0), started(0), *at(102.0, ended(0, result="cancelled"))]
UNBLOCKED = {"event": "unblocked", "key": key_hash("k"), "count": 1}
AGAIN = {"assignment": 2}

TURNS = [[delivered(position, str(position)), *ran(position, str(position)), ack(position)] for position in range(1, 5)]

ELSEWHERE = {"partition": "S/1"}
OTHERS: list[Rows] = [
    [delivered(position, str(position), **ELSEWHERE), *ran(position, str(position), **ELSEWHERE)]
    for position in range(1, 5)
]
OTHERS_OF_QUEUES: list[Rows] = [
    [delivered(position, str(position), **where), *ran(position, str(position), **where)]
    for position, where in enumerate([{"partition": "T/0"}, {"partition": "T/1"}, {"partition": "T/0"}], 1)
]
r"""Messages of the partitions of another physical queue; see \`\`QUEUES\`\`."""
OUTLIVED = [delivered(0, "a"), started(0, "a"), owned("lost"), delivered(0, "a", **AGAIN)]
COMPLETED = [*OUTLIVED, delivered(1, "a", **AGAIN), redelivered(0, "settled", "a", **AGAIN)]
OUTLIVES_NO_MORE = [ended(0, "a"), zombie(0, "a")]

LANES: list[Case] = [
    Case(
        make=OutputsAtLeastOnce,
        what="an acknowledgement waits for the confirmation of the outputs",
        keeps=[delivered(0), published(0), ack(0)],
        breaks=[delivered(0), published(0)[:-1], ack(0)],
        witness="settled while its outputs were not confirmed",
        checked=1,
    ),
    Case(
        make=OutputsAtLeastOnce,
        what="a commit waits for the confirmation of the outputs",
        keeps=[assigned(floor=0), delivered(0), published(0), sent(1)],
        breaks=[assigned(floor=0), delivered(0), published(0)[:-1], sent(1)],
        witness="settled while its outputs were not confirmed",
        rules=COMMITS,
    ),
    Case(
        make=DeliveredThenStarted,
        what="a held message",
        asks="order and keyless",
        keeps=[delivered(0), started(0), failed(0), started(0, attempt=2), ended(0), delivered(1), started(1)],
        breaks=[delivered(0), ran(0), started(0)],
        witness="started, although it was never delivered, had finished or was given up",
        checked=3,
    ),
    Case(
        make=DeliveredThenStarted,
        what="a redelivered message is held once",
        asks="order and keyless",
        keeps=[delivered(0), delivered(0), redelivered(0, "held"), ran(0)],
        breaks=[delivered(0), ran(0), ack(0), delivered(0), redelivered(0, "settled"), started(0)],
        witness="started, although it was never delivered, had finished or was given up",
    ),
    Case(
        make=DeliveredThenStarted,
        what="keyless messages in one lane",
        rules={"keyless": "one_lane"},
        keeps=[delivered(0, None), delivered(1, "a"), delivered(2, None), ran(1, "a"), ran(0, None), ran(2, None)],
        breaks=[delivered(0, None), delivered(1, "a"), delivered(2, None), ran(1, "a"), started(2, None)],
        witness="started before position 0 of its lane (keyless) had ended for good",
    ),
    Case(
        make=DeliveredThenStarted,
        what="a whole partition",
        rules={"order": "partition"},
        keeps=[delivered(0, "a"), delivered(1, "b"), delivered(2, "c", partition="S/1"), ran(0, "a"), ran(1, "b")],
        breaks=[delivered(0, "a"), delivered(1, "b"), delivered(2, "c", partition="S/1"), ran(1, "b")],
        witness="started before position 0 of its lane (partition) had ended for good",
    ),
    Case(
        make=LaneProgress,
        what="its turn comes",
        asks="order, keyless, lanes and batch",
        more={"max_in_flight": 3},
        keeps=[delivered(0, "a"), *TURNS[:3], started(0, "a")],
        breaks=[delivered(0, "a"), *TURNS, started(0, "a")],
        witness="4 others started before it, the bound is 3",
        checked=4,
    ),
    Case(
        make=LaneProgress,
        what="also that of a successor",
        asks="order, keyless, lanes and batch",
        more={"max_in_flight": 3},
        keeps=[delivered(0, "a"), delivered(9, "a"), started(0, "a"), *TURNS, ended(0, "a"), started(9, "a")],
        breaks=[delivered(0, "a"), delivered(9, "a"), ran(0, "a"), *TURNS, started(9, "a")],
        witness="4 others started before it, the bound is 3",
    ),
    Case(
        make=LaneProgress,
        what="before the end",
        asks="order, keyless, lanes and batch",
        more={"max_in_flight": 3},
        keeps=[delivered(0, "a"), *TURNS[:3]],
        breaks=[delivered(0, "a"), *TURNS],
        witness="4 others started and it never did, the bound is 3",
    ),
    Case(
        make=LaneProgress,
        what="after a handler of an earlier assignment it waits for that",
        asks="order, keyless, lanes and batch",
        more={"max_in_flight": 3},
        keeps=[*OUTLIVED, *OTHERS, *OUTLIVES_NO_MORE, *OTHERS[:3], started(0, "a", **AGAIN)],
        breaks=[*OUTLIVED, *OUTLIVES_NO_MORE, *OTHERS, started(0, "a", **AGAIN)],
        witness="4 others started before it, the bound is 3",
    ),
    Case(
        make=LaneProgress,
        what="also a head after a message that was settled before",
        rules=COMMITS,
        asks="order, keyless, lanes and batch",
        more={"max_in_flight": 3},
        keeps=[*COMPLETED, *OTHERS, *OUTLIVES_NO_MORE, *OTHERS[:3], started(1, "a", **AGAIN)],
        breaks=[*COMPLETED, *OUTLIVES_NO_MORE, *OTHERS, started(1, "a", **AGAIN)],
        witness="4 others started before it, the bound is 3",
    ),
    Case(
        make=LaneProgress,
        what="with bounds per partition, before others of its partition",
        asks="order, keyless, lanes and batch",
        rules={"max_in_flight_per_partition": 3},
        more={"max_in_flight": 3},
        keeps=[delivered(0, "a"), *TURNS[:3], *OTHERS, started(0, "a")],
        breaks=[delivered(0, "a"), *TURNS, started(0, "a")],
        witness="4 others started before it, the bound is 3",
    ),
    Case(
        make=LaneProgress,
        what="unless the owner before gave its message up, and it is given up again",
        asks="order, keyless, lanes and batch",
        rules={"attempts_kept": True},
        more={"max_in_flight": 3},
        keeps=[delivered(0, "a"), delivered(9, "b"), message("blocked", 0, "a"), message("dlq_sent", 9, "b"), *TURNS],
        breaks=[delivered(0, "a"), delivered(9, "b"), message("dlq_sent", 9, "b"), *TURNS],
        witness="4 others started and it never did, the bound is 3",
    ),
    Case(
        make=PartitionTurns,
        what="its turn comes",
        asks="order, keyless, lanes and batch",
        rules={"concurrency_per_partition": 1},
        keeps=[delivered(0, "a"), *OTHERS[:2], started(0, "a")],
        breaks=[delivered(0, "a"), *OTHERS[:3], started(0, "a")],
        witness="3 starts of its partition while S/0 waits, the bound is 2",
        checked=2,
    ),
    Case(
        make=PartitionTurns,
        what="the turn of its physical queue comes",
        rules={"concurrency_per_partition": 1, "queues_share_bounds": True},
        keeps=[*QUEUES, delivered(0, "a"), *OTHERS_OF_QUEUES[:2], started(0, "a")],
        breaks=[*QUEUES, delivered(0, "a"), *OTHERS_OF_QUEUES, started(0, "a")],
        witness="3 starts of its partition while queue 0 of q waits, the bound is 2",
        checked=2,
    ),
    Case(
        make=PartitionTurns,
        what="its turn within its physical queue comes",
        rules={"concurrency_per_partition": 1, "queues_share_bounds": True},
        keeps=[*QUEUES, delivered(0, "a"), *OTHERS[:2], started(0, "a")],
        breaks=[*QUEUES, delivered(0, "a"), *OTHERS[:3], started(0, "a")],
        witness="3 starts of its partition while S/0 waits, the bound is 2",
        checked=2,
    ),
    Case(
        make=PartitionTurns,
        what="only if it has a free handler",
        rules={"concurrency_per_partition": 1},
        keeps=[delivered(0, "a"), delivered(9, "b"), started(0, "a"), *OTHERS],
        breaks=[delivered(0, "a"), delivered(9, "b"), ran(0, "a"), *OTHERS],
        witness="3 starts of its partition while S/0 waits, the bound is 2",
    ),
    Case(
        make=PartitionTurns,
        what="a batch is one call",
        rules={"concurrency_per_partition": 1, "batch": 1},
        keeps=[delivered(0, "a"), *OTHERS[:3]],
        breaks=[delivered(0, "a"), *OTHERS],
        witness="4 starts of its partition while S/0 waits, the bound is 3",
    ),
    Case(
        make=PartitionTurns,
        what="without concurrency_per_partition",
        rules={"max_in_flight_per_partition": 9},
        keeps=[delivered(0, "a"), delivered(9, "b"), started(0, "a"), *OTHERS[:2]],
        breaks=[delivered(0, "a"), delivered(9, "b"), started(0, "a"), *OTHERS],
        witness="3 starts of its partition while S/0 waits, the bound is 2",
    ),
    Case(
        make=AttemptsCount,
        what="one by one",
        asks="attempts",
        keeps=[delivered(0), started(0), failed(0), started(0, attempt=2), ended(0)],
        breaks=[delivered(0), started(0), failed(0), started(0, attempt=3)],
        witness="attempt 3 follows attempt 1",
        checked=2,
    ),
    Case(
        make=AttemptsCount,
        what="no more than are allowed, but those that were asked for",
        rules={"attempts": 1},
        asks="attempts",
        keeps=[started(0), failed(0), message("blocked", 0), UNBLOCKED, started(0, attempt=2)],
        breaks=[started(0), failed(0), started(0, attempt=2)],
        witness="attempt 2, attempts is 1",
    ),
    Case(
        make=AttemptsCount,
        what="without those that were cancelled",
        keeps=[started(0), ended(0, result="cancelled"), started(0), failed(0), started(0, attempt=2)],
        breaks=[started(0), ended(0, result="cancelled"), started(0, attempt=2)],
        witness="attempt 2 follows attempt 1",
    ),
    Case(
        make=AttemptsCount,
        what="where they are kept, the next owner goes on with them",
        rules={"attempts_kept": True},
        keeps=[started(0), failed(0), started(0, attempt=2), *drained(), started(0, "k", attempt=2, **AGAIN)],
        breaks=[started(0), failed(0), started(0, attempt=2), *drained(), started(0, "k", **AGAIN)],
        witness="attempt 1, attempt 2 was handed over",
    ),
    Case(
        make=AttemptsCount,
        what="where they are kept, the next owner skips none",
        rules={"attempts_kept": True},
        keeps=[started(0), failed(0), *drained(), started(0, "k", attempt=2, **AGAIN)],
        breaks=[started(0), failed(0), *drained(), started(0, "k", attempt=3, **AGAIN)],
        witness="attempt 3, the highest former attempt is 1",
    ),
    Case(
        make=AttemptsCount,
        what="where they are kept, the rows of a crashed owner may be missing",
        rules={"attempts_kept": True},
        keeps=[started(0), failed(0)],
        then=[started(0, "k", attempt=3)],
        breaks=[started(0), failed(0), started(0, attempt=3)],
        witness="attempt 3 follows attempt 1",
        then_breaks=[started(0, "k", attempt=1)],
        more={"end": None},
    ),
    Case(
        make=AttemptsCount,
        what="where they are kept, one more than are allowed",
        rules={"attempts": 1, "attempts_kept": True},
        keeps=[started(0, attempt=2), failed(0, attempt=2)],
        breaks=[started(0, attempt=2), failed(0, attempt=2), started(0, attempt=3)],
        witness="attempt 3, attempts is 1",
    ),
    Case(
        make=RetryHoldsLane,
        what="its successors wait",
        asks="order, keyless, backoff and max_backoff",
        keeps=[
            started(0),
            failed(0),
            retry(0),
            started(5, "x"),
            started(0, attempt=2),
            ended(0, attempt=2),
            started(1),
        ],
        breaks=[started(0), failed(0), retry(0), started(1)],
        witness="started while position 0 of its lane was held for a retry",
        checked=1,
    ),
    Case(
        make=RetryHoldsLane,
        what="no sooner than its backoff says",
        asks="order, keyless, backoff and max_backoff",
        keeps=[started(0), at(101.0, failed(0)), retry(0, 0.2), at(101.2, started(0, attempt=2))],
        breaks=[started(0), at(101.0, failed(0)), retry(0, 0.2), at(101.1, started(0, attempt=2))],
        witness="started 0.100000 s before its backoff was over",
    ),
    Case(
        make=RetryHoldsLane,
        what="a backoff that the policy allows",
        asks="order, keyless, backoff and max_backoff",
        keeps=[failed(0), retry(0, 0.2), failed(1), retry(1, 0.4, attempt=2), failed(2), retry(2, 9.0, asked=1)],
        breaks=[failed(0), retry(0, 0.3)],
        witness="held for 0.3 s after attempt 1, the policy allows 0.2 s",
    ),
    Case(
        make=RetryHoldsLane,
        what="a blocked one stays until it is unblocked",
        asks="order and keyless",
        keeps=[failed(0), message("blocked", 0), started(5, "x"), UNBLOCKED, started(0, attempt=2)],
        breaks=[failed(0), message("blocked", 0), started(5, "x"), started(0, attempt=2)],
        witness="started though it was blocked",
    ),
    Case(
        make=RetryHoldsLane,
        what="or until it is parked",
        asks="order and keyless",
        keeps=[failed(0), message("blocked", 0), message("dlq_sent", 0), message("dlq_confirmed", 0), started(1)],
        breaks=[failed(0), message("blocked", 0), started(1)],
        witness="started while position 0 of its lane was blocked",
    ),
]

OUTCOMES: list[Case] = [
    Case(
        make=OneTerminalOutcome,
        what="finished once",
        keeps=[delivered(0), ran(0), ack(0), ack(0), drained()],
        breaks=[delivered(0), ran(0), ended(0), ack(0), drained()],
        witness="finished, although it had finished before, was given up, or was never delivered",
        checked=1,
    ),
    Case(
        make=OneTerminalOutcome,
        what="finished or given up",
        rules=COMMITS,
        keeps=[assigned(), delivered(0), delivered(1, "b"), ran(0), drained(abandoned(1, "b"))],
        breaks=[assigned(), delivered(0), delivered(1, "b"), ran(0), drained(abandoned(0), abandoned(1, "b"))],
        witness="given up, although it had finished, was given up before, or was never delivered",
    ),
    Case(
        make=OneTerminalOutcome,
        what="nothing is left",
        keeps=[delivered(0), drained(abandoned(0))],
        breaks=[delivered(0), drained()],
        witness="handed over with its partition: neither handled nor abandoned",
    ),
    Case(
        make=OneTerminalOutcome,
        what="a redelivery that was settled has none",
        keeps=[handled(0), delivered(0), redelivered(0, "settled"), ack(0), drained()],
        breaks=[handled(0), delivered(0), redelivered(0, "late"), drained()],
        witness="handed over with its partition: neither handled nor abandoned",
    ),
    Case(
        make=ZombiesDoNotCount,
        what="they are counted",
        keeps=[delivered(0), started(0), owned("lost"), ended(0), zombie(0)],
        breaks=[delivered(0), started(0), owned("lost"), ended(0)],
        witness="ended after the fence and was not counted as a zombie",
        checked=1,
    ),
    Case(
        make=ZombiesDoNotCount,
        what="they are not acknowledged",
        keeps=[delivered(0), started(0), owned("drained"), ended(0), zombie(0), ack(1)],
        breaks=[delivered(0), started(0), owned("drained"), ended(0), zombie(0), ack(0)],
        witness="acknowledged, though its handler ended after the fence",
    ),
    Case(
        make=ZombiesDoNotCount,
        what="they are not committed",
        keeps=[delivered(0), started(0), owned("drained"), ended(0), zombie(0), sent(0)],
        breaks=[delivered(0), started(0), owned("drained"), ended(0), zombie(0), sent(1)],
        witness="1 was committed past this message, although its handler ended after the fence",
    ),
    Case(
        make=RedeliveryNotRun,
        what="not beside itself",
        keeps=[delivered(0), started(0), delivered(0), redelivered(0, "held"), ended(0)],
        breaks=[delivered(0), started(0), delivered(0), redelivered(0, "held"), started(0)],
        witness="started while it was running in the same assignment",
        checked=1,
    ),
    Case(
        make=RedeliveryNotRun,
        what="not after its end",
        keeps=[handled(0), delivered(0), redelivered(0, "settled"), ack(0), owned("lost"), started(0, assignment=2)],
        breaks=[handled(0), delivered(0), redelivered(0, "late"), started(0)],
        witness="started again after it had finished in the same assignment",
    ),
    Case(
        make=KeptAlive,
        what="queued ones too",
        rules={"extend_interval": 2.0},
        asks="extend_interval",
        more=OPEN,
        keeps=[
            delivered(0),
            delivered(1),
            delivered(2),
            *at(106.9, extended([0, 2])),
            *at(113.0, extended([0, 0], [2, 2]), ack(1)),
            *at(114.0, abandoned(0), ack(2), END),
        ],
        breaks=[delivered(0), delivered(1), *at(103.0, extended([0, 0])), *at(109.0, extended([0, 1]))],
        witness="held without an extension, 6.998 s late",
        checked=5,
    ),
    Case(
        make=KeptAlive,
        what="and those that were cancelled with the rest of their batch",
        rules={"extend_interval": 2.0, "batch": 3},
        asks="extend_interval",
        more=OPEN,
        keeps=[*CANCELLED, *at(106.0, extended([0, 0])), *at(112.0, started(0), extended([0, 0]), END)],
        breaks=[*CANCELLED, *at(103.0, handled(5)), *at(110.0, ran(0), ack(0), END)],
        witness="held without an extension, 7.999 s late",
        checked=2,
    ),
    Case(
        make=KeptAlive,
        what="also before they start again",
        rules={"extend_interval": 2.0, "batch": 3},
        asks="extend_interval",
        more=OPEN,
        keeps=[*CANCELLED, *at(106.0, extended([0, 0]), END)],
        breaks=[*CANCELLED, *at(103.0, handled(5)), *at(110.0, extended([0, 0]), END)],
        witness="held without an extension, 7.999 s late",
        checked=1,
    ),
    Case(
        make=KeptAlive,
        what="until it is drained",
        rules={"extend_interval": 2.0},
        asks="extend_interval",
        more=OPEN,
        keeps=[delivered(0), at(107.0, owned("drained")), at(150.0, ack(0), END)],
        breaks=[delivered(0), at(103.0, delivered(1)), at(110.0, owned("drained")), at(150.0, END)],
        witness="held without an extension, 7.999 s late",
    ),
    Case(
        make=KeptAlive,
        what="not a settled message",
        rules={"extend_interval": 2.0},
        asks="extend_interval",
        more=OPEN,
        keeps=[handled(0), delivered(0), redelivered(0, "settled"), at(150.0, owned("drained"), END)],
        breaks=[handled(0), delivered(0), at(103.0, redelivered(0, "late")), at(150.0, owned("drained"), END)],
        witness="held without an extension, 47.995 s late",
    ),
]
