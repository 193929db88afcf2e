"""Finds or creates the stream and the bucket of a cohort, and checks the facts that must never change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lanes.cohort.roster import patience_of
from lanes.core.cohort.records import CohortConfig
from lanes.errors import ConfigError
from lanes.queues.partitioned import PartitionedQueue
from lanes_jetstream.cohort.lease_store import JetStreamLeaseStore, bucket_name
from lanes_jetstream.cohort.partitioning import (
    DEFAULT_PARTITIONS,
    MOST_PARTITIONS,
    Partitioning,
    QueuePartitioning,
    read_partitioning,
)
from lanes_jetstream.cohort.settings import Cohort, CohortStream
from lanes_jetstream.wire import codes
from lanes_jetstream.wire.answers import ApiError, number
from lanes_jetstream.wire.connection import Connection
from lanes_jetstream.wire.intake import Intake
from lanes_jetstream.wire.keys import KeyFunction, check_varies, whole_subject
from lanes_jetstream.wire.queue_subjects import check_stream, subjects_of
from lanes_jetstream.wire.stream import (
    START_PATIENCE,
    Start,
    find_or_create,
    similar_stream,
    start_fields,
)


@dataclass(frozen=True, slots=True)
class CohortSetup:
    """The stream, the bucket and the fixed facts of a cohort.

    Attributes:
        partitioning: Partitioning of the stream.
        config: Facts of the cohort that never change.
        store: Store of the leases.
        start: Sequence of the first message that a new cohort reads; None = all messages.
        watch_keys: Whether the member must check that each key occurs in one partition only.
        intake: Subjects that the stream stores.
    """

    partitioning: Partitioning | QueuePartitioning
    config: CohortConfig
    store: JetStreamLeaseStore
    start: int | None
    watch_keys: bool
    intake: Intake


async def find_cohort(
    connection: Connection,
    stream: str,
    cohort: Cohort,
    *,
    key: KeyFunction | None,
    start: Start,
    queue: PartitionedQueue | None = None,
) -> CohortSetup:
    """Find or create the stream and the bucket, and check that both fit the cohort and its queue, if any.

    Raises ``ConfigError`` if the stream or the bucket does not fit, and ``SourceError`` if the server does not answer
    or refuses a request.
    """
    with connection.api_errors(f"stream {stream!r}"):
        partitioning, info = await (
            ensure_stream(connection, stream, cohort.create, cohort.partitions or DEFAULT_PARTITIONS)
            if queue is None
            else _find_queue(connection, stream, queue, key)
        )
        watch_keys = partitioning.check_key(key, refines=cohort.key_refines_partition)
        _check_count(stream, cohort, partitioning, info["config"])
        _check_start(stream, start, info["config"])
        if isinstance(partitioning, Partitioning):
            await _check_first_message(connection, stream, partitioning, info)
        sequence = await _first_sequence(connection, stream, start, info)
    store = JetStreamLeaseStore(
        connection,
        bucket_name(stream, cohort.namespace),
        replicas=int(info["config"].get("num_replicas") or 1),
        timeout=patience_of(cohort.lease),
    )
    await store.open()
    config = CohortConfig(
        cohort=cohort.name,
        partitions=partitioning.partitions,
        choice=partitioning.choice,
        detail=f"{partitioning.detail}; key {_described(key)}",
        tokens=partitioning.hashed,
        incarnation=str(info["created"]),
        retention=str(info["config"]["retention"]),
        start=start.astimezone(UTC).isoformat() if isinstance(start, datetime) else str(start),
        stream=stream,
        namespace=cohort.namespace,
    )
    return CohortSetup(partitioning, config, store, sequence, watch_keys, Intake.of(info["config"]))


async def ensure_stream(
    connection: Connection, stream: str, create: CohortStream | None, partitions: int
) -> tuple[Partitioning, Mapping[str, Any]]:
    """Find or create the stream of a cohort.

    Args:
        connection: Connection to the server.
        stream: Name of the stream.
        create: The stream to create; None = the stream must exist.
        partitions: Number of partitions of a new stream.

    Returns:
        The stream's partitioning, and the server's description of the stream.

    Raises:
        ConfigError: The stream does not exist, or does not fit.
        SourceError: The server refused a request.
        NoAnswer: The server did not answer.
    """
    try:
        if create is None:
            info = await connection.find(f"STREAM.INFO.{stream}", codes.STREAM_NOT_FOUND)
        else:
            info, _ = await find_or_create(
                connection,
                stream,
                create.config(stream, partitions),
                what=f"stream {stream!r}",
                remedy="correct create=CohortStream(…), or create the stream yourself",
                patience=START_PATIENCE,
            )
    except ApiError as error:
        raise connection.failed(f"stream {stream!r}", error) from None
    if info is None:
        raise ConfigError(
            f"stream {stream!r} does not exist at {connection.servers}; create it, pass create=CohortStream(…), or "
            f"correct stream=…{await similar_stream(connection, stream)}"
        )
    partitioning = read_partitioning(stream, info["config"])
    if create is not None:
        wanted = read_partitioning(stream, create.config(stream, partitioning.partitions))
        if wanted.rules != partitioning.rules:
            raise ConfigError(
                f"stream {stream!r} exists and is divided by {partitioning.detail}, not by {wanted.detail}; correct "
                "create=CohortStream(…), or name another stream"
            )
    return partitioning, info


async def _find_queue(
    connection: Connection, stream: str, queue: PartitionedQueue, key: KeyFunction | None
) -> tuple[QueuePartitioning, Mapping[str, Any]]:
    """Find the stream of a queue.

    The function checks that the stream stores each physical queue, and that no physical queue has the same key for all
    messages.
    """
    info = await connection.find(f"STREAM.INFO.{stream}", codes.STREAM_NOT_FOUND)
    if info is None:
        raise ConfigError(
            f"stream {stream!r} does not exist at {connection.servers}; create it with the subjects of queue "
            f"{queue.name!r}, or correct stream=…{await similar_stream(connection, stream)}"
        )
    intake = Intake.of(info["config"])
    check_stream(queue, stream, intake)
    for name in queue.names:
        check_varies(key, intake.within(subjects_of(name)), f"physical queue {name!r}")
    return QueuePartitioning(queue), info


def _check_count(
    stream: str, cohort: Cohort, partitioning: Partitioning | QueuePartitioning, config: Mapping[str, Any]
) -> None:
    count = partitioning.partitions
    if cohort.partitions is not None and cohort.partitions != count:
        raise ConfigError(
            f"partitions={cohort.partitions}: stream {stream!r} is divided into {count} partitions "
            f"({partitioning.detail}), and their number cannot change; omit partitions=…, or use another stream"
        )
    if count > MOST_PARTITIONS and not cohort.many_partitions:
        raise ConfigError(
            f"stream {stream!r} is divided into {count} partitions, and more than {MOST_PARTITIONS} consumers slow "
            "the server down; pass many_partitions=True to accept a slower server"
        )
    most = int(config.get("max_consumers") or -1)
    if 0 < most <= count:
        raise ConfigError(
            f"stream {stream!r} has max_consumers={most}, but a cohort of {count} partitions needs one consumer for "
            "each partition, plus one for each partition that moves; raise max_consumers"
        )


def _check_start(stream: str, start: Start, config: Mapping[str, Any]) -> None:
    if config["retention"] == "workqueue" and start != "beginning":
        raise ConfigError(
            f"start={start!r}: stream {stream!r} is a work queue, whose consumers begin at the first message; use "
            '"beginning"'
        )


async def _check_first_message(
    connection: Connection, stream: str, partitioning: Partitioning, info: Mapping[str, Any]
) -> None:
    """Raise ``ConfigError`` if the first message belongs to no partition, because no member would handle it."""
    state = info["state"]
    if not state["messages"]:
        return
    request = {"seq": int(state["first_seq"])}
    answer = await connection.find(f"STREAM.MSG.GET.{stream}", *codes.MESSAGE_NOT_FOUND, request=request)
    if answer is None:
        return  # Another client has removed the message meanwhile.
    tokens = str(answer["message"]["subject"]).split(".")
    places = {rule.partition_token for rule in partitioning.rules}
    found = [number(tokens[place], digits=10) for place in places if place < len(tokens)]
    if not any(each is not None and each < partitioning.partitions for each in found):
        raise ConfigError(
            f"stream {stream!r}: the message at sequence {state['first_seq']} was stored before the transform, so no "
            "member would handle it. Remove all messages before the transform, or pass create=CohortStream(…) for "
            "another stream that sources this stream"
        )


async def _first_sequence(connection: Connection, stream: str, start: Start, info: Mapping[str, Any]) -> int | None:
    """Find the sequence of the first message that a new cohort reads; None = all messages."""
    if start == "beginning":
        return None
    if start == "next":
        return int(info["state"]["last_seq"]) + 1
    if isinstance(start, int):
        return start
    # Create a temporary consumer, which reports the first sequence at or after the time.
    config = {**start_fields(start), "ack_policy": "none", "inactive_threshold": 1_000_000_000, "mem_storage": True}
    answer = await connection.api(f"CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": config})
    await connection.api(f"CONSUMER.DELETE.{stream}.{answer['name']}")
    return int(answer["delivered"]["stream_seq"]) + 1


def _described(key: KeyFunction | None) -> str:
    if key is None or key is whole_subject:
        return "none" if key is None else "whole_subject"
    tokens = getattr(key, "tokens", None)
    return f"subject_token{tuple(tokens)}" if tokens is not None else "of the user's own"
