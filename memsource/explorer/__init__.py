"""Every order of events around the real engine, exhaustively, for small numbers of everything."""

from __future__ import annotations

from memsource.explorer.member import Scope
from memsource.explorer.search import Broken, Exploration, Violation, search
from memsource.explorer.world import GroupWorld

__all__ = ["Broken", "Exploration", "GroupWorld", "Scope", "Violation", "search"]
