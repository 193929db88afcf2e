"""Ordered concurrency for consumers of Kafka, JetStream and PostgreSQL: in order within a key, in parallel across keys.

Reading order: ``consumer``, ``config``, ``arguments``, ``handlers``, ``source``, ``retention``, ``errors``,
``dead_letter``, ``attempts``, ``events``, ``process``, ``clock``, ``loops``, ``line_limit``; then the packages
``core``, ``ring``, ``outputs``, ``queues``, ``workers``, ``runtime``, ``observe``, ``history``, ``ownership``,
``cohort``, ``dead_letters``, ``web``, ``service``, ``cli``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lanes.attempts import Attempt, Attempts, AttemptState
from lanes.config import Retry, Settings
from lanes.consumer import Consumer
from lanes.core.types import Message, Partition, PartitionId, PartitionKey
from lanes.dead_letter import DeadLetter
from lanes.errors import ConfigError, ContractError, HandlerHalted, LanesError, MessageError, Nak, SourceError, Term
from lanes.events import GroupEvent
from lanes.handlers import BatchOutcomes, Decode, Handler
from lanes.history.journal import Journal
from lanes.history.recorder import History
from lanes.observe.health import Health
from lanes.observe.status import Capacity, Expiring, Oldest, PartitionStatus, QueueStatus, Status
from lanes.outputs.publisher import Output, Publisher
from lanes.process import main, run, serve
from lanes.queues.partitioned import PartitionedQueue, Route
from lanes.queues.stranded import Stranded
from lanes.runtime.garbage import tune_gc
from lanes.source import DeadLetters, KeptLog, Source, SourceTraits

__version__: str

__all__ = [
    "Attempt",
    "AttemptState",
    "Attempts",
    "BatchOutcomes",
    "Capacity",
    "ConfigError",
    "Consumer",
    "ContractError",
    "DeadLetter",
    "DeadLetters",
    "Decode",
    "Expiring",
    "GroupEvent",
    "Handler",
    "HandlerHalted",
    "Health",
    "History",
    "Journal",
    "KeptLog",
    "LanesError",
    "Message",
    "MessageError",
    "Nak",
    "Oldest",
    "Output",
    "Partition",
    "PartitionId",
    "PartitionKey",
    "PartitionStatus",
    "PartitionedQueue",
    "Publisher",
    "QueueStatus",
    "Retry",
    "Route",
    "Settings",
    "Source",
    "SourceError",
    "SourceTraits",
    "Status",
    "Stranded",
    "Term",
    "main",
    "run",
    "serve",
    "tune_gc",
]

if not TYPE_CHECKING:  # otherwise a type checker would accept every name
    from lanes.arguments import package_of

    def __getattr__(name: str) -> str:
        module = package_of(name)
        if module is not None:
            # For an AttributeError, Python would print a text of its own at `from lanes import …`.
            raise ImportError(f"{name} is not in {__name__}: write from {module} import {name}")
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Import here, because the import takes a fifth of the time of ``import lanes``, and few programs ask.
        from importlib.metadata import version

        return version("lanes-runtime")
