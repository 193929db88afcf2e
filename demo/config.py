"""The configuration of a run, and of its workers."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args
from urllib.parse import urlsplit

from demo.child import told
from demo.errors import DemoError
from demo.faults import Faults
from demo.progress import Progress
from lanes.config import Retry, Settings
from lanes.errors import ConfigError

ATTEMPTS: Final = 5
BACKOFF: Final = 0.05
"""Longest delay of the second attempt, in seconds. A small value delays a case only briefly."""

HOOK_EVERY: Final = 0.05
"""Minimum time in seconds between two calls of a hook."""

Hook = Callable[[Progress], Awaitable[None]]
"""Function that receives the progress during publishing and during the main part. The run waits for each call."""

Script = Callable[[Any], Awaitable[None]]
"""A scenario: a function that receives the ``Members`` of a run and publishes all events."""

BrokerName = Literal["jetstream", "kafka", "postgres"]
"""The broker that the demo runs on."""

Protocol = Literal["classic", "cooperative", "consumer"]
"""The protocol of a Kafka group: classic by range, classic by cooperative-sticky, or KIP-848."""

Retention = Literal["limits", "workqueue", "interest"]
"""Messages that a stream keeps: all, the unacknowledged, or those that a current consumer has not acknowledged."""

VARIABLE: Final = "LANES_DEMO_WORKER"
"""Environment variable with the configuration of a worker."""

ADDRESS: Final = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
_PASSED: Final = r"(?:[^\s@/%]|%(?!00)[0-9A-Fa-f]{2})"
POSTGRES: Final = re.compile(rf"postgres(?:ql)?://(?:{_PASSED}*@)?(?:{_PASSED}|/)+")
"""URLs of PostgreSQL. The client's error about an unreadable or misread URL may contain the password."""

