"""An exhaustive search through the orders of events around the real engine, for few messages and few members.

Reading order: ``scope``, ``search``, ``invariants``, ``member``, ``world``; and ``acks`` for a broker with individual
acknowledgements.
"""

from __future__ import annotations

from memsource.explorer.acks import AckWorld
from memsource.explorer.scope import Scope
from memsource.explorer.search import Exploration, Violation, search
from memsource.explorer.world import GroupWorld

__all__ = ["AckWorld", "Exploration", "GroupWorld", "Scope", "Violation", "search"]
