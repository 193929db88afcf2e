"""A held lease: its nonce, its revision, its deadline and its running renewal.

A renewal reads the lease, and then writes by compare-and-set on the revision that the read returned. The read checks
the nonce, because a revision may repeat in a new bucket after a loss. After the answer to a write, the time of the
renewed lease begins when the member sent the write. After a write without an answer, the machine reads the lease. If
the store applied such a write, the time of the lease begins at the earliest write without an answer.
"""

from __future__ import annotations

from typing import Final

from lanes.core.types import NEVER

REST: Final = "rest"
READ: Final = "read"
WRITE: Final = "write"


class HeldLease:
    """The lease of one acquisition.

    Args:
        nonce: Random text that identifies the acquisition.
        revision: Revision of the lease.
        sent: Clock reading in seconds, from just before the member sent the write.
        ttl: Length of the lease in seconds.
        margin: Number of seconds at the end of the lease in which no handler starts.

    Attributes:
        nonce: Random text that identifies the acquisition.
        revision: Revision of the lease; a write may use it as its fence only while ``step`` is ``rest``.
        expires: Clock reading in seconds at which the owner stops relying on the lease.
        renew_at: Clock reading in seconds of the next renewal.
        step: Next step of a renewal. ``rest`` = no write of this lease is in transit.
    """

    __slots__ = ("_margin", "_ttl", "_unsure", "expires", "nonce", "renew_at", "revision", "step")

    def __init__(self, nonce: str, revision: int, sent: float, *, ttl: float, margin: float) -> None:
        self.nonce = nonce
        self.revision = revision
        self._ttl = ttl
        self._margin = margin
        self._unsure: float | None = None
        self.expires = -NEVER
        self.renewed(revision, sent)

    def demand(self) -> None:
        """Start a renewal now."""
        self.step = READ

    def due(self, now: float) -> bool:
        """Return whether a renewal is due or running."""
        return self.step != REST or now >= self.renew_at

    def found(self, revision: int) -> None:
        """Record the revision that a read returned.

        A new revision shows that the store has applied a write without an answer.
        """
        if revision != self.revision and self._unsure is not None:
            self.expires = max(self.expires, self._unsure + self._ttl - self._margin)
            self._unsure = None
        self.revision = revision
        self.step = WRITE

    def renewed(self, revision: int, sent: float) -> None:
        """Record a write that succeeded. Any other write in transit names an old revision, so the store refuses it."""
        self.revision = revision
        self._unsure = None
        self.expires = max(self.expires, sent + self._ttl - self._margin)
        self.renew_at = sent + self._ttl / 3
        self.step = REST

    def refused(self) -> None:
        """Record a refused write. The lease has another revision, so the next step is a read."""
        self.step = READ

    def unknown(self, sent: float) -> None:
        """Record a write without an answer, which the store may apply now, later or never."""
        if self._unsure is None:
            self._unsure = sent
        self.step = READ
