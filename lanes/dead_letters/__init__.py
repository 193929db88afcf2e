"""Dead letters on the wire, and the operator's access to them.

Reading order: ``wire`` (headers that every backend writes), ``box`` (the box that ``lanes dead-letters`` opens).
"""

from __future__ import annotations

from lanes.dead_letters.box import DeadLetterBox, Disposition, FoundDeadLetters, StoredDeadLetter

__all__ = ["DeadLetterBox", "Disposition", "FoundDeadLetters", "StoredDeadLetter"]
