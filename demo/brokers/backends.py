"""Which broker a run is on: the parent's side, and the source and the dead letters of a worker.

Adapters are imported when they are used, so that one of them is enough.
"""

from __future__ import annotations

from typing import Any, Final

import lanes
from demo.brokers.broker import Broker
from demo.config import DemoConfig, WorkerConfig

SESSION: Final = 6.0
"""Seconds without a heartbeat after which a member of a classic group is taken for dead; under KIP-848 the broker has
this setting."""

HEARTBEAT: Final = 0.5
"""Seconds between two heartbeats."""

_STRATEGY: Final = {"classic": "range", "cooperative": "cooperative-sticky"}


def broker_of(config: DemoConfig, name: str) -> Broker:
    """The parent's side of the broker; ``name`` is a part of all names on it. Connects to nothing yet."""
    if config.broker == "kafka":
        from demo.brokers.kafka import KafkaBroker

        return KafkaBroker(config.server, name, config.shared)
    if config.in_group:
        from demo.brokers.cohort import CohortBroker

        return CohortBroker(config.server, name, config.shared, config.retention)
    from demo.brokers.jetstream import JetStreamBroker

    return JetStreamBroker(config.server, name)


def source_of(config: WorkerConfig) -> lanes.Source:
    """Make the source that a worker reads."""
    if config.broker == "kafka":
        from lanes_kafka import KafkaSource

        return KafkaSource(member_settings(config), topics=config.stream)
    from lanes_jetstream import JetStreamSource, subject_token

    if config.lease:
        from lanes_jetstream.cohort.settings import Cohort

        return JetStreamSource(
            config.server,
            stream=config.stream,
            cohort=Cohort(config.durable, member=config.member, lease=config.lease),
            key=subject_token(-1),
        )
    return JetStreamSource(
        config.server,
        stream=config.stream,
        durable=config.durable,
        key=subject_token(-1),
        ack_wait=config.ack_wait,
    )


def dead_letters_of(config: WorkerConfig) -> lanes.DeadLetters:
    """Where a worker puts what it gives up."""
    if config.broker == "kafka":
        from lanes_kafka import KafkaDeadLetters

        return KafkaDeadLetters({"bootstrap.servers": config.server}, config.dead_subject)
    from lanes_jetstream import JetStreamDeadLetters

    return JetStreamDeadLetters(config.server, config.dead_subject)


def member_settings(config: WorkerConfig) -> dict[str, Any]:
    """The settings of a member of the Kafka group, which the broker knows by the name it has in the history."""
    settings: dict[str, Any] = {
        "bootstrap.servers": config.server,
        "group.id": config.durable,
        "client.id": config.member,
        # What the client itself prints in an outage is no word of the worker's.
        "log_level": 0,
    }
    if config.protocol == "consumer":
        return settings | {"group.protocol": "consumer"}
    return settings | {
        "partition.assignment.strategy": _STRATEGY[config.protocol],
        "session.timeout.ms": int(SESSION * 1000),
        "heartbeat.interval.ms": int(HEARTBEAT * 1000),
    }