_PARTITIONS_LIMIT: Final = 100
_WIDTH_LIMIT: Final = 64
_MEMBERS: Final[dict[BrokerName, int]] = {"kafka": 3, "jetstream": 1, "postgres": 3}
_LEAST: Final[dict[BrokerName, int]] = {"kafka": 2, "jetstream": 1, "postgres": 2}
_PARTITIONS: Final[dict[BrokerName, int]] = {"kafka": 8, "jetstream": 64, "postgres": 64}
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,32}")


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The configuration of one run.

    Raises ``DemoError`` for an unusable value.

    Attributes:
        server: URLs of NATS servers with JetStream, addresses of Kafka brokers, or the URL of a PostgreSQL server.
            Commas separate several servers.
        data: Path of a log (see ``demo.events``); None = a log that the demo generates from ``seed``.
        events: Maximum number of events of the log; None = all events.
        seed: Seed of the generated log.
        latency: Mean time of an approval in seconds. Each approval takes 0.5 to 1.5 times the mean.
        concurrency: Maximum number of running handlers, as in ``lanes.Settings``.
        max_in_flight: Bound on delivered, unsettled messages, as in ``lanes.Settings``.
        kill_at: Rising fractions between 0 and 1. The demo kills the worker when the ledger has stored such a fraction
            of the events. A run with a group or a cohort ignores ``kill_at``.
        serial_seconds: Length of the one-at-a-time sample in seconds; 0 = no sample.
        stall_timeout: Seconds without progress, with a server that answers, after which the run fails.
        ack_wait: ``ack_wait`` of the durable consumer in seconds.
        keep: Folder for ledger, history and log; None = the demo removes these files.
        name: Name of the streams or topics; None = a random name.
        faults: Shares of the events that fail.
        worker_command: Command that starts a worker. The worker reads its configuration from the environment.
        on_progress: Callback that may disturb the run, for example by a kill of the server or a freeze of the worker.
        broker: Kind of broker.
        members: Number of processes; None = 1 on JetStream, otherwise 3.
        partitions: Number of partitions that the processes share; None = 8 on Kafka, otherwise 64. With a
            ``width`` above 1, the topics of Kafka share this number, and have at least one each. A JetStream cohort
            then has one partition for each physical queue.
        width: Number of physical queues for the events; the case of an event selects the queue. 1 = a plain stream,
            topic or log. A log of PostgreSQL is one queue.
        protocol: Protocol of the Kafka group.
        ranges: Whether the members own ranges of keys, which move during the run. Ranges exist only on PostgreSQL.
        lease: Lease of the JetStream cohort, or of the advisory locks on PostgreSQL, in seconds.
        retention: Retention of the cohort's stream. ``"interest"`` loses events published before a member joins.
        route: Function from the name of a member to its server address; None = all members use ``server``.
        script: Scenario of the group; None = the scenario that kills, adds, freezes and stops one member each.
    """

    server: str = field(repr=False)
    data: Path | None = None
    events: int | None = None
    seed: int = 1
    latency: float = 0.010
    concurrency: int = 500
    max_in_flight: int = 2_000
    kill_at: Sequence[float] = (0.5,)
    serial_seconds: float = 3.5
    stall_timeout: float = 45.0
    ack_wait: float = 30.0
    keep: Path | None = None
    name: str | None = None
    faults: Faults = field(default_factory=Faults)
    worker_command: Sequence[str] = (sys.executable, "-m", "demo.workers.worker")
    on_progress: Hook | None = None
    broker: BrokerName = "jetstream"
    members: int | None = None
    partitions: int | None = None
    width: int = 1
    protocol: Protocol = "classic"
    ranges: bool = False
    lease: float = 10.0
    retention: Retention = "limits"
    route: Callable[[str], str] | None = None
    script: Script | None = None

    @property
    def processes(self) -> int:
        """Number of members at the start of the run."""
        return self.members or _MEMBERS[self.broker]

    @property
    def shared(self) -> int:
        """Number of partitions that the members share. Each physical queue has the same number of partitions."""
        wanted = self.partitions or _PARTITIONS[self.broker]
        if self.width == 1:
            return wanted
        return self.width * (math.ceil(wanted / self.width) if self.broker == "kafka" else 1)

    @property
    def in_group(self) -> bool:
        """Whether the members are a group or a cohort."""
        return self.broker != "jetstream" or self.processes > 1

    @property
    def waits_for_members(self) -> bool:
        """Whether an event published before the first member joins would be lost."""
        return self.broker == "jetstream" and self.in_group and self.retention == "interest"

    def __post_init__(self) -> None:
        if self.broker not in get_args(BrokerName):
            raise DemoError(f"broker={self.broker!r}: must be {_choice(BrokerName)}")
        if self.protocol not in get_args(Protocol):
            raise DemoError(f"protocol={self.protocol!r}: must be {_choice(Protocol)}")
        if self.retention not in get_args(Retention):
            raise DemoError(f"retention={self.retention!r}: must be {_choice(Retention)}")
        if self.waits_for_members and self.serial_seconds > 0:
            raise DemoError(
                f"serial_seconds={self.serial_seconds!r} with retention='interest': the stream keeps no events before "
                "the members join, so a serial sample has no events; set serial_seconds=0"
            )
        if self.partitions is not None and not 1 <= self.partitions <= _PARTITIONS_LIMIT:
            raise DemoError(f"partitions={self.partitions}: must be 1 to {_PARTITIONS_LIMIT}")
        if not 1 <= self.width <= _WIDTH_LIMIT:
            raise DemoError(f"width={self.width}: must be 1 to {_WIDTH_LIMIT} physical queues, such as 4")
        if self.members is not None and not _LEAST[self.broker] <= self.members <= self.shared:
            raise DemoError(
                f"members={self.members}: must be {_LEAST[self.broker]} to {self.shared}, because the demo "
                "kills a member, and each member needs a partition"
            )
        # The error omits the value, because a password in an unreadable value cannot be found and removed.
        if self.broker == "kafka" and not all(ADDRESS.fullmatch(one) for one in self.server.split(",")):
            raise DemoError("--server: must be the address of a Kafka broker, such as 127.0.0.1:9092")
        if self.broker == "postgres" and not POSTGRES.fullmatch(self.server):
            raise DemoError(
                "--server: must be the URL of a PostgreSQL server, such as postgresql://me@127.0.0.1:5432/test; write "
                "@, / and % in a password as %40, %2F and %25"
            )
        if self.broker == "postgres" and self.width > 1:
            raise DemoError(f"width={self.width}: a log of PostgreSQL is one queue; leave width out")
        if self.ranges and self.broker != "postgres":
            raise DemoError(f'ranges=True with broker={self.broker!r}: only a log has ranges; use broker="postgres"')
        if self.broker == "jetstream" and not all(_is_url(url) for url in self.server.split(",")):
            raise DemoError("--server: must be the URL of a NATS server, such as nats://127.0.0.1:4222")
        at_least("latency", self.latency, 0.0)
        at_least("serial_seconds", self.serial_seconds, 0.0)
        at_least("stall_timeout", self.stall_timeout, 1.0)
        at_least("ack_wait", self.ack_wait, 1.0)
        at_least("lease", self.lease, 3.0)
        if any(not 0 < at < 1 for at in self.kill_at) or list(self.kill_at) != sorted(set(self.kill_at)):
            raise DemoError(f"kill_at={list(self.kill_at)}: must be rising fractions between 0 and 1, such as 0.5")
        if isinstance(self.worker_command, str):
            raise DemoError(f"worker_command={self.worker_command!r}: must be a sequence of words, not a string")
        check_run(self.events, self.name, self.concurrency, self.max_in_flight)


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """The configuration of a worker process.

    The parent passes the configuration as JSON in the environment, because every user can read the arguments of a
    process.

    Attributes:
        server: Address of the broker.
        stream: Name of the stream, topic, or log and its schema.
        durable: Name of the durable consumer, the group, the cohort or the subscription.
        dead_subject: Subject or topic of the dead letters, or their name.
        service: Address of the approval service.
        token: Secret that opens the approval service.
        history: Folder of the history segments.
        member: Name of this worker in the history.
        concurrency: Maximum number of running handlers.
        max_in_flight: Bound on delivered, unsettled messages.
        ack_wait: ``ack_wait`` of the durable consumer in seconds.
        seconds: Length of the one-at-a-time sample in seconds.
        fail_every: Average number of events for each event that fails once or twice; 0 = no event fails.
        poison_every: Average number of events for each event that always fails; 0 = no event always fails.
        broker: Kind of broker.
        protocol: Protocol of the Kafka group.
        lease: Lease in a cohort, or of the advisory locks on PostgreSQL, in seconds; 0 without a lease.
        queue: Name of the logical queue: the topic, or on JetStream the subject before the case.
        width: Number of physical queues; 1 is the plain stream or topic.
        ranges: Whether the worker owns ranges of keys.
    """

    server: str = field(repr=False)
    stream: str
    durable: str
    dead_subject: str
    service: str
    token: str = field(repr=False)
    history: str
    member: str
    concurrency: int
    max_in_flight: int
    ack_wait: float
    seconds: float
    fail_every: int
    poison_every: int
    broker: BrokerName = "jetstream"
    protocol: Protocol = "classic"
    lease: float = 0.0
    queue: str = ""
    width: int = 1
    ranges: bool = False

    @property
    def faults(self) -> Faults:
        """Shares of the events that fail."""
        return Faults(fail_every=self.fail_every, poison_every=self.poison_every)

    def environment(self) -> dict[str, str]:
        """Return the environment of this process with the configuration added."""
        return {**os.environ, VARIABLE: json.dumps(asdict(self))}

    @staticmethod
    def load() -> WorkerConfig:
        """Read the configuration from the environment. Raises ``DemoError`` if it is missing or malformed."""
        return told(WorkerConfig, VARIABLE, "worker", "python -m demo run")


def settings(concurrency: int, max_in_flight: int) -> Settings:
    """Return the settings of the demo's consumer. Raises ``ConfigError`` for a wrong value."""
    return Settings(
        concurrency=concurrency,
        max_in_flight=max_in_flight,
        retry=Retry(attempts=ATTEMPTS, backoff=BACKOFF),
        drain_timeout=10.0,
    )


def check_run(events: int | None, name: str | None, concurrency: int, max_in_flight: int) -> None:
    """Raise ``DemoError`` for values that no run can use, on any broker."""
    if events is not None and events < 1:
        raise DemoError(f"events={events}: must be 1 or more, or left out for all")
    if name is not None and not _NAME.fullmatch(name):
        raise DemoError(f"name={name!r}: must be 1 to 32 of A-Z a-z 0-9 _ -, because the servers use it in names")
    try:
        settings(concurrency, max_in_flight)
    except ConfigError as error:
        raise DemoError(str(error)) from None


def _choice(kinds: object) -> str:
    return " or ".join(map(repr, get_args(kinds)))


def _is_url(text: str) -> bool:
    if any(c.isspace() for c in text):
        return False
    try:
        parts = urlsplit(text if "://" in text else f"nats://{text}")
        return parts.scheme in ("nats", "tls", "ws", "wss") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def at_least(name: str, value: float, least: float) -> None:
    """Raise ``DemoError`` for a time in seconds that is not finite, or less than ``least``."""
    if not least <= value < math.inf:
        raise DemoError(f"{name}={value!r}: must be a finite number of seconds, {least:g} or more")
