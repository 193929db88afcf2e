"""The code of plans and heartbeats before the plan rules had versions, for tests of mixed cohorts. Never changed.

``plan``, ``records`` and ``roster`` are copies of ``lanes.core.cohort.plan``, ``lanes.core.cohort.records`` and
``lanes.cohort.roster``. Only their imports of each other differ.
"""

from __future__ import annotations

from typing import Any, cast

from lanes.cohort.roster import Roster
from tests.cohort.former import roster

__all__ = ["former_roster"]


class _FormerRoster(roster.Roster):
    """The former code has neither flag nor version."""

    under_provisioned = False
    rules = 0
    cohort = "orders"


def former_roster(
    *arguments: Any, active_members: int | None, consumer_target: None, default_consumer_target: None, **named: Any
) -> Roster:
    """Make the roster of a member that runs the former code, which knows no targets of members."""
    assert (consumer_target, default_consumer_target) == (None, None)
    return cast("Roster", _FormerRoster(*arguments, target=active_members, **named))
