"""The wire format of dead letters, and the operator's access to stored dead letters.

Reading order: ``wire`` (headers that every backend writes), ``box`` (the box that ``lanes dead-letters`` opens).
"""

from __future__ import annotations

from lanes.dead_letters.box import DeadLetterBox, Disposition, FoundDeadLetters, StoredDeadLetter

__all__ = ["DeadLetterBox", "Disposition", "FoundDeadLetters", "StoredDeadLetter"]
