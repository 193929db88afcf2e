"""The partition of a key in a partitioned queue: jump consistent hash over 64 bits of BLAKE3.

The digest is BLAKE3 in derive-key mode with a separate context string. The digest is therefore independent of the slot,
the ring partition and the lane of ``ring``, and of the partition that a broker chooses. The keys of one partition
therefore spread over all lanes.

Jump consistent hash (Lamping and Veach, "A Fast, Minimal Memory, Consistent Hash Algorithm", 2014) reduces the digest
to a partition. If a queue receives more partitions, a key either keeps its partition or moves to an added partition.

The context string, the byte order and the arithmetic are part of the format, because a change would move keys.
docs/reference/routing.md is the specification, and ``tests/core/test_queue_hash.py`` compares the code with its
vectors.
"""

from __future__ import annotations

from typing import Final

from blake3 import blake3

from lanes.core.types import PartitionKey, key_bytes

CONTEXT: Final = "lanes-runtime queue v1: partition of a key"
"""Context string of BLAKE3 in derive-key mode."""

_DIGEST_BYTES: Final = 8
_WORD: Final = (1 << 64) - 1
_MULTIPLIER: Final = 2_862_933_555_777_941_757

# Each key is hashed by a copy of this object. A new object for each key would take twice as long.
_DOMAIN: Final = blake3(derive_key_context=CONTEXT)


def queue_digest(key: PartitionKey) -> int:
    """Return the digest of a key, an unsigned number of 64 bits. Raises the errors of ``key_bytes``."""
    hasher = _DOMAIN.copy()
    hasher.update(key_bytes(key))
    return int.from_bytes(hasher.digest(length=_DIGEST_BYTES), "little")


def jump(digest: int, partitions: int) -> int:
    """Return the partition of a digest, in 0 … ``partitions`` − 1.

    The function rounds the quotient and the product to IEEE 754 doubles, as in the paper. With exact integers, some
    digests would have another partition.

    Args:
        digest: An unsigned number of 64 bits.
        partitions: Number of partitions, 1 … 2³¹.

    Returns:
        The partition.
    """
    partition = following = 0
    while following < partitions:
        partition = following
        digest = digest * _MULTIPLIER + 1 & _WORD
        following = int((partition + 1) * (2.0**31 / ((digest >> 33) + 1)))
    return partition


def queue_partition(key: PartitionKey, partitions: int) -> int:
    """Return the partition of a key in a queue, in 0 … ``partitions`` − 1.

    Args:
        key: The key.
        partitions: Number of partitions of the queue, 1 … 2³¹.

    Returns:
        The partition.

    Raises:
        TypeError: The key is neither bytes nor ``str`` nor ``int``.
        ValueError: The key is out of its range, or ``partitions`` is below 1.
    """
    if partitions < 1:
        raise ValueError(f"partitions={partitions}: a key needs a partition; use 1 or more")
    return jump(queue_digest(key), partitions)
