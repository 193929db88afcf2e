"""The phases of a lease machine and all its transitions; ``docs/model/cohort.pml`` has the same, in small.

Numbers are those of the steps in ``docs/model/README.md``.
"""

from __future__ import annotations

from typing import Final

IDLE: Final = "idle"  # not wanted, holds nothing
LOOKING: Final = "looking"  # 1: is the lease free?
CHECKING: Final = "checking"  # 1: is the state there?
SURVEYING: Final = "surveying"  # 1: no, the bucket was lost: which leases may owners still trust?
GRACE: Final = "grace"  # 1: such an owner may not know of the loss yet
ACQUIRING: Final = "acquiring"  # 1
CONFIRMING: Final = "confirming"  # 1: no answer came: was the write applied?
READING: Final = "reading"  # 2: the state
FINDING: Final = "finding"  # 2: the consumers
WRITING: Final = "writing"  # 3: the epoch and the ledger, fenced by the lease
CLEARING: Final = "clearing"  # 4: lower epochs, where the retention allows one consumer only
CREATING: Final = "creating"  # 4
REFINDING: Final = "refinding"  # 4: the create met another consumer
VERIFYING: Final = "verifying"  # 5: a renewal
SWEEPING: Final = "sweeping"  # 4: lower epochs, where the new consumer comes first
OWNED: Final = "owned"  # 6
DRAINING: Final = "draining"  # 9: until `drained`
SAVING: Final = "saving"  # 9: the whole ledger, fenced by the lease
RELEASING: Final = "releasing"  # 9
FENCED: Final = "fenced"  # 7: until `ended`

SEEKING: Final = frozenset({LOOKING, CHECKING, SURVEYING, GRACE, ACQUIRING})
"""No lease is held, and no write of one is on its way."""

TAKING: Final = frozenset({READING, FINDING, WRITING, CLEARING, CREATING, REFINDING, VERIFYING, SWEEPING})
"""The lease is held; the consumer is missing, or lower ones are left."""

TRANSITIONS: Final[dict[tuple[str, str], str]] = {
    (IDLE, "planned"): LOOKING,
    (LOOKING, "free"): CHECKING,
    (LOOKING, "held"): LOOKING,
    (LOOKING, "unplanned"): IDLE,
    (CHECKING, "present"): ACQUIRING,
    (CHECKING, "missing"): SURVEYING,
    (CHECKING, "unplanned"): IDLE,
    (SURVEYING, "surveyed"): GRACE,
    (SURVEYING, "unplanned"): IDLE,
    (GRACE, "waited"): LOOKING,
    (GRACE, "unplanned"): IDLE,
    (ACQUIRING, "acquired"): READING,
    (ACQUIRING, "refused"): LOOKING,
    (ACQUIRING, "unknown"): CONFIRMING,
    (ACQUIRING, "unplanned"): IDLE,
    (CONFIRMING, "acquired"): READING,
    (CONFIRMING, "refused"): LOOKING,
    (READING, "read"): FINDING,
    (READING, "missing"): SURVEYING,
    (FINDING, "found"): WRITING,
    (WRITING, "written, create first"): CREATING,
    (WRITING, "written, delete first"): CLEARING,
    (CLEARING, "cleared"): CREATING,
    (CREATING, "created"): VERIFYING,
    (CREATING, "taken"): READING,
    (CREATING, "overlapping"): REFINDING,
    (REFINDING, "lower"): CLEARING,
    (VERIFYING, "verified"): SWEEPING,
    (SWEEPING, "cleared"): OWNED,
    (OWNED, "takeover"): READING,
    (OWNED, "unplanned"): DRAINING,
    (DRAINING, "drained"): SAVING,
    (SAVING, "written"): RELEASING,
    (RELEASING, "released"): IDLE,
    (FENCED, "ended"): IDLE,
}
"""(phase, event) -> phase.

``unplanned``, ``failed`` and ``lost`` are added below. An acquisition that was not announced yet is released or given
up without an event. An announced ownership is lost.
"""

TRANSITIONS.update({(phase, "unplanned"): RELEASING for phase in TAKING})
TRANSITIONS.update({(phase, "failed"): LOOKING for phase in TAKING})
TRANSITIONS.update({(phase, "lost"): FENCED for phase in TAKING | {OWNED, DRAINING, SAVING}})


class IllegalInput(Exception):
    """The phase of a lease machine does not allow an input: a bug of the driver."""


def following(partition: int, phase: str, event: str) -> str:
    """The next phase, or ``IllegalInput`` with partition, phase and event."""
    found = TRANSITIONS.get((phase, event))
    if found is None:
        raise IllegalInput(
            f"cohort partition {partition}: {event!r} is not allowed while {phase}; a bug of lanes, please report it"
        )
    return found
