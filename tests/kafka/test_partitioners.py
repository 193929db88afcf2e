"""The partition of a key, as real producers compute it, and the detection of two kinds of producers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import pytest
from confluent_kafka import Producer
from hypothesis import given
from hypothesis import strategies as st

from lanes.history.writer import key_hash
from lanes_kafka.partitioners import (
    EVERY,
    FIRST,
    KEYS_LIMIT,
    LONGEST,
    Census,
    crc32_partition,
    murmur2,
    murmur2_partition,
)
from tests.components import KafkaServer
from tests.kafka.conftest import MakeTopic
from tests.kafka.workload import QUIET

# From the tests of the Java client, as signed 32-bit numbers.
JAVA = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}
KEYS = [
    b"a",
    b"ab",
    b"abc",
    b"abcd",
    b"abcde",
    b"customer-42",
    bytes(range(256)),
    b"\xff" * 7,
    b"\x80",
    "käse".encode(),
]


@pytest.mark.parametrize(("key", "signed"), JAVA.items())
def test_murmur2_equals_the_hash_of_the_java_client(key: bytes, signed: int) -> None:
    assert murmur2(key) == signed % 2**32
    assert murmur2_partition(key, 1_000) == (signed & 0x7FFFFFFF) % 1_000


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("murmur2", murmur2_partition),
        ("murmur2_random", murmur2_partition),
        ("consistent", crc32_partition),
        ("consistent_random", crc32_partition),
    ],
)
def test_a_producer_places_keys_as_computed(
    kafka: KafkaServer, topic: MakeTopic, name: str, ours: Callable[[bytes, int], int]
) -> None:
    there = topic(7)
    producer = Producer({**QUIET, "bootstrap.servers": kafka.url, "partitioner": name})
    found: dict[bytes | None, int | None] = {}
    for key in KEYS:
        producer.produce(
            there.name, key=key, on_delivery=lambda error, sent: found.update({sent.key(): sent.partition()})
        )
    assert producer.flush(20) == 0
    assert found == {key: ours(key, 7) for key in KEYS}


@given(st.binary(max_size=64), st.integers(1, 1_000))
def test_the_partition_of_a_key_is_below_the_number_of_partitions(key: bytes, partitions: int) -> None:
    assert 0 <= murmur2_partition(key, partitions) < partitions
    assert 0 <= crc32_partition(key, partitions) < partitions


@pytest.mark.parametrize("partitions", [0, -1])
def test_zero_partitions_are_refused(partitions: int) -> None:
    for place in (murmur2_partition, crc32_partition):
        with pytest.raises(ValueError, match=f"partitions={partitions}"):
            place(b"k", partitions)
    with pytest.raises(ValueError, match=f"partitions={partitions}"):
        Census(partitions)


def keys(count: int, seed: int = 1) -> list[bytes]:
    numbers = random.Random(seed)
    return [b"%d" % numbers.getrandbits(64) for _ in range(count)]


def look_at(census: Census, placed: Iterable[tuple[int, bytes | None]]) -> Census:
    runs: dict[int, list[bytes | None]] = {}
    for partition, key in placed:
        runs.setdefault(partition, []).append(key)
    for partition, run in runs.items():
        census.observe(partition, run, lambda key: key)
    return census


def by(place: Callable[[bytes, int], int], chosen: Sequence[bytes], partitions: int) -> list[tuple[int, bytes | None]]:
    return [(place(key, partitions), key) for key in chosen]


def only_by(place: Callable[[bytes, int], int], partitions: int) -> list[bytes]:
    """Keys that this kind of producer puts into partition 0, and the other kind does not."""
    both = (murmur2_partition, crc32_partition)
    return [key for key in keys(1_000) if [one(key, partitions) == 0 for one in both] == [one is place for one in both]]


@pytest.mark.parametrize("partitions", [2, 3, 8, 64])
def test_two_kinds_of_producers_are_found(partitions: int) -> None:
    many = keys(max(200, 50 * partitions))
    half = len(many) // 2
    census = look_at(
        Census(partitions),
        by(murmur2_partition, many[:half], partitions) + by(crc32_partition, many[half:], partitions),
    )
    assert census.mixed
    assert census.neither == 0
    assert min(census.murmur2, census.crc32, census.both) > 0


def test_a_few_keys_of_the_other_kind_are_enough() -> None:
    placed = by(murmur2_partition, keys(400), 8)
    assert not look_at(Census(8), placed).mixed
    assert look_at(Census(8), placed + by(crc32_partition, keys(16, seed=2), 8)).mixed


@pytest.mark.parametrize("partitions", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("place", [murmur2_partition, crc32_partition])
def test_one_kind_of_producers_is_not_mixed(place: Callable[[bytes, int], int], partitions: int) -> None:
    census = look_at(Census(partitions), by(place, keys(100 * partitions), partitions))
    assert not census.mixed
    assert census.report("T") is None


@given(st.integers(2, 64), st.integers(), st.integers(1, 2_000))
def test_a_third_partitioner_is_not_mixed(partitions: int, seed: int, count: int) -> None:
    numbers = random.Random(seed)
    census = look_at(Census(partitions), [(numbers.randrange(partitions), key) for key in keys(count, seed)])
    assert not census.mixed


def test_a_few_keys_placed_by_chance_are_not_mixed() -> None:
    java, c = only_by(murmur2_partition, 2), only_by(crc32_partition, 2)
    assert not look_at(Census(2), [(0, key) for key in java[:20] + c[:20]]).mixed
    assert look_at(Census(2), [(0, key) for key in java[:30] + c[:30]]).mixed


@pytest.mark.parametrize(("before", "now"), [(1, 2), (4, 8), (3, 6), (6, 64)])
@pytest.mark.parametrize("place", [murmur2_partition, crc32_partition])
def test_keys_placed_before_partitions_were_added_are_not_mixed(
    place: Callable[[bytes, int], int], before: int, now: int
) -> None:
    old, new = by(place, keys(90 * before), before), by(place, keys(100 * now, seed=2), now)
    assert not look_at(Census(now), old + new).mixed


def test_a_repeated_key_counts_once() -> None:
    # A third partitioner may place a few busy keys like one of the two kinds by chance.
    hot = [only_by(murmur2_partition, 8)[0], only_by(crc32_partition, 8)[0]]
    census = look_at(Census(8), [(0, key) for _ in range(500) for key in hot])
    assert (census.murmur2, census.crc32, census.mixed) == (1, 1, False)


def test_the_sample_is_the_first_of_each_partition_and_then_one_in_a_thousand() -> None:
    asked: list[int] = []

    def key(position: int) -> bytes:
        asked.append(position)
        return b"%d" % position

    end = FIRST + 3 * EVERY
    census = Census(4)
    for start in range(0, end, 7):
        census.observe(0, range(start, min(start + 7, end)), key)
    assert asked == [*range(FIRST), FIRST - 1 + EVERY, FIRST - 1 + 2 * EVERY, FIRST - 1 + 3 * EVERY]
    asked.clear()
    census.observe(1, range(end), key)
    assert len(asked) == FIRST + 3
    census.observe(1, (), key)


def test_the_census_does_not_depend_on_the_division_into_runs() -> None:
    placed = by(murmur2_partition, keys(5_000), 3)
    ones, whole = Census(3), look_at(Census(3), placed)
    for partition, key in placed:
        ones.observe(partition, (key,), lambda each: each)
    assert repr(ones) == repr(whole)


def test_missing_empty_and_long_keys_are_skipped() -> None:
    long = b"k" * (LONGEST + 1)
    census = look_at(Census(2), [(0, None), (0, b""), (0, long), (1, long)])
    assert repr(census) == "<Census of 2 partitions: 0 by murmur2, 0 by CRC-32, 0 by both, 0 by neither>"
    assert look_at(Census(1), [(0, long[1:])]).both == 1


def test_remembered_keys_are_bounded() -> None:
    partitions = 10**6  # so many partitions that all records are sampled and no key fits both kinds
    many = keys(3 * KEYS_LIMIT)
    census = look_at(Census(partitions), by(murmur2_partition, many, partitions))
    assert census.murmur2 == len(many)
    assert len(census._keys) <= KEYS_LIMIT


def test_a_report_names_one_key_of_each_kind_by_its_hash() -> None:
    many = [key for key in keys(400) if murmur2_partition(key, 8) != crc32_partition(key, 8)]
    java, c = many[0], many[200]
    census = look_at(Census(8), [])
    for place, chosen in ((murmur2_partition, many[:200]), (crc32_partition, many[200:])):
        for key in chosen:
            census.observe(place(key, 8), (key,), lambda each: each)
    report = census.report("orders")
    assert report is not None
    for key, found in ((java, murmur2_partition(java, 8)), (c, crc32_partition(c, 8))):
        assert (
            f"key {key_hash(key)} is in partition {found}, murmur2 puts it into {murmur2_partition(key, 8)} "
            f"and CRC-32 into {crc32_partition(key, 8)}" in report
        )
        assert key.decode() not in report
    assert "topic orders" in report
    assert "explains the partition of 200 sampled keys" in report
    assert "partitioner=murmur2_random" in report


def test_more_partitions_restart_the_census() -> None:
    census = look_at(Census(2), by(murmur2_partition, keys(90), 2) + by(crc32_partition, keys(90, seed=2), 2))
    assert census.mixed
    census.resize(4)
    assert (census.partitions, census.mixed) == (4, False)
    assert "0 by murmur2, 0 by CRC-32, 0 by both" in repr(census)
    look_at(census, by(murmur2_partition, keys(10, seed=3), 4))
    assert census.murmur2 + census.both == 10
