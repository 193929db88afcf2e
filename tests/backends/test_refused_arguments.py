"""An argument of a wrong kind is refused by the constructors of every backend. Needs no broker"""

from __future__ import annotations

from typing import Any

import pytest

from lanes import ConfigError
from lanes_jetstream import Cohort, CohortStream, JetStreamDeadLetters, JetStreamSource
from lanes_kafka import KafkaDeadLetters, KafkaSource

CONFIG = {"bootstrap.servers": "localhost:9092", "group.id": "billing"}
SERVER = "nats://localhost:4222"
DURABLE = {"server": SERVER, "stream": "orders", "durable": "billing", "key": None}

WRONG: list[Any] = [5, "no flag", {"a": 1}, [1], True, None, dict, object()]

ARGUMENTS: list[tuple[Any, dict[str, Any], str, tuple[Any, ...]]] = [
    (KafkaSource, {"config": CONFIG, "topics": "orders"}, "config", ()),
    (KafkaSource, {"config": CONFIG}, "topics", ("no flag",)),
    (KafkaSource, {"config": CONFIG, "topics": "orders"}, "key", (dict,)),
    (KafkaSource, {"config": CONFIG, "topics": "orders"}, "start", (None,)),
    (KafkaSource, {"config": CONFIG, "topics": "orders"}, "out_of_range", (None,)),
    (KafkaSource, {"config": CONFIG, "topics": "orders"}, "commit_metadata", (True,)),
    (KafkaSource, {"config": CONFIG, "topics": "orders"}, "rebuilds", (5,)),
    (KafkaSource, {"config": CONFIG, "topics": "orders"}, "client", ()),
    (KafkaDeadLetters, {"topic": "dead"}, "config", ()),
    (KafkaDeadLetters, {"config": CONFIG}, "topic", ()),
    (JetStreamSource, DURABLE, "server", ()),
    (JetStreamSource, DURABLE, "stream", ()),
    (JetStreamSource, DURABLE, "durable", ()),
    (JetStreamSource, DURABLE, "cohort", (None,)),
    (JetStreamSource, DURABLE, "key", (None, dict)),
    (JetStreamSource, DURABLE, "filter_subject", (None,)),
    (JetStreamSource, DURABLE, "ack_wait", (5, None)),
    (JetStreamSource, DURABLE, "max_ack_pending", (5,)),
    (JetStreamSource, DURABLE, "start", (5,)),
    (JetStreamSource, DURABLE, "takeover", ()),
    (JetStreamSource, DURABLE, "acks", ()),
    (JetStreamSource, DURABLE, "out_of_range", ()),
    (JetStreamSource, DURABLE, "shared", (True,)),
    (JetStreamSource, DURABLE, "start_timeout", (5,)),
    (JetStreamDeadLetters, {"subject": "dead"}, "server", ()),
    (JetStreamDeadLetters, {"server": SERVER}, "subject", ()),
    (Cohort, {}, "name", ()),
    (Cohort, {"name": "billing"}, "member", (None,)),
    (Cohort, {"name": "billing"}, "namespace", ()),
    (Cohort, {"name": "billing"}, "partitions", (5, None)),
    (Cohort, {"name": "billing"}, "many_partitions", (True,)),
    (Cohort, {"name": "billing"}, "create", (None,)),
    (Cohort, {"name": "billing"}, "key_refines_partition", (True,)),
    (Cohort, {"name": "billing"}, "lease", (5,)),
    (Cohort, {"name": "billing"}, "weight", (5,)),
    (Cohort, {"name": "billing"}, "target", (5, None)),
    (Cohort, {"name": "billing"}, "drain_within", (5,)),
    (Cohort, {"name": "billing"}, "overdue", ()),
    (CohortStream, {}, "subject", ()),
    (CohortStream, {"subject": "orders.*"}, "tokens", ([1], None)),
    (CohortStream, {"subject": "orders.*"}, "origin", ("no flag", None)),
    (CohortStream, {"subject": "orders.*"}, "retention", ()),
    (CohortStream, {"subject": "orders.*"}, "replicas", (5,)),
    (CohortStream, {"subject": "orders.*"}, "storage", ()),
]


@pytest.mark.parametrize(
    ("kind", "others", "name", "valid"),
    [pytest.param(*each, id=f"{each[0].__name__}-{each[2]}") for each in ARGUMENTS],
)
def test_a_wrong_kind_is_refused(kind: Any, others: dict[str, Any], name: str, valid: tuple[Any, ...]) -> None:
    for value in WRONG:
        if name == "server" and isinstance(value, str):
            continue
        if any(value is each or (value == each and type(value) is type(each)) for each in valid):
            kind(**{**others, name: value})
            continue
        with pytest.raises(ConfigError):
            kind(**{**others, name: value})
