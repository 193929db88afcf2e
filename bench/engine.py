"""The engine alone: receive, take, finish, collect and settled, in microseconds of CPU a message.

Like busy workers, the driver takes as many messages as ``concurrency`` allows before it finishes the first message. The
driver settles after every ``settle_every`` deliveries. The figure includes the loops of the driver, but not the time to
make the messages. The baseline is a fixed loop that adds each message to a dict and a queue and removes it. Every
consumer does at least this work.

The cases ``engine … ×`` divide the cost of a message among many messages by the cost among few. The ratio of a constant
cost is 1. Beyond ten thousand messages the processor's caches also affect the cost. The baseline beyond ten thousand
messages is therefore the growth of the bare loop over the same objects.

Cases that no default of `lanes` reaches are information without a goal: deliveries of a single message, and 10⁵ or more
messages in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final

from bench.figures import Effort, Figure, Run, cost, cpu_micros, interleaved
from bench.source import SIZE, Traffic, messages_of, new_partition, runs_of
from lanes.core.engine import Engine
from lanes.core.policy import Policy, RetryPolicy
from lanes.core.types import ACK, Message

GOAL: Final = 0.6
FLAT_GOAL: Final = 1.2
CONCURRENCY: Final = 100
FEW, MANY = 100, 10_000


@dataclass(frozen=True, kw_only=True)
class Case:
    """Traffic through the engine.

    Attributes:
        keys: Number of keys.
        batch: Number of messages in a delivery.
        count: Number of messages.
        traffic: Share of each key in the traffic.
        commits: Whether the engine has the ledger for a source that commits one position.
        settle_every: Number of deliveries between two settlements.
        stuck: Number of finished messages above the first message, whose handler never ends; None = every handler ends.
        in_flight: Number of delivered messages before the first call of ``take``.
        goal: Highest allowed cost in microseconds; None = the case is information.
    """

    keys: int = MANY
    batch: int = 500
    count: int = 100_000
    traffic: Traffic = "uniform"
    commits: bool = False
    settle_every: int = 1
    stuck: int | None = None
    in_flight: int = 0
    goal: float | None = GOAL


CASES: Final = {
    "engine uniform": Case(),
    "engine zipf": Case(traffic="zipf"),
    "engine hot key": Case(keys=1),
    "engine stuck": Case(stuck=MANY),
    "engine batch 50": Case(batch=50),
    "engine batch 1": Case(batch=1, count=50_000, settle_every=50, goal=None),
    "engine batch 1, settled alone": Case(batch=1, count=50_000, goal=None),
    "engine commits, uniform": Case(commits=True),
    "engine commits, zipf": Case(commits=True, traffic="zipf"),
    "engine commits, hot key": Case(commits=True, keys=1),
    "engine commits, stuck": Case(commits=True, stuck=MANY),
    "engine commits, batch 50": Case(commits=True, batch=50),
}

# Name of the figure → case with few messages, case with many messages
FLAT: Final = {
    "engine keys 10⁴ ×": (Case(keys=FEW), Case(keys=MANY)),
    "engine in flight 10⁴ ×": (Case(in_flight=FEW), Case(in_flight=MANY)),
    "engine completed above the floor 10⁴ ×": (Case(commits=True, stuck=FEW), Case(commits=True, stuck=MANY)),
}
GROWTH: Final = {"engine 10⁵ ×": 100_000, "engine 10⁶ ×": 1_000_000}


def figures(effort: Effort) -> list[Figure]:
    """Measure all cases and their baselines, interleaved."""
    runs: list[Run] = []
    for case in CASES.values():
        runs += [partial(in_dict_and_queue, case, effort), partial(in_engine, case, effort)]
    medians = interleaved(runs, effort.repeats)
    costs = [
        cost(name, "µs CPU/message", figure, baseline, case.goal)
        for (name, case), baseline, figure in zip(CASES.items(), medians[::2], medians[1::2], strict=True)
    ]
    return costs + _flat(effort) + _growth(effort)


def _flat(effort: Effort) -> list[Figure]:
    figures = []
    for name, (few, many) in FLAT.items():
        ratios = [in_engine(many, effort) / in_engine(few, effort) for _ in range(effort.repeats)]
        figures.append(cost(name, "times the cost among 10²", median(ratios), 1.0, FLAT_GOAL))
    return figures


def _growth(effort: Effort) -> list[Figure]:
    figures = []
    small = Case(keys=MANY, in_flight=MANY)
    for name, size in GROWTH.items():
        case = Case(keys=size, in_flight=size, count=size)
        engine = [in_engine(case, effort) / in_engine(small, effort) for _ in range(effort.repeats)]
        bare = [in_dict_and_queue(case, effort) / in_dict_and_queue(small, effort) for _ in range(effort.repeats)]
        figures.append(cost(name, "times the cost among 10⁴", median(engine), median(bare)))
    return figures


def in_engine(case: Case, effort: Effort) -> float:
    """Return microseconds of CPU a message."""
    policy = Policy(
        concurrency=CONCURRENCY,
        max_in_flight=max(2_000, 2 * case.in_flight),
        max_bytes=1 << 40,
        retry=RetryPolicy(5, 0.2, 30.0),
        poison="exit",
        order="key",
        keyless="any",
        lanes=0,
        max_ahead=10 * MANY + case.count,
        commit_interval=1.0,
        commit_count=5_000,
        knows_settled=True,
        keeps_attempts=False,
    )
    engine = Engine(policy)
    partition = new_partition(floor=0 if case.commits else None)
    engine.assign(partition)
    stuck = None if case.stuck is None else effort.messages(case.stuck)
    first = 0 if stuck is None else stuck + 1
    messages = messages_of(partition, first + effort.messages(case.count), case.keys, case.traffic)
    if stuck is not None:
        _stick(engine, messages[:first])
    runs = runs_of(messages[first:], case.batch)
    before = engine.settled_count
    ahead = max(1, effort.messages(case.in_flight) // case.batch) if case.in_flight else 1
    micros = cpu_micros(partial(drive, engine, runs, ahead, case.settle_every), len(messages) - first)
    assert engine.settled_count - before == len(messages) - first
    return micros


def _stick(engine: Engine, messages: Sequence[Message]) -> None:
    """Deliver these messages, and finish all of them except the first message."""
    messages[0].key = messages[0].lane = b"stuck"
    engine.receive(messages[0].partition, list(messages), SIZE * len(messages), 0.0)
    assert engine.take() is messages[0]
    while (message := engine.take()) is not None:
        engine.finish(message, ACK, 0.0)
    engine.settled(engine.collect(0.0))


def drive(engine: Engine, runs: Sequence[list[Message]], ahead: int = 1, settle_every: int = 1) -> None:
    """Pass all messages through the engine: deliver ``ahead`` runs, then handle the ready messages."""
    take, finish = engine.take, engine.finish
    running: list[Message] = []
    step = settle_every * len(runs[0])
    finished = 0
    for begin in range(0, len(runs), ahead):
        for run in runs[begin : begin + ahead]:
            engine.receive(run[0].partition, run, SIZE * len(run), 0.0)
        while (message := take()) is not None:
            running.append(message)
            while (message := take()) is not None:
                running.append(message)
            for message in running:
                finish(message, ACK, 0.0)
            finished += len(running)
            running.clear()
            if finished >= step:
                engine.settled(engine.collect(0.0))
                finished = 0
    engine.settled(engine.collect(0.0))


def in_dict_and_queue(case: Case, effort: Effort) -> float:
    """Return microseconds of CPU a message of the bare loop over the same messages."""
    count = effort.messages(case.count)
    runs = runs_of(messages_of(new_partition(), count, case.keys, case.traffic), case.batch)
    ahead = max(1, effort.messages(case.in_flight) // case.batch) if case.in_flight else 1
    return cpu_micros(partial(least, runs, ahead), count)


def least(runs: Sequence[list[Message]], ahead: int = 1) -> None:
    """Add each message to a dict by position and to a queue, and remove it."""
    known: dict[int, Message] = {}
    queue: deque[Message] = deque()
    for begin in range(0, len(runs), ahead):
        for run in runs[begin : begin + ahead]:
            for message in run:
                known[message.position] = message
                queue.append(message)
        while queue:
            message = queue.popleft()
            del known[message.position]
