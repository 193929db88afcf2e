"""Inputs and outputs of the tests of transactions, and their judge, who reads committed outputs only."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

from tests.kafka.workload import QUIET, Topic


def fill(topic: Topic, messages: int, keys: int, start: int = 0) -> None:
    """Write messages with the values ``start`` … in rising order within each key."""
    # Without idempotence, a retry of the producer could change the order of the inputs.
    producer = Producer({**QUIET, "bootstrap.servers": topic.url, "enable.idempotence": True})
    for number in range(start, start + messages):
        while True:
            try:
                producer.produce(topic.name, key=f"k{number % keys}", value=str(number))
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(60) == 0


class Verdict(NamedTuple):
    """What a reader of committed outputs sees."""

    lost: list[int]
    repeated: dict[int, int]
    disordered: list[tuple[bytes, int, int]]


def judged(topic: Topic, expected: range) -> Verdict:
    """Read the whole output topic under ``read_committed``, and compare it with the expected values."""
    seen: Counter[int] = Counter()
    of_key: defaultdict[bytes, list[int]] = defaultdict(list)
    config: dict[str, Any] = {"group.id": "judge", "isolation.level": "read_committed", "enable.auto.commit": False}
    consumer = Consumer({**QUIET, "bootstrap.servers": topic.url, **config, "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic.name, one, OFFSET_BEGINNING) for one in range(topic.partitions)])
    open_partitions = set(range(topic.partitions))
    while open_partitions:
        for message in consumer.consume(1_000, 0.2):
            error = message.error()
            if error is not None:
                assert error.name() == "_PARTITION_EOF", error
                open_partitions.discard(message.partition() or 0)
                continue
            value, key = int(message.value() or b""), message.key()
            assert isinstance(key, bytes)
            seen[value] += 1
            of_key[key].append(value)
    consumer.close()
    disordered = [
        (key, before, after) for key, values in of_key.items() for before, after in pairwise(values) if before >= after
    ]
    return Verdict(
        [each for each in expected if not seen[each]],
        {each: count for each, count in seen.items() if count > 1},
        disordered,
    )
