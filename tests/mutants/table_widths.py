"""Mutants of partitioned queues, found by the campaign that changes their widths."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tests.mutants import Mutant

_ON_BOTH: Final = (
    Mutant(
        "queue_hash_of_the_lanes",
        "lanes.core.queue_hash",
        "    return jump(queue_digest(key), partitions)",
        '    return __import__("lanes.core.ring", fromlist=["lane"]).lane(key, partitions)',
        "the hash of the queue is the hash of the lanes, so each partition uses one lane",
        "kafka_widths",
        ("EveryLane",),
    ),
    Mutant(
        "queue_hash_without_jumps",
        "lanes.core.queue_hash",
        "    return jump(queue_digest(key), partitions)",
        "    return queue_digest(key) % partitions if partitions < 8 else (queue_digest(key) + 1) % partitions",
        "a larger width moves keys between partitions that both widths have",
        "kafka_widths",
        ("OnlyMovedKeys",),
    ),
    Mutant(
        "last_topic_not_read",
        "lanes.queues.registered",
        "for number, name in enumerate(queue.names)}",
        "for number, name in enumerate(queue.names[:-1] or queue.names)}",
        "a consumer does not read the last partition of its queue",
        "kafka_widths",
        ("NothingStranded", "CaughtUp"),
    ),
    Mutant(
        "alarm_never_fires",
        "lanes.queues.stranded",
        "fact.unfinished.get(group, 0) > 0 and",
        "fact.unfinished.get(group, 0) < 0 and",
        "the alarm finds no stranded message",
        "kafka_widths",
        ("AlarmNames",),
    ),
    Mutant(
        "growth_unnoticed",
        "lanes.queues.stranded",
        "min(2 * queue.partitions, MOST_PARTITIONS)",
        "min(queue.partitions, MOST_PARTITIONS)",
        "workers do not look beyond their own width, so they do not notice that the producers' width has grown",
        "kafka_widths",
        ("AlarmNames",),
    ),
    Mutant(
        "retired_topics_unnoticed",
        "lanes.queues.stranded",
        "    retired = {number: name for name in known if",
        "    retired = {number: name for name in () if",
        "workers do not look in the topics of a former width that is more than twice their own",
        "kafka_widths",
        ("AlarmNames",),
        first=74,
    ),
)

_BUDGETS: Final = (
    Mutant(
        "budget_of_each_kafka_partition",
        "lanes.core.policy",
        "return partition.source if partition.source in self.queues else partition",
        "return partition",
        "the bounds per partition count each Kafka partition of a topic, and not the physical queue",
        "kafka_widths",
        ("PartitionBudgets",),
        machine=("budgets", "the_room_keeps_the_bound", "everything_holds", "take"),
    ),
    Mutant(
        "kafka_partitions_of_a_queue_take_no_turns",
        "lanes.core.fair_queue",
        "            self._heads[name] = heads\n        self._count -= 1",
        "            self._heads = {name: heads, **self._heads}\n        self._count -= 1",
        "a Kafka partition with many heads starves the others of its topic",
        "kafka_widths",
        ("PartitionTurns",),
        machine=("budgets", "no_partition_of_a_queue_waits_for_two_calls_of_another"),
        first=54,
    ),
    Mutant(
        "full_queue_takes_a_new_kafka_partition",
        "lanes.core.partition_budgets",
        "full_queues=queues)",
        "full_queues=frozenset())",
        "a Kafka partition that is assigned during a delivery exceeds the bound of its topic",
        "budgets",
        ("the_room_keeps_the_bound",),
    ),
)

_FIRST_ON_JETSTREAM: Final = {"retired_topics_unnoticed": 37}

WIDTHS: Final = (
    *_ON_BOTH,
    *(
        replace(
            each,
            name=f"{each.name}_on_jetstream",
            campaign="jetstream_widths",
            first=_FIRST_ON_JETSTREAM.get(each.name, 0),
        )
        for each in _ON_BOTH
    ),
    *_BUDGETS,
)
