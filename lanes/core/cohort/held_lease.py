"""A held lease: its nonce, its revision, its deadline and the renewal under way.

A renewal always reads the lease and then writes by compare-and-set on the revision that it read. The read checks the
nonce, because a revision may repeat in a bucket that was lost. A renewal counts from the time it was sent, and only
when it is known to be applied. A write without an answer is read back; if it was applied, the lease counts from the
earliest such write.
"""

from __future__ import annotations

from typing import Final

from lanes.core.types import NEVER

REST: Final = "rest"
READ: Final = "read"
WRITE: Final = "write"


class HeldLease:
    """The lease of one acquisition.

    ``expires`` is its deadline, ``renew_at`` the time of the next renewal, and ``step`` the next step of a renewal.
    While ``step`` is ``rest``, no write of this lease is on its way, and ``revision`` is the one to fence with.
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
        """Whether the renewal has something to do."""
        return self.step != REST or now >= self.renew_at

    def found(self, revision: int) -> None:
        """Note that the lease was read with this nonce, which tells whether a write without an answer was applied."""
        if revision != self.revision and self._unsure is not None:
            self.expires = max(self.expires, self._unsure + self._ttl - self._margin)
            self._unsure = None
        self.revision = revision
        self.step = WRITE

    def renewed(self, revision: int, sent: float) -> None:
        """Note a write that succeeded. Any other write on its way compares with an old revision."""
        self.revision = revision
        self._unsure = None
        self.expires = max(self.expires, sent + self._ttl - self._margin)
        self.renew_at = sent + self._ttl / 3
        self.step = REST

    def refused(self) -> None:
        """Note a refused write: the lease has another revision, so read it."""
        self.step = READ

    def unknown(self, sent: float) -> None:
        """Note a write without an answer: it may be applied now, later or never."""
        if self._unsure is None:
            self._unsure = sent
        self.step = READ
