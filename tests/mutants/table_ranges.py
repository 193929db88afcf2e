"""Mutants of ranges, which the campaign over the simulated server must find.

The mutants of ``tests.simulated.postgres.pieces`` stand for faults of the SQL, which the simulated server replaces.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tests.mutants import Mutant


def _planted(name: str, module: str, old: str, new: str, breaks: str, *found_by: str) -> Mutant:
    return Mutant(f"ring_{name}", module, old, new, breaks, "ranges_adapter", found_by)


_EPOCH_ENDS_NO_DRAIN: Final = _planted(
    "epoch_ends_no_drain",
    "tests.simulated.postgres.pieces",
    "    return former is None or row.parent_epoch is None or former.epoch <= row.parent_epoch\n",
    "    return True\n",
    "a later owner of the parent ends no drain",
    "CaughtUp",
)

RANGES: Final = (
    _planted(
        "fed_before_the_drain",
        "tests.simulated.postgres.pieces",
        "    if row.parent is None:\n        return False\n",
        "    if True:\n        return False\n",
        "a claim does not look for the drain of the piece",
        "DrainBeforeFeed",
        "ExclusiveSlot",
    ),
    _planted(
        "drain_ended_without_the_lock",
        "lanes_postgres.subscription.piece_visitor",
        "        held = await self.locks.try_acquire(self._lock_of(row.partition, parent), lambda: None)\n",
        "        await self.pieces.end_drain(row.id, parent)\n"
        "        held = await self.locks.try_acquire(self._lock_of(row.partition, parent), lambda: None)\n",
        "a member ends the drain of a piece while the former owner has its lock",
        "DrainBeforeFeed",
        "ExclusiveSlot",
    ),
    _planted(
        "part_handed_over_while_it_runs",
        "lanes.core.ownership",
        "        for parting in [each for each in partition.partings if not each.running]:\n",
        "        for parting in list(partition.partings):\n",
        "a part is handed over while its handlers run",
        "DrainBeforeFeed",
        "ExclusiveSlot",
    ),
    replace(
        _planted(
            "expiry_never_judged",
            "lanes_postgres.subscription.piece_visitor",
            "            await self._end_drain(row, row.parent)\n            return\n",
            "            return\n",
            "the drain of a piece whose former owner was killed never ends",
            "CaughtUp",
        ),
        also=(_EPOCH_ENDS_NO_DRAIN,),
    ),
    _planted(
        "locked_row_given_up",
        "lanes_postgres.subscription.source",
        "                owned.unstored = str(done)\n",
        "                visitor.lose(owned, str(done))\n",
        "a member gives up a piece whose row a transaction holds, while its handlers run",
        "OnlyLostIsLost",
    ),
    _planted(
        "split_drains_everything",
        "lanes_postgres.subscription.piece_visitor",
        "                    self._events += [RevokingPart(piece.partition, part) for part in moved]\n",
        "                    self.revoke(piece)\n",
        "a member gives up a whole piece when a part of it moves",
        "OnlyMovedSlotsWait",
    ),
    _planted(
        "end_point_exclusive",
        "lanes_postgres.ring.slots",
        "        return cls(tuple((each.lo, each.hi + 1) for each in ranges))\n",
        "        return cls(tuple((each.lo, max(each.lo + 1, each.hi)) for each in ranges))\n",
        "the first pieces of a range lack its last slot",
        "CaughtUp",
        "MapNamesOwners",
    ),
    _planted(
        "end_point_of_a_move_exclusive",
        "tests.simulated.postgres.pieces",
        "    found = ((max(start, lo), min(end, hi + 1)) for start, end in slots or ())\n",
        "    found = ((max(start, lo), min(end, max(lo + 1, hi))) for start, end in slots or ())\n",
        "the last slot of a range does not move with the range",
        "CaughtUp",
        "MapNamesOwners",
    ),
    _planted(
        "group_ignored",
        "tests.simulated.postgres.pieces",
        "if (row.log, row.group) == (log, group))\n",
        "if row.log == log)\n",
        "a consumer owns the ranges of the consumer of its name in another group",
        "ExclusiveSlot",
        "OwnerOfItsSlot",
    ),
    replace(
        _planted(
            "keyless_dealt_twice",
            "lanes_postgres.subscription.owned_piece",
            "        self._keyless = next((piece for piece in pieces if piece.slots is None), None)\n",
            "        self._keyless = next(iter(pieces), None)\n",
            "a piece of slots gets the messages without a key that another piece has too",
            "ExclusiveSlot",
        ),
        also=(
            _planted(
                "keyless_read_for_slots",
                "lanes_postgres.subscription.piece_visitor",
                "    keyless = any(piece.slots is None for piece in pieces)\n",
                "    keyless = True\n",
                "a piece of slots reads the messages without a key",
                "ExclusiveSlot",
            ),
        ),
    ),
    _planted(
        "split_forgets_what_is_finished",
        "tests.simulated.postgres.pieces",
        "        part = row._replace(slots=_common(row.slots, lo, hi), consumer=consumer, epoch=0)\n",
        "        row = row._replace(floor=0, completed=())\n"
        "        part = row._replace(slots=_common(row.slots, lo, hi), consumer=consumer, epoch=0)\n",
        "a part of a piece begins without the finished messages of the piece",
        "SettledStaysSettled",
    ),
    _planted(
        "moved_slots_still_fed",
        "lanes_postgres.subscription.owned_piece",
        "        self.slots = slots\n        dropped",
        "        dropped",
        "an owner reads the messages of slots that have moved on",
        "ExclusiveSlot",
        "OwnerOfItsSlot",
    ),
    replace(
        _planted(
            "owners_ignored",
            "lanes_postgres.subscription.piece_visitor",
            "        rows = await self.pieces.look(connection, list(self.owned))\n",
            "        rows = await self.pieces.look(connection, list(range(10_000)))\n"
            "        rows = [row._replace(consumer=row.consumer and self.consumer) for row in rows]\n",
            "the members share the pieces like whole partitions, whatever the map says",
            "UnownedNeverFed",
        ),
        also=(
            _planted(
                "pieces_of_others_claimed",
                "tests.simulated.postgres.pieces",
                "(row.slots is not None and row.consumer != consumer)",
                "(row.slots is not None and row.consumer is None)",
                "a claim does not look at the consumer of the piece",
                "UnownedNeverFed",
            ),
        ),
    ),
)
