"""The garbage collector of the process while a consumer runs.

Python's collector visits all young objects whenever the number of objects has increased by some hundreds. The messages
in flight and their handlers' tasks are such objects. Messages in flight survive many visits, and very few are part of a
cycle. With thousands of messages in flight, these visits therefore take much time and find no garbage.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

YOUNG_OBJECTS: Final = 100_000
"""Growth of the number of objects that starts a collection of the youngest generation. Python's default is 700 to
10,000, which depends on the version."""

_OLDER: Final = (20, 100)
"""Thresholds of the older generations."""

_Thresholds = tuple[int, int, int]

_lock: Final = threading.Lock()
_blocks = 0
_before: _Thresholds | None = None
_tuned: _Thresholds | None = None
_frozen = 0


def tune_gc() -> None:
    """Collect garbage less often in this process, and exempt all existing objects from collections.

    The function is for programs that use ``lanes.run`` or ``Consumer``. ``lanes.main`` and ``lanes.serve`` have the
    same effect during their calls. Call the function once, after the imports. The call collects all garbage, in a time
    that increases with the number of objects. Idempotent. Any thread may call this function.

    The thresholds of the collector become 100,000, 20 and 100 (``gc.set_threshold``), and ``gc.freeze`` exempts all
    existing objects from later collections. Python still collects cycles, but up to 100,000 objects in cycles, about 10
    MB of small objects, may wait for a collection. If the collector is disabled, or its first threshold is already
    higher, the thresholds do not change. If the program has called ``gc.freeze``, the function freezes no further
    objects.
    """
    global _before, _frozen
    with _lock:
        _raise_thresholds()
        _freeze()
        # The end of a block leaves the process as it is.
        _before, _frozen = None, 0


@contextmanager
def tuned_gc(*, freeze: bool) -> Iterator[None]:
    """Collect garbage less often in this process, until the last of these blocks ends. Thread-safe.

    The last block restores the former thresholds, unless other code changed the thresholds during the blocks.

    Args:
        freeze: Whether to exempt the existing objects from collections, like ``tune_gc``, until the last block ends.
    """
    global _blocks, _before, _frozen
    with _lock:
        _blocks += 1
        if _blocks == 1:
            _before = _raise_thresholds()
            _frozen = _freeze() if freeze else 0
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not _blocks:
                if _before is not None and gc.get_threshold() == _tuned:
                    gc.set_threshold(*_before)
                # More frozen objects are those of other code, which wants them to stay frozen.
                if 0 < gc.get_freeze_count() <= _frozen:
                    gc.unfreeze()
                _before, _frozen = None, 0


def _raise_thresholds() -> _Thresholds | None:
    """Raise the thresholds, and return the former thresholds.

    The result is None if the process already collects at most that often.
    """
    global _tuned
    found = gc.get_threshold()
    if not 0 < found[0] < YOUNG_OBJECTS:
        return None
    gc.set_threshold(YOUNG_OBJECTS, *_OLDER)
    # Some versions of Python have no third generation, and report another value.
    _tuned = gc.get_threshold()
    return found


def _freeze() -> int:
    """Exempt the existing objects from collections, and return their number; 0 = other code has frozen objects."""
    if not gc.isenabled() or gc.get_freeze_count():
        return 0
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()
