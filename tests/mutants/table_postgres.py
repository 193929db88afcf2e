"""Mutants of ``lanes_postgres`` and of the reference log, which the campaign over the simulated server must find."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tests.mutants import Mutant


def _planted(name: str, module: str, old: str, new: str, breaks: str, *found_by: str) -> Mutant:
    return Mutant(f"pg_{name}", module, old, new, breaks, "postgres_adapter", found_by)


_EPOCH_IGNORED: Final = _planted(
    "epoch_ignored",
    "tests.simulated.postgres.states",
    "    if before is None or before.epoch != state.epoch:\n",
    "    if before is None:\n",
    "a store does not compare the epoch",
    "OwnersStore",
)

POSTGRES: Final = (
    _planted(
        "late_commit_passed",
        "tests.simulated.postgres.log",
        "        found = sorted(ticket for ticket in self._pending if ticket > self._highest or ticket in holes)\n",
        "        found = sorted(ticket for ticket in self._pending if ticket > self._highest)\n",
        "the sequencer never returns to a ticket that was not visible",
        "CaughtUp",
    ),
    _planted(
        "hole_forgotten_too_soon",
        "tests.simulated.postgres.log",
        "if hole.ticket not in found and hole.running & running]\n",
        "if False]\n",
        "the sequencer forgets a ticket that was not visible at the next call",
        "CaughtUp",
    ),
    replace(
        _planted(
            "lock_lost_and_stored_anyway",
            "lanes_postgres.subscription.owned",
            "        if self.held.lost:\n            return self.held.lost\n",
            "",
            "a member that has lost its lock goes on until its deadline, and its positions are stored",
            "LockHolds",
            "OwnersStore",
        ),
        also=(_EPOCH_IGNORED,),
    ),
    _planted(
        "frozen_owner_never_expired",
        "lanes_postgres.lock_session",
        '        timeout = f"{round(self._lease * 1000)}ms"\n',
        '        timeout = "0ms"\n',
        "the server keeps the session of a frozen process, with its locks",
        "FrozenEnds",
    ),
    _planted(
        "deadline_beyond_the_session",
        "lanes_postgres.advisory_locks",
        "        return sent + self._lease * (1 - _MARGIN)\n",
        "        return sent + self._lease * (2 - _MARGIN)\n",
        "a member relies on its locks after the server has ended their session",
        "LeaseCovers",
    ),
    replace(
        _planted(
            "position_falls_after_a_first_failure",
            "lanes_postgres.subscription.source",
            "            state = State(owned.epoch, settlement.floor, list(settlement.completed))\n",
            "            floor = settlement.floor if settlement.floor > owned.floor else 0\n"
            "            state = State(owned.epoch, floor, list(settlement.completed))\n",
            "a commit without a finished message returns the position to the beginning",
            "PositionsRise",
        ),
        also=(
            _planted(
                "floor_may_fall",
                "tests.simulated.postgres.states",
                "    if before.floor > state.floor:\n        return False\n",
                "",
                "a store may lower the position",
                "PositionsRise",
            ),
        ),
    ),
    replace(
        _planted(
            "start_decided_twice",
            "lanes_postgres.subscription.starts",
            "            row = await (await connection.execute(compose(_FIND, tables.schema), "
            "(tables.log, subscription))).fetchone()\n            if row is None:\n",
            "            if True:\n",
            "two new members decide where the subscription begins",
            "StartsOnce",
        ),
        also=(
            _planted(
                "second_row",
                "tests.simulated.postgres.server",
                "        if self.get(key) is not None:\n            raise UniqueViolation\n",
                "",
                "an insert replaces the row of another session",
                "StartsOnce",
            ),
        ),
    ),
    _planted(
        "start_not_from_the_table",
        "lanes_postgres.subscription.starts",
        "    return list(found)\n",
        "    return await _starts(connection, tables, start)\n",
        "a member that starts later begins at its own start",
        "StartsOnce",
    ),
    _planted(
        "turn_without_a_message",
        "lanes_postgres.subscription.visits",
        "        if now - hold.since >= budget and (hold.got_on or not takes_turns)\n",
        "        if now - hold.since >= budget\n",
        "members that take turns give a partition up before they have settled a message",
        "CaughtUp",
    ),
    _planted(
        "released_before_drained",
        "lanes_postgres.subscription.visitor",
        "        owned.revoked = True\n        owned.rest()\n",
        "        owned.revoked = True\n        owned.rest()\n"
        "        self._releasing.add(asyncio.ensure_future(owned.held.release()))\n",
        "the lock of a partition is given up while its handlers run",
        "LockHolds",
        "NoOverlap",
    ),
)
