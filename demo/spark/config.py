"""The configuration of a run on Spark, and of its driver and workers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from demo.child import told
from demo.config import ADDRESS, POSTGRES, at_least, check_run
from demo.errors import DemoError
from demo.faults import Faults

VARIABLE: Final = "LANES_DEMO_REPLAY"
"""Environment variable with the configuration of driver and workers."""

ATTEMPTS: Final = 4
"""Most attempts of a task. A Spark cluster has the same default."""

_PARTITIONS_LIMIT: Final = 100
_CORES_LIMIT: Final = 64
_CONNECTIONS_LIMIT: Final = 200


@dataclass(frozen=True, kw_only=True)
class SparkConfig:
    """The configuration of one run on Spark.

    Raises ``DemoError`` for an unusable value.

    Attributes:
        kafka: Addresses of Kafka brokers.
        postgres: URL of a PostgreSQL server whose user may create a schema.
        jars: Paths of the jars of Spark's Kafka connector; empty = Spark's own folder or settings provide them.
        data: Path of a log (see ``demo.events``); None = a log that the demo generates from ``seed``.
        events: Maximum number of events of the log; None = all events.
        seed: Seed of the generated log.
        latency: Mean time of an approval in seconds.
        concurrency: Maximum number of running handlers in a task.
        max_in_flight: Bound on delivered, unsettled messages in a task.
        partitions: Number of partitions of the topic.
        batches: Approximate number of batches of the log.
        cores: Number of cores of Spark. Each core runs one worker.
        connections: Number of PostgreSQL connections of each task.
        kill_worker_at: Fraction of the events after which the demo kills a worker with -9; None = no kill.
        kill_driver_at: Fraction of the events after which the demo kills the driver with -9; None = no kill.
        stall_timeout: Seconds without progress after which the run fails. The start of a JVM needs part of this time.
        keep: Folder for journal and log; None = the demo removes these files.
        name: Name of the topics and the schema; None = random names.
        faults: Shares of the events that fail.
        driver_command: Command that starts a driver.
    """

    kafka: str = field(repr=False)
    postgres: str = field(repr=False)
    jars: Sequence[str] = ()
    data: Path | None = None
    events: int | None = None
    seed: int = 1
    latency: float = 0.010
    concurrency: int = 500
    max_in_flight: int = 2_000
    partitions: int = 4
    batches: int = 8
    cores: int = 2
    connections: int = 12
    kill_worker_at: float | None = 0.25
    kill_driver_at: float | None = 0.6
    stall_timeout: float = 300.0
    keep: Path | None = None
    name: str | None = None
    faults: Faults = field(default_factory=Faults)
    driver_command: Sequence[str] = (sys.executable, "-m", "demo.spark.driver")

    def __post_init__(self) -> None:
        # The error omits the value, because a password in an unreadable value cannot be found and removed.
        if not all(ADDRESS.fullmatch(one) for one in self.kafka.split(",")):
            raise DemoError("--kafka: must be the address of a Kafka broker, such as 127.0.0.1:9092")
        if not POSTGRES.fullmatch(self.postgres):
            raise DemoError(
                "--postgres: must be the URL of a server, such as postgresql://me@127.0.0.1:5432/test; write @, / and "
                "% in a password as %40, %2F and %25"
            )
        for jar in self.jars:
            if not Path(jar).is_file() or "," in jar:
                raise DemoError(
                    f"--jars: {jar}: no such file, or a comma in its path; pass the paths of Spark's Kafka connector"
                )
        for name, value, most in (
            ("partitions", self.partitions, _PARTITIONS_LIMIT),
            ("batches", self.batches, 1_000),
            ("cores", self.cores, _CORES_LIMIT),
            ("connections", self.connections, _CONNECTIONS_LIMIT),
        ):
            if not 1 <= value <= most:
                raise DemoError(f"{name}={value}: must be 1 to {most}")
        for name, at in (("kill_worker_at", self.kill_worker_at), ("kill_driver_at", self.kill_driver_at)):
            if at is not None and not 0 < at < 1:
                raise DemoError(f"{name}={at}: must be a fraction between 0 and 1, or None for no kill")
        at_least("latency", self.latency, 0.0)
        at_least("stall_timeout", self.stall_timeout, 1.0)
        if isinstance(self.driver_command, str):
            raise DemoError(f"driver_command={self.driver_command!r}: must be a sequence of words, not a string")
        check_run(self.events, self.name, self.concurrency, self.max_in_flight)


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """The configuration of a driver and its workers.

    The parent passes the configuration as JSON in the environment, because every user can read the arguments of a
    process.

    Attributes:
        kafka: Addresses of Kafka brokers.
        postgres: URL of the PostgreSQL server.
        jars: Paths of the jars of Spark's Kafka connector.
        topic: Topic of the events.
        dead_topic: Topic of the dead letters.
        schema: Schema of the tables, and name of the subscription.
        service: Address of the approval service.
        token: Secret that opens the approval service.
        journal: Folder of the journal.
        checkpoint: Folder of the checkpoint.
        scratch: Folder for Spark's temporary files.
        cores: Number of cores of Spark.
        connections: Number of PostgreSQL connections of each task.
        rows_per_batch: Maximum number of rows of a batch.
        concurrency: Maximum number of running handlers in a task.
        max_in_flight: Bound on delivered, unsettled messages in a task.
        fail_every: Average number of events for each event that fails once or twice; 0 = no event fails.
        poison_every: Average number of events for each event that always fails; 0 = no event always fails.
    """

    kafka: str = field(repr=False)
    postgres: str = field(repr=False)
    jars: Sequence[str]
    topic: str
    dead_topic: str
    schema: str
    service: str
    token: str = field(repr=False)
    journal: str
    checkpoint: str
    scratch: str
    cores: int
    connections: int
    rows_per_batch: int
    concurrency: int
    max_in_flight: int
    fail_every: int
    poison_every: int

    @property
    def faults(self) -> Faults:
        """Shares of the events that fail."""
        return Faults(fail_every=self.fail_every, poison_every=self.poison_every)

    def environment(self) -> dict[str, str]:
        """Return the environment of this process with the configuration added. Spark's files go to ``scratch``."""
        # Without PYSPARK_PYTHON, the workers would run the first python3 of PATH.
        mine = {VARIABLE: json.dumps(asdict(self)), "PYSPARK_PYTHON": sys.executable, "TMPDIR": self.scratch}
        return {**os.environ, **mine}

    @staticmethod
    def load() -> ReplayConfig:
        """Read the configuration from the environment. Raises ``DemoError`` if it is missing or malformed."""
        return told(ReplayConfig, VARIABLE, "driver", "python -m demo spark")
