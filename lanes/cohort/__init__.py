"""A member of an exclusive cohort, on any server that can store leases.

Reading order: ``leases`` (the contract of a store), ``membership`` (a member), ``roster`` (heartbeat and plan),
``keeper`` (the lease of one partition), ``owned`` (the partitions that a source sees).
"""

from __future__ import annotations

from lanes.cohort.leases import (
    Conflict,
    ConsumerExists,
    Entry,
    EpochConsumer,
    EpochConsumers,
    LeaseStore,
    UnknownResult,
)
from lanes.cohort.membership import CohortSettings, Happened, Membership
from lanes.cohort.owned import MakesMembership, OwnedPartition, OwnedPartitions

__all__ = [
    "CohortSettings",
    "Conflict",
    "ConsumerExists",
    "Entry",
    "EpochConsumer",
    "EpochConsumers",
    "Happened",
    "LeaseStore",
    "MakesMembership",
    "Membership",
    "OwnedPartition",
    "OwnedPartitions",
    "UnknownResult",
]
