"""Slot, partition and lane of a key are fixed by vectors, almost uniform, and independent of each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from lanes.core.ring import SLOTS, lane, partition, slot
from lanes.core.types import PartitionKey

VECTORS: list[tuple[PartitionKey, int, int, int]] = [
    # key, slot, partition of 64, lane of 16
    (0, 29413, 5, 1),
    (1, 20596, 36, 12),
    (42, 58486, 50, 13),
    (2**128 - 1, 34755, 50, 1),
    (b"customer-42", 40279, 18, 1),
    ("customer-42", 40279, 18, 1),
    ("", 5039, 63, 7),
    (b"\xff", 54425, 49, 5),
]

KEYS = st.one_of(st.binary(max_size=40), st.text(max_size=20), st.integers(0, 2**128 - 1))
COUNTS = st.integers(1, 2**32)
INTO_A_COUNT = [partition, lane]

# One in a million uniform hashes has a larger chi-square (4.75 standard deviations). The keys are fixed, so the test
# cannot fail by chance.
DEVIATIONS = 4.75


def chi_square_deviation(values: Iterable[int], cells: int) -> float:
    """The distance of the chi-square statistic from its mean, in standard deviations (Wilson and Hilferty, 1931)."""
    counts = Counter(values)
    assert set(counts) <= set(range(cells))
    expected = sum(counts.values()) / cells
    chi_square = sum((counts[cell] - expected) ** 2 for cell in range(cells)) / expected
    variance = 2 / (9 * (cells - 1))
    return float(((chi_square / (cells - 1)) ** (1 / 3) - (1 - variance)) / variance**0.5)


@pytest.mark.parametrize(("key", "slot_", "partition_", "lane_"), VECTORS)
def test_the_slots_partitions_and_lanes_of_known_keys_stay_the_same(
    key: PartitionKey, slot_: int, partition_: int, lane_: int
) -> None:
    assert (slot(key), partition(key, 64), lane(key, 16)) == (slot_, partition_, lane_)


@given(key=st.binary(max_size=40), count=COUNTS)
def test_slot_partition_and_lane_use_hashes_of_different_domains(key: bytes, count: int) -> None:
    def derived(context: str) -> int:
        whole = blake3(key, derive_key_context=context).digest()
        return sum(byte << 8 * place for place, byte in enumerate(whole[:8])) * count // 2**64

    low, high = blake3(key).digest()[:2]
    assert slot(key) == low + 256 * high
    assert partition(key, count) == derived("lanes-runtime ring v1: partition of a key")
    assert lane(key, count) == derived("lanes-runtime ring v1: lane of a key")


@given(text=st.text(max_size=20), count=COUNTS)
def test_a_str_is_its_utf8(text: str, count: int) -> None:
    key = text.encode()
    assert (slot(text), partition(text, count), lane(text, count)) == (
        slot(key),
        partition(key, count),
        lane(key, count),
    )


@given(number=st.integers(0, 2**128 - 1), count=COUNTS)
def test_an_int_is_16_bytes_little_endian(number: int, count: int) -> None:
    key = bytes(number >> 8 * place & 0xFF for place in range(16))
    assert (slot(number), partition(number, count), lane(number, count)) == (
        slot(key),
        partition(key, count),
        lane(key, count),
    )


@given(key=KEYS, count=COUNTS)
def test_the_same_key_goes_to_the_same_place_within_its_range(key: PartitionKey, count: int) -> None:
    assert 0 <= slot(key) < SLOTS
    for into in INTO_A_COUNT:
        assert 0 <= into(key, count) < count
        assert into(key, count) == into(key, count)
        assert into(key, 1) == 0


@pytest.mark.parametrize("into", INTO_A_COUNT)
@pytest.mark.parametrize("count", [0, -1, -(2**70)])
def test_a_number_of_partitions_or_lanes_below_one_is_refused(
    into: Callable[[PartitionKey, int], int], count: int
) -> None:
    with pytest.raises(ValueError, match=rf"^{into.__name__}s={count}: .* use 1 or more$"):
        into(b"key", count)


@pytest.mark.parametrize(
    ("key", "said"),
    [(-1, "is below 0"), (2**128, "has 129 bits"), (1 << 20_000, "has 20001 bits")],
    ids=["negative", "too large", "of thousands of digits"],
)
def test_an_invalid_key_is_refused_and_not_shown(key: int, said: str) -> None:
    with pytest.raises(ValueError, match=f"and this one {said}; pass its bytes"):
        slot(key)
    for into in INTO_A_COUNT:
        with pytest.raises(ValueError, match=said):
            into(key, 4)


# Counted ids, texts, and digits for which weak hashes have one residue of four.
FAMILIES: dict[str, list[PartitionKey]] = {
    "counted": list(range(20_000)),
    "strided": [number << 64 for number in range(20_000)],
    "named": [f"customer-{number}" for number in range(20_000)],
    "048": [f"{a}{b}{c}{d}{e}{f}{g}{h}" for a in "048" for b in "048" for c in "048" for d in "048"
            for e in "048" for f in "048" for g in "048" for h in "048"],
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("count", [2, 3, 4, 7, 16, 64, 100])
def test_keys_spread_evenly(family: list[PartitionKey], count: int) -> None:
    for into in INTO_A_COUNT:
        assert chi_square_deviation((into(key, count) for key in family), count) < DEVIATIONS
    # The ring in as many ranges, as members would own them.
    if SLOTS % count == 0:
        assert chi_square_deviation((slot(key) * count // SLOTS for key in family), count) < DEVIATIONS


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_slot_partition_and_lane_are_independent(family: list[PartitionKey], count: int) -> None:
    places = [
        (slot(key) * count // SLOTS, slot(key) % count, partition(key, count), lane(key, count)) for key in family
    ]
    for one, other in [(2, 3), (0, 2), (0, 3), (1, 2), (1, 3)]:
        pairs = [place[one] * count + place[other] for place in places]
        assert chi_square_deviation(pairs, count**2) < DEVIATIONS


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_keys_of_one_partition_reach_all_lanes_evenly(family: list[PartitionKey]) -> None:
    for number in range(4):
        keys = [key for key in family if partition(key, 4) == number]
        lanes = [lane(key, 4) for key in keys]
        assert set(lanes) == {0, 1, 2, 3}
        assert chi_square_deviation(lanes, 4) < DEVIATIONS


def test_the_chi_square_measure_tells_an_even_spread_from_an_uneven_one() -> None:
    assert chi_square_deviation((number % 4 for number in range(1_000)), 4) < 0
    assert chi_square_deviation((number % 3 for number in range(1_000)), 4) > DEVIATIONS
    assert chi_square_deviation([*range(4)] * 1_000 + [0] * 400, 4) > DEVIATIONS
