"""The partition of a key in a queue follows its specification, moves few keys when the queue grows, and is even."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from lanes.core.queue_hash import CONTEXT, jump, queue_digest, queue_partition
from lanes.core.types import PartitionKey
from tests.core.test_ring import DEVIATIONS, FAMILIES, KEYS, chi_square_deviation

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "routing.md").read_text()
DIGESTS = st.integers(0, 2**64 - 1)
WIDTHS = st.integers(1, 32_767)


def table(first: str) -> tuple[list[str], list[list[str]]]:
    """The headings and the rows of the table of the specification whose first two headings are given."""
    lines = PAGE[PAGE.index(f"| {first} |") :].partition("\n\n")[0].splitlines()
    heading, _, *rows = [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in lines]
    return heading, rows


def key_of(text: str) -> PartitionKey:
    """A key as the specification writes it."""
    if text == "no bytes":
        return b""
    if counted := re.fullmatch(r"([\d,]+) counted bytes", text):
        return bytes(number % 251 for number in range(int(counted[1].replace(",", ""))))
    kind, _, value = text.partition(" `")
    kinds: dict[str, Callable[[str], PartitionKey]] = {"bytes": bytes.fromhex, "text": str, "integer": int}
    return kinds[kind](value)


def test_the_hashes_of_known_keys_stay_the_same() -> None:
    heading, rows = table("key | digest")
    widths = [int(cell.removeprefix("of ")) for cell in heading[2:]]
    assert len(widths) == 9
    assert len(rows) == 14
    kinds = set()
    for name, digest, *partitions in rows:
        key = key_of(name)
        kinds.add((type(key), len(key) if isinstance(key, bytes) else 1))
        assert f"{queue_digest(key):016x}" == digest, name
        assert [queue_partition(key, width) for width in widths] == list(map(int, partitions)), name
    assert {(bytes, 0), (bytes, 1_000_000), (str, 1), (int, 1)} <= kinds


def test_the_partitions_of_known_hashes_stay_the_same() -> None:
    _, rows = table("digest | partitions | partition")
    assert len(rows) == 13
    for digest, width, partition in rows:
        assert jump(int(digest, 16), int(width)) == int(partition), (digest, width)


# From the tests of an implementation in Go, github.com/dgryski/go-jump.
@pytest.mark.parametrize(
    ("digest", "width", "partition"),
    [(1, 1, 0), (42, 57, 43), (0xDEAD10CC, 1, 0), (0xDEAD10CC, 666, 361), (256, 1024, 520)],
)
def test_the_jump_hash_equals_that_of_other_programs(digest: int, width: int, partition: int) -> None:
    assert jump(digest, width) == partition


def test_exact_integers_instead_of_floating_point_would_give_other_partitions() -> None:
    """Therefore the specification fixes the arithmetic."""

    def exact(digest: int, width: int) -> int:
        partition = following = 0
        while following < width:
            partition = following
            digest = (digest * 2862933555777941757 + 1) % 2**64
            following = ((partition + 1) << 31) // ((digest >> 33) + 1)
        return partition

    _, rows = table("digest | partitions | partition")
    differs = [int(width) for digest, width, partition in rows if exact(int(digest, 16), int(width)) != int(partition)]
    assert differs == [64, 65, 128, 128]


@given(key=st.binary(max_size=40))
def test_the_hash_of_a_queue_has_its_own_domain(key: bytes) -> None:
    assert f"\n{CONTEXT}\n" in PAGE
    whole = blake3(key, derive_key_context=CONTEXT).digest()
    assert queue_digest(key) == sum(byte << 8 * place for place, byte in enumerate(whole[:8]))


@given(text=st.text(max_size=20), number=st.integers(0, 2**128 - 1))
def test_a_str_is_its_utf8_and_an_int_is_16_bytes_little_endian(text: str, number: int) -> None:
    assert queue_digest(text) == queue_digest(text.encode())
    assert queue_digest(number) == queue_digest(bytes(number >> 8 * place & 0xFF for place in range(16)))


@given(key=KEYS, width=WIDTHS)
def test_the_partition_is_that_of_the_digest_and_within_the_width(key: PartitionKey, width: int) -> None:
    partition = queue_partition(key, width)
    assert 0 <= partition < width
    assert partition == jump(queue_digest(key), width)
    assert queue_partition(key, 1) == 0


@given(digest=DIGESTS, widths=st.lists(WIDTHS, min_size=2, max_size=6))
def test_a_growing_queue_moves_a_key_to_an_added_partition_only(digest: int, widths: list[int]) -> None:
    for few, many in pairwise(sorted(widths)):
        before, after = jump(digest, few), jump(digest, many)
        assert after == before or few <= after < many


@pytest.mark.parametrize(("few", "many"), [(1, 2), (2, 4), (4, 5), (3, 7), (8, 64)])
def test_a_growing_queue_moves_the_share_of_the_added_partitions(few: int, many: int) -> None:
    for family in FAMILIES.values():
        moved = [queue_partition(key, few) != queue_partition(key, many) for key in family[:4_000]]
        # As uneven as a throw of that many coins is in one of a million cases.
        assert sum(moved) == pytest.approx(len(moved) * (many - few) / many, abs=5 * (len(moved) / 4) ** 0.5)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("width", [2, 3, 4, 7, 16, 64, 100])
def test_keys_spread_evenly(family: list[PartitionKey], width: int) -> None:
    assert chi_square_deviation((queue_partition(key, width) for key in family[:10_000]), width) < DEVIATIONS


@pytest.mark.parametrize("width", [0, -1])
def test_a_queue_width_below_one_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match=rf"^partitions={width}: .* use 1 or more$"):
        queue_partition(b"key", width)
