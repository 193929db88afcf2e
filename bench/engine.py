"""The engine alone: receive, take, finish, collect and settled, in microseconds of CPU a message.

The driver takes as many messages as ``concurrency`` allows before it finishes any, as busy workers would, and
settles once a batch. Its loops are part of the figure; making the messages is not. The baseline is a fixed loop over
the same messages that enters each into a dict and a queue and takes it out again: the least any consumer does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final

from bench.figures import Effort, Figure, Run, cost, cpu_micros, interleaved
from bench.source import SIZE, messages_of, new_partition, runs_of
from lanes.core.engine import Engine
from lanes.core.policy import Policy
from lanes.core.retry import RetryPolicy
from lanes.core.types import ACK, Message

GOAL: Final = 0.6
CONCURRENCY: Final = 100

# case -> keys, batch, messages
CASES: Final = {
    "engine uniform": (10_000, 500, 100_000),
    "engine hot key": (1, 500, 100_000),
    "engine batch 1": (10_000, 1, 50_000),
}


def figures(effort: Effort) -> list[Figure]:
    """All cases and their baselines, interleaved."""
    runs: list[Run] = []
    for keys, batch, messages in CASES.values():
        count = effort.messages(messages)
        runs += [partial(_baseline, keys, batch, count), partial(_engine, keys, batch, count)]
    medians = interleaved(runs, effort.repeats)
    return [
        cost(case, "µs CPU/message", figure, baseline, GOAL)
        for case, baseline, figure in zip(CASES, medians[::2], medians[1::2], strict=True)
    ]


def _engine(keys: int, batch: int, count: int) -> float:
    policy = Policy(concurrency=CONCURRENCY, max_in_flight=2_000, max_bytes=1 << 26, retry=RetryPolicy(5, 0.2, 30.0))
    engine = Engine(policy)
    partition = new_partition()
    engine.assign(partition)
    runs = runs_of(messages_of(partition, count, keys), batch)
    micros = cpu_micros(partial(drive, engine, runs), count)
    assert (engine.settled_count, engine.flow.in_flight) == (count, 0)
    return micros


def drive(engine: Engine, runs: Sequence[list[Message]]) -> None:
    """Bring all messages through the engine."""
    take, finish = engine.take, engine.finish
    running: list[Message] = []
    for run in runs:
        engine.receive(run[0].partition, run, SIZE * len(run), 0.0)
        while (message := take()) is not None:
            running.append(message)
            while (message := take()) is not None:
                running.append(message)
            for message in running:
                finish(message, ACK, 0.0)
            running.clear()
        engine.settled(engine.collect(0.0))


def _baseline(keys: int, batch: int, count: int) -> float:
    runs = runs_of(messages_of(new_partition(), count, keys), batch)
    return cpu_micros(partial(least, runs), count)


def least(runs: Sequence[list[Message]]) -> None:
    """Enter each message into a dict by position and a queue, and take it out again."""
    known: dict[int, Message] = {}
    queue: deque[Message] = deque()
    for run in runs:
        for message in run:
            known[message.position] = message
            queue.append(message)
        while queue:
            message = queue.popleft()
            del known[message.position]
