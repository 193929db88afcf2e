"""A bucket of NATS' key-value store as data, and a ``lanes.cohort.leases.LeaseStore`` over the bucket.

``Bucket`` acts only during calls of its methods, which take the time as an argument. The rules are those of
nats-server, confirmed by measurements:

- A revision is a sequence of the bucket. Each write of any key has the next revision.
- A write succeeds only at the expected revision of its key, or of another key, the fence. An expired fence has no
  revision.
- A time to live is in whole seconds. A key expires up to 0.25 s late.
- After the loss of a bucket a member creates an empty bucket. A bucket can return to an earlier state with an earlier
  sequence.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from lanes.cohort.leases import Conflict, Entry
from memsource.jetstream.link import Link
from memsource.memory.watchers import Watchers

LATE: Final = 0.25
"""Maximum seconds by which a key outlives its time to live."""

_REMEMBERED: Final = 60.0
"""Maximum seconds by which ``fall_back`` can set a bucket back."""


@dataclass(frozen=True, slots=True)
class _Stored:
    value: bytes | None
    revision: int
    expires: float = math.inf


class Bucket:
    """One bucket: its keys, values and revisions.

    No method blocks. Not thread-safe. ``now`` never falls.

    Args:
        first: Revision before the first write.
        seed: Seed of the random delays of expiries.
        late: Maximum seconds by which a key outlives its time to live.
        markers: Whether the expiry of a key uses up a revision, as in a bucket with limit markers.

    Attributes:
        writes: Number of writes.
    """

    def __init__(self, *, first: int = 0, seed: int = 0, late: float = LATE, markers: bool = False) -> None:
        self.writes = 0
        self._revision = first
        self._late = late
        self._markers = markers
        self._random = random.Random(f"bucket {seed}")
        self._keys: dict[str, _Stored] = {}
        self._expiries: list[tuple[float, str, int]] = []
        self._past: list[tuple[float, int, str, _Stored | None]] = []
        self._watchers: Watchers[[str]] = Watchers()

    def read(self, key: str, now: float) -> Entry:
        """Read the newest entry of a key; see ``lanes.cohort.leases.Entry``."""
        self.advance(now)
        stored = self._stored(key)
        return Entry(stored.value, stored.revision)

    def write(
        self,
        key: str,
        value: bytes,
        now: float,
        *,
        revision: int | None,
        ttl: float | None = None,
        fence: tuple[str, int] | None = None,
    ) -> int:
        """Write a key; see ``lanes.cohort.leases.LeaseStore.write``. Raises ``ValueError`` for an invalid write."""
        self.advance(now)
        if ttl is not None and (ttl < 1 or ttl != int(ttl)):
            raise ValueError(f"ttl={ttl} of key {key!r}: must be whole seconds, 1 or more")
        if (revision is None) == (fence is None):
            raise ValueError(f"key {key!r}, revision={revision}, fence={fence}: pass either a revision or a fence")
        name, expected, found = key, revision, self._stored(key).revision
        if fence is not None:
            (name, expected), stored = fence, self._stored(fence[0])
            # An expired key has no revision, even if the expiry left a marker.
            found = 0 if stored.value is None else stored.revision
        if found != expected:
            raise Conflict(f"key {name!r} has revision {found}, expected was {expected}")
        self.writes += 1
        expires = math.inf if ttl is None else now + ttl + self._random.random() * self._late
        self._put(key, value, expires, now)
        self._watchers.call(key)
        return self._revision

    def entries(self, prefix: str, now: float) -> dict[str, Entry]:
        """Read the entries that have a value and a key with this prefix, sorted by key."""
        self.advance(now)
        return {
            key: Entry(stored.value, stored.revision)
            for key, stored in sorted(self._keys.items())
            if stored.value is not None and key.startswith(prefix)
        }

    def expires(self, key: str) -> float:
        """Return the time at which a key expires; infinity = the key does not exist, or never expires."""
        stored = self._keys.get(key)
        return math.inf if stored is None else stored.expires

    # --- faults

    def lose(self, now: float, *, first: int | None = None) -> None:
        """Delete the bucket and create an empty bucket.

        Args:
            now: The time, in seconds.
            first: Revision before the first write of the new bucket; None = revisions continue.
        """
        self.advance(now)
        self._revision = self._revision if first is None else first
        for key in list(self._keys):
            self._delete(key, now)
        self._expiries.clear()

    def drop(self, key: str, now: float) -> None:
        """Delete one key, as an expiry does. Idempotent."""
        self.advance(now)
        if key in self._keys:
            self._delete(key, now)

    def fall_back(self, seconds: float, now: float) -> None:
        """Return to the state of ``seconds`` ago, at most 60.

        The bucket loses later writes and reuses their revisions.

        A key that has expired since then has its value again until ``advance`` expires the key.
        """
        self.advance(now)
        while self._past and self._past[-1][0] > now - seconds:
            _, revision, key, stored = self._past.pop()
            self._revision = revision
            if stored is None:
                self._keys.pop(key, None)
            else:
                self._keys[key] = stored
        self._expiries = sorted(
            (stored.expires, key, stored.revision) for key, stored in self._keys.items() if stored.expires < math.inf
        )

    # --- time

    def next_at(self) -> float:
        """Return the time of the next expiry; infinity = no key expires."""
        return self._expiries[0][0] if self._expiries else math.inf

    def advance(self, now: float) -> None:
        """Expire the keys that are due."""
        while self._expiries and self._expiries[0][0] <= now:
            at, key, revision = heappop(self._expiries)
            stored = self._keys.get(key)
            if stored is None or stored.revision != revision or stored.value is None:
                continue
            if self._markers:
                self._put(key, None, math.inf, at)
            else:
                self._delete(key, at)

    # --- watchers

    def watch(self, watcher: Callable[[str], None]) -> None:
        """Call ``watcher`` with each written key from now on. Idempotent."""
        self._watchers.add(watcher)

    def unwatch(self, watcher: Callable[[str], None]) -> None:
        """Stop calling a watcher. Idempotent."""
        self._watchers.remove(watcher)

    # --- inside

    def _stored(self, key: str) -> _Stored:
        return self._keys.get(key) or _Stored(None, 0)

    def _put(self, key: str, value: bytes | None, expires: float, now: float) -> None:
        self._note(key, now)
        self._revision += 1
        self._keys[key] = _Stored(value, self._revision, expires)
        if expires < math.inf:
            heappush(self._expiries, (expires, key, self._revision))

    def _delete(self, key: str, now: float) -> None:
        self._note(key, now)
        del self._keys[key]

    def _note(self, key: str, now: float) -> None:
        """Keep a replaced entry as long as ``fall_back`` may restore the entry."""
        while self._past and self._past[0][0] < now - _REMEMBERED:
            self._past.pop(0)
        self._past.append((now, self._revision, key, self._keys.get(key)))


class MemoryLeaseStore:
    """The ``lanes.cohort.leases.LeaseStore`` of a member, over its link to a bucket. For asyncio and trio."""

    def __init__(self, bucket: Bucket, link: Link) -> None:
        self.bucket = bucket
        self.link = link

    async def read(self, key: str) -> Entry:
        """See ``lanes.cohort.leases.LeaseStore.read``."""
        return await self.link.read(lambda now: self.bucket.read(key, now))

    async def write(
        self,
        key: str,
        value: bytes,
        *,
        revision: int | None,
        ttl: float | None = None,
        fence: tuple[str, int] | None = None,
    ) -> int:
        """See ``lanes.cohort.leases.LeaseStore.write``."""
        return await self.link.write(
            lambda now: self.bucket.write(key, value, now, revision=revision, ttl=ttl, fence=fence)
        )

    async def entries(self, prefix: str) -> Mapping[str, Entry]:
        """See ``lanes.cohort.leases.LeaseStore.entries``."""
        return await self.link.read(lambda now: self.bucket.entries(prefix, now))
