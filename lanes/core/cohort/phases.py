"""The phases and transitions of a lease machine. ``docs/model/cohort.pml`` is a smaller model of the same machine.

The numbers in the comments are the steps of ``docs/model/README.md``.
"""

from __future__ import annotations

from typing import Final

IDLE: Final = "idle"  # the plan gives the partition to another member, and no lease is held
LOOKING: Final = "looking"  # 1: read the lease, until it is free
CHECKING: Final = "checking"  # 1: read the state, which is missing after a loss of the bucket
SURVEYING: Final = "surveying"  # 1: find the longest lease that may still hold after the loss of the bucket
GRACE: Final = "grace"  # 1: wait until that lease has expired
ACQUIRING: Final = "acquiring"  # 1: write the lease
CONFIRMING: Final = "confirming"  # 1: read the lease back, because its write had no answer
READING: Final = "reading"  # 2: read the state
FINDING: Final = "finding"  # 2: list the consumers
WRITING: Final = "writing"  # 3: write the epoch and the ledger, fenced by the lease
CLEARING: Final = "clearing"  # 4: delete lower epochs first, where the retention allows one consumer only
CREATING: Final = "creating"  # 4: create the consumer
REFINDING: Final = "refinding"  # 4: list the consumers, because the create found another consumer
VERIFYING: Final = "verifying"  # 5: renew the lease
SWEEPING: Final = "sweeping"  # 4: delete lower epochs last, where the retention allows several consumers
OWNED: Final = "owned"  # 6: handlers run
DRAINING: Final = "draining"  # 9: wait for the input `drained`
SAVING: Final = "saving"  # 9: write the whole ledger, fenced by the lease
RELEASING: Final = "releasing"  # 9: write the released lease
FENCED: Final = "fenced"  # 7: wait for the input `ended`

SEEKING: Final = frozenset({LOOKING, CHECKING, SURVEYING, GRACE, ACQUIRING})
"""The phases before the acquisition of the lease. In ``ACQUIRING``, a write of the lease may be on its way."""

TAKING: Final = frozenset({READING, FINDING, WRITING, CLEARING, CREATING, REFINDING, VERIFYING, SWEEPING})
"""The phases in which the member has the lease, but the consumer is missing or lower consumers exist."""

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
    (FINDING, "missing"): SURVEYING,
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

The code below adds ``unplanned``, ``failed`` and ``lost``. An acquisition that ends before ``LeaseOwned`` has no event.
After ``LeaseOwned``, a failure ends the ownership with ``LeaseLost``.
"""

TRANSITIONS.update({(phase, "unplanned"): RELEASING for phase in TAKING})
TRANSITIONS.update({(phase, "failed"): LOOKING for phase in TAKING})
TRANSITIONS.update({(phase, "lost"): FENCED for phase in TAKING | {OWNED, DRAINING, SAVING}})


class IllegalInput(Exception):
    """Error for an input that the phase of a lease machine does not allow. The cause is a bug of the driver."""


def following(partition: int, phase: str, event: str) -> str:
    """Return the next phase. Raises ``IllegalInput`` if the phase does not allow the event."""
    found = TRANSITIONS.get((phase, event))
    if found is None:
        raise IllegalInput(
            f"cohort partition {partition}: {event!r} is not allowed while {phase}; a bug of lanes, please report it"
        )
    return found
