"""The keys of one partition reach every lane, with each broker's partitioner and with a partitioned queue.

A pair of hashes that are correlated fails the same check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest

from lanes.core.queue_hash import queue_partition
from lanes.core.ring import lane, partition, slot
from lanes_jetstream.cohort.partitioning import partition_of
from lanes_kafka.partitioners import crc32_partition, murmur2_partition
from tests.core.test_ring import DEVIATIONS, chi_square_deviation

Hash = Callable[[bytes, int], int]

SIZES = (2, 4, 8, 16)
KEYS = [b"customer-%d" % number for number in range(4_000)]


def fnv64(key: bytes, count: int) -> int:
    """FNV-1a with 64 bits, whose low bits follow from the low bits of FNV-1a with 32 bits."""
    value = 0xCBF29CE484222325
    for byte in key:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value % count


def fnv32(key: bytes, count: int) -> int:
    return partition_of([key.decode()], count)


PARTITIONERS: dict[str, Hash] = {
    "murmur2, Java clients": murmur2_partition,
    "CRC-32, librdkafka": crc32_partition,
    "FNV-1a-32, NATS": fnv32,
    "partitioned queue": queue_partition,
}
# A queue partition may be a topic or a stream with partitions of its own, so these have to be reached as well.
BELOW_A_QUEUE: dict[str, Hash] = {
    "murmur2, Java clients": murmur2_partition,
    "CRC-32, librdkafka": crc32_partition,
    "FNV-1a-32, NATS": fnv32,
    "ring partition": partition,
    "slots": lambda key, count: slot(key) * count // 65_536,
}
# No partitioner may be paired with one of these as lanes; the pairs show that the check finds what it is for.
CORRELATED: dict[str, tuple[Hash, Hash]] = {
    "one hash twice": (murmur2_partition, murmur2_partition),
    "the queue's hash as lanes": (queue_partition, queue_partition),
    "FNV-1a of two lengths": (fnv32, fnv64),
}


@cache
def places(hash_: Hash, count: int) -> Sequence[int]:
    return [hash_(key, count) for key in KEYS]


def unreached(outer: Hash, inner: Hash, partitions: int, lanes: int) -> set[tuple[int, int]]:
    """The lanes of each partition that no key of that partition reaches."""
    found = set(zip(places(outer, partitions), places(inner, lanes), strict=True))
    return {(one, other) for one in range(partitions) for other in range(lanes)} - found


@pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)
def test_the_keys_of_one_partition_reach_every_lane(partitioner: Hash) -> None:
    for partitions in SIZES:
        for lanes in SIZES:
            assert unreached(partitioner, lane, partitions, lanes) == set(), (partitions, lanes)


@pytest.mark.parametrize("below", BELOW_A_QUEUE.values(), ids=BELOW_A_QUEUE)
def test_the_keys_of_one_queue_partition_reach_every_partition_below_it(below: Hash) -> None:
    for partitions in SIZES:
        for lanes in SIZES:
            assert unreached(queue_partition, below, partitions, lanes) == set(), (partitions, lanes)


def test_lanes_fill_evenly_in_each_queue_partition() -> None:
    for count in SIZES:
        pairs = zip(places(queue_partition, count), places(lane, count), strict=True)
        assert chi_square_deviation((one * count + other for one, other in pairs), count**2) < DEVIATIONS


@pytest.mark.parametrize("pair", CORRELATED.values(), ids=CORRELATED)
def test_two_hashes_without_separate_domains_leave_lanes_empty(pair: tuple[Hash, Hash]) -> None:
    for count in SIZES:
        missed = unreached(*pair, count, count)
        # Each partition reaches one lane.
        assert len(missed) == count * (count - 1)
