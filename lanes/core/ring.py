"""The slot, the partition and the lane of a key: three independent hashes.

The slot is plain BLAKE3, so that other programs can compute it. Partition and lane are BLAKE3 in derive-key mode, each
with a different context string (BLAKE3 specification, "Modes"). The hashes are independent, so the keys of one
partition spread over all lanes. With one hash h for both, partition h mod 4 and lane h mod 4 would be equal. Every
partition would then use a single lane.

Multiply-shift reduces a hash to a number below a count (Lemire, "Fast Random Integer Generation in an Interval", 2019).
With 64 bits, the probabilities of two results differ by at most 2⁻⁶⁴. The context strings are part of the format,
because a change would move every key. ``tests/core/test_ring.py`` compares all three hashes with fixed values. Every
function raises the errors of ``key_bytes``.
"""

from __future__ import annotations

from typing import Final

from blake3 import blake3

from lanes.core.types import PartitionKey, key_bytes

SLOTS: Final = 65_536
"""Number of slots. A slot is in 0 … 65,535."""

_HASH_BYTES: Final = 8

# Each key is hashed by a copy of one of these objects. A new object for each key would take twice as long.
_PARTITION: Final = blake3(derive_key_context="lanes-runtime ring v1: partition of a key")
_LANE: Final = blake3(derive_key_context="lanes-runtime ring v1: lane of a key")


def slot(key: PartitionKey) -> int:
    """Return the slot of a key: the first two bytes of its BLAKE3 hash, little-endian. The call does not block.

    Args:
        key: The key: bytes, a ``str`` (its UTF-8) or an unsigned 128-bit ``int`` (16 bytes, little-endian).

    Returns:
        The slot, in 0 … 65,535.

    Raises:
        ValueError: An ``int`` is outside 0 … 2¹²⁸−1, or a ``str`` cannot be encoded as UTF-8.
        TypeError: The key has another type.
    """
    return int.from_bytes(blake3(key_bytes(key)).digest(length=2), "little")


def partition(key: PartitionKey, partitions: int) -> int:
    """Return the partition of a key, in 0 … ``partitions`` − 1. Raises ``ValueError`` if ``partitions`` is below 1."""
    if partitions < 1:
        raise ValueError(f"partitions={partitions}: a key needs a partition; use 1 or more")
    return _reduced(key, _PARTITION, partitions)


def lane(key: PartitionKey, lanes: int) -> int:
    """Return the lane of a key in any partition, 0 … ``lanes`` − 1. Raises ``ValueError`` if ``lanes`` is below 1."""
    if lanes < 1:
        raise ValueError(f"lanes={lanes}: a key needs a lane; use 1 or more")
    return _reduced(key, _LANE, lanes)


def _reduced(key: PartitionKey, domain: blake3, count: int) -> int:
    hasher = domain.copy()
    hasher.update(key_bytes(key))
    return int.from_bytes(hasher.digest(length=_HASH_BYTES), "little") * count >> 8 * _HASH_BYTES
