"""The ring: 65,536 slots, to which a hash maps keys, and ranges of slots. No call blocks.

``slot(key)`` is the first two bytes of the BLAKE3 hash of the key, little-endian, so that other programs can compute
it. A key is bytes, a ``str`` (its UTF-8) or an unsigned 128-bit ``int`` (16 bytes, little-endian). For example, the key
42 has slot 58,486, and ``"customer-42"`` has slot 40,279.
"""

from __future__ import annotations

from lanes.core.ring import SLOTS, slot
from lanes.core.ring_map import Assignment, Range

__all__ = ["SLOTS", "Assignment", "Range", "slot"]
