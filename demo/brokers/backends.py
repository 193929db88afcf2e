"""Functions that make the broker objects of a run: the parent's ``Broker``, and a worker's source and dead letters.

A function imports an adapter only when it uses the adapter, so that one installed adapter is enough.
"""

from __future__ import annotations

from typing import Any, Final

import lanes
from demo.brokers.broker import Broker
from demo.config import DemoConfig, WorkerConfig

SESSION: Final = 6.0
"""Seconds without a heartbeat after which the broker removes a member of a classic group. Under KIP-848 the broker's
own setting decides."""

HEARTBEAT: Final = 0.5
"""Seconds between two heartbeats of a member of a classic group."""

TIME_BUDGET: Final = 1.0
"""Seconds for which a member of a subscription holds a partition, although another member waits."""

_STRATEGY: Final = {"classic": "range", "cooperative": "cooperative-sticky"}

_STRATEGY_OF_TOPICS: Final = _STRATEGY | {"classic": "roundrobin"}
"""Strategy over several topics. ``range`` would give partition 0 of every topic to the same member."""


def broker_of(config: DemoConfig, name: str) -> Broker:
    """Return the broker object of the parent, not connected. The names of its topics or streams contain ``name``."""
    if config.broker == "kafka":
        from demo.brokers.kafka import KafkaBroker

        return KafkaBroker(config.server, name, config.shared, config.width)
    if config.ranges:
        from demo.brokers.ranges import RangedBroker

        return RangedBroker(config.server, name, config.shared, config.processes)
    if config.broker == "postgres":
        from demo.brokers.postgres import PostgresBroker

        return PostgresBroker(config.server, name, config.shared)
    if config.in_group:
        from demo.brokers.cohort import CohortBroker

        return CohortBroker(config.server, name, config.shared, config.retention, config.width)
    from demo.brokers.jetstream import JetStreamBroker

    return JetStreamBroker(config.server, name, width=config.width)


def source_of(config: WorkerConfig) -> lanes.Source:
    """Return the source of a worker."""
    queue = lanes.PartitionedQueue(config.queue, config.width)
    if config.broker == "kafka":
        from lanes_kafka import KafkaSource

        return KafkaSource(member_settings(config), topics=queue)
    if config.broker == "postgres":
        return _subscription(config)
    from lanes_jetstream import JetStreamSource, subject_token

    if config.lease:
        from lanes_jetstream.cohort.settings import Cohort

        return JetStreamSource(
            config.server,
            stream=config.stream,
            cohort=Cohort(config.durable, member=config.member, lease=config.lease),
            key=subject_token(-1),
            queue=queue if config.width > 1 else None,
        )
    return JetStreamSource(
        config.server,
        stream=config.stream,
        durable=config.durable,
        key=subject_token(-1),
        queue=queue if config.width > 1 else None,
        ack_wait=config.ack_wait,
    )


def _subscription(config: WorkerConfig) -> lanes.Source:
    from psycopg.conninfo import make_conninfo

    from demo.brokers.postgres import application_name
    from lanes_postgres import AdvisoryLocks, Log, PostgresSource, RangeMap

    # The session of the locks has the member's name, so the parent sees the owners as the server does.
    address = make_conninfo(config.server, application_name=application_name(config.stream, config.member))
    log = Log(config.stream, schema=config.stream)
    return PostgresSource(
        config.server,
        log,
        subscription=config.durable,
        time_budget=TIME_BUDGET,
        locks=AdvisoryLocks(address, lease=config.lease),
        ranges=RangeMap(log, group=config.durable).member(config.member) if config.ranges else None,
    )


def renewal_time(config: DemoConfig) -> float:
    """Return the seconds that a member has for a renewal of its lease or a heartbeat of its session.

    The time begins when the renewal is due, and ends when the member has lost its partitions.
    """
    if config.broker == "kafka":
        return SESSION - HEARTBEAT
    # A member renews after a third of the lease, and gives the lease up a sixth of the lease before its end.
    return config.lease / 2


def dead_letters_of(config: WorkerConfig) -> lanes.DeadLetters:
    """Return the dead letter store of a worker."""
    if config.broker == "kafka":
        from lanes_kafka import KafkaDeadLetters

        return KafkaDeadLetters({"bootstrap.servers": config.server}, config.dead_subject)
    if config.broker == "postgres":
        from lanes_postgres import PostgresDeadLetters

        return PostgresDeadLetters(config.server, config.dead_subject, schema=config.stream)
    from lanes_jetstream import JetStreamDeadLetters

    return JetStreamDeadLetters(config.server, config.dead_subject)


def member_settings(config: WorkerConfig) -> dict[str, Any]:
    """Return the client settings of a member of the Kafka group. ``client.id`` is the member's name in the history."""
    settings: dict[str, Any] = {
        "bootstrap.servers": config.server,
        "group.id": config.durable,
        "client.id": config.member,
        # The client library must not write the last line of the worker's stderr, because the parent reports that line.
        "log_level": 0,
    }
    if config.protocol == "consumer":
        return settings | {"group.protocol": "consumer"}
    return settings | {
        "partition.assignment.strategy": (_STRATEGY if config.width == 1 else _STRATEGY_OF_TOPICS)[config.protocol],
        "session.timeout.ms": int(SESSION * 1000),
        "heartbeat.interval.ms": int(HEARTBEAT * 1000),
    }
