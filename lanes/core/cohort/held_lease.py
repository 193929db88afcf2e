"""A lease that is held: by which nonce, at which revision, until when, and the renewal that is under way.

A renewal reads the lease and then compares and sets on what it read, always both: a revision alone may come again
in a bucket that was lost, a nonce never does. It counts from the moment it was sent, and only once it is known to be
applied; one whose answer did not come is read back, and what it may have brought counts from the earliest such send.
"""

from __future__ import annotations

from typing import Final

from lanes.core.types import NEVER

__all__ = ["READ", "REST", "WRITE", "HeldLease"]

REST: Final = "rest"
READ: Final = "read"
WRITE: Final = "write"


class HeldLease:
    """One acquisition's lease. ``expires``: its deadline; ``renew_at``: when the next renewal is due.

    ``step``: what the renewal does next. ``confirmed``: no renewal was demanded that has not succeeded since. While
    ``step`` is ``rest``, no write of this lease is on its way, and ``revision`` is the one to fence with.
    """

    __slots__ = ("_margin", "_ttl", "_unsure", "confirmed", "expires", "nonce", "renew_at", "revision", "step")

    def __init__(self, nonce: str, revision: int, sent: float, *, ttl: float, margin: float) -> None:
        self.nonce = nonce
        self.revision = revision
        self._ttl = ttl
        self._margin = margin
        self._unsure: float | None = None
        self.expires = -NEVER
        self.renewed(revision, sent)

    def demand(self) -> None:
        """Renew now, from the reading on."""
        self.step = READ
        self.confirmed = False

    def due(self, now: float) -> bool:
        """Whether the renewal has something to do."""
        return self.step != REST or now >= self.renew_at

    def found(self, revision: int) -> None:
        """The lease was read, and is this one's: what a write without an answer may have brought is known now."""
        if revision != self.revision and self._unsure is not None:
            self.expires = max(self.expires, self._unsure + self._ttl - self._margin)
            self._unsure = None
        self.revision = revision
        self.step = WRITE

    def renewed(self, revision: int, sent: float) -> None:
        """A write succeeded. Whatever else is on its way compares with a revision that is gone."""
        self.revision = revision
        self._unsure = None
        self.expires = max(self.expires, sent + self._ttl - self._margin)
        self.renew_at = sent + self._ttl / 3
        self.step = REST
        self.confirmed = True

    def refused(self) -> None:
        """The lease has another revision: read whose it is."""
        self.step = READ

    def unknown(self, sent: float) -> None:
        """A write has no answer: it may have come, may come later, or never."""
        if self._unsure is None:
            self._unsure = sent
        self.step = READ
