"""Mutants of partitioned queues, found by the campaign that changes their widths."""

from __future__ import annotations

from typing import Final

from tests.mutants import Mutant

WIDTHS: Final = (
    Mutant(
        "queue_hash_of_the_lanes",
        "lanes.core.queue_hash",
        "    return jump(queue_digest(key), partitions)",
        '    return __import__("lanes.core.ring", fromlist=["lane"]).lane(key, partitions)',
        "the hash of the queue is the hash of the lanes, so each partition uses one lane",
        "widths",
        ("EveryLane",),
    ),
    Mutant(
        "queue_hash_without_jumps",
        "lanes.core.queue_hash",
        "    return jump(queue_digest(key), partitions)",
        "    return queue_digest(key) % partitions if partitions < 8 else (queue_digest(key) + 1) % partitions",
        "a larger width moves keys between partitions that both widths have",
        "widths",
        ("OnlyMovedKeys",),
    ),
    Mutant(
        "last_topic_not_read",
        "lanes.queues.registered",
        "for number, name in enumerate(queue.names)}",
        "for number, name in enumerate(queue.names[:-1] or queue.names)}",
        "a consumer does not read the last partition of its queue",
        "widths",
        ("NothingStranded", "CaughtUp"),
    ),
    Mutant(
        "alarm_never_fires",
        "lanes.queues.stranded",
        "fact.unfinished.get(group, 0) > 0 and",
        "fact.unfinished.get(group, 0) < 0 and",
        "the alarm finds no stranded message",
        "widths",
        ("AlarmNames",),
    ),
    Mutant(
        "growth_unnoticed",
        "lanes.queues.stranded",
        "min(2 * queue.partitions, MOST_PARTITIONS)",
        "min(queue.partitions, MOST_PARTITIONS)",
        "workers do not look beyond their own width, so they do not notice that the producers' width has grown",
        "widths",
        ("AlarmNames",),
    ),
    Mutant(
        "retired_topics_unnoticed",
        "lanes.queues.stranded",
        "    retired = {number: name for name in known if",
        "    retired = {number: name for name in () if",
        "workers do not look in the topics of a former width that is more than twice their own",
        "widths",
        ("AlarmNames",),
    ),
)
