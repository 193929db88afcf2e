"""The constructors of every backend refuse an argument of a wrong kind; no broker runs."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

import memsource
from lanes import ConfigError, Consumer, History, Journal, Message, Settings, Source
from lanes_jetstream import Cohort, CohortStream, JetStreamDeadLetters, JetStreamSource
from lanes_kafka import KafkaDeadLetters, KafkaSource
from lanes_postgres import Columns, Positions, PostgresAttempts, Record

CONFIG = {"bootstrap.servers": "localhost:9092", "group.id": "billing"}
SERVER = "nats://localhost:4222"
DURABLE = {"server": SERVER, "stream": "orders", "durable": "billing", "key": None}

WRONG: list[Any] = [5, "no flag", {"a": 1}, [1], True, None, dict, object()]

ARGUMENTS: list[tuple[Any, dict[str, Any], str, tuple[Any, ...]]] = [
    (KafkaSource, {"config": CONFIG, "topics": "orders"}, "config", ()),
    (KafkaSource, {"config": CONFIG}, "topics", ()),  # no topic has a name with a space
    (KafkaSource, {"config": CONFIG, "topics": "orders"}, "key", (dict,)),
    (KafkaSource, {"config": CONFIG, "topics": "orders"}, "start", (None,)),
    (KafkaSource, {"config": CONFIG, "topics": "orders"}, "out_of_range", (None,)),
    (KafkaSource, {"config": CONFIG, "topics": "orders"}, "commit_metadata", (True,)),
    (KafkaSource, {"config": CONFIG, "topics": "orders"}, "rebuilds", (5,)),
    (KafkaSource, {"config": CONFIG, "topics": "orders"}, "consumer_target", (5, None)),
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
    (Cohort, {}, "name", (None,)),
    (Cohort, {"name": "billing"}, "member", (None,)),
    (Cohort, {"name": "billing"}, "namespace", ()),
    (Cohort, {"name": "billing"}, "partitions", (5, None)),
    (Cohort, {"name": "billing"}, "many_partitions", (True,)),
    (Cohort, {"name": "billing"}, "create", (None,)),
    (Cohort, {"name": "billing"}, "key_refines_partition", (True,)),
    (Cohort, {"name": "billing"}, "lease", (5,)),
    (Cohort, {"name": "billing"}, "weight", (5,)),
    (Cohort, {"name": "billing"}, "active_members", (5, None)),
    (Cohort, {"name": "billing"}, "consumer_target", (5, None)),
    (Cohort, {"name": "billing"}, "default_consumer_target", (5, None)),
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
def test_every_public_class_refuses_arguments_of_a_wrong_type(
    kind: Any, others: dict[str, Any], name: str, valid: tuple[Any, ...]
) -> None:
    for value in WRONG:
        if name == "server" and isinstance(value, str):
            continue
        if any(value is each or (value == each and type(value) is type(each)) for each in valid):
            kind(**{**others, name: value})
            continue
        with pytest.raises(ConfigError):
            kind(**{**others, name: value})


async def handler(message: Message) -> None:
    """A handler that is never called."""


@pytest.mark.parametrize(
    ("source", "settings", "said"),
    [
        (
            KafkaSource(CONFIG | {"max.poll.interval.ms": 46_000}, topics="orders"),
            Settings(),
            "drain_timeout=30 and grace=2, .* exceed the 36.8 s that .* raise max.poll.interval.ms",
        ),
        (
            JetStreamSource(SERVER, stream="orders", durable="billing", key=None, shared=True),
            Settings(),
            'order="key": several processes receive from one consumer of jetstream orders/billing',
        ),
        (
            JetStreamSource(SERVER, stream="orders", cohort="billing", key=None, max_ack_pending=10),
            Settings(concurrency=5, max_in_flight=20),
            "max_in_flight=20 is above the 10 unsettled messages",
        ),
        (
            JetStreamSource(SERVER, stream="orders", cohort=Cohort("billing", partitions=4), key=None),
            Settings(order="serial", concurrency=1),
            'order="serial": .* has 4 partitions',
        ),
    ],
    ids=["drain", "shared", "bound", "serial"],
)
def test_settings_that_contradict_the_source_are_refused_before_a_connection(
    source: Source, settings: Settings, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Consumer(source, handler, settings=settings)


@pytest.mark.parametrize(
    ("maker", "arguments", "said"),
    [
        (KafkaSource, {"config": CONFIG, "topic": "a"}, "KafkaSource has no option topic=: did you mean topics=?"),
        (
            JetStreamSource,
            {**DURABLE, "filter_subjects": "a"},
            "JetStreamSource has no option filter_subjects=: did you mean filter_subject=?",
        ),
        (Cohort, {"members": "b"}, "Cohort has no option members=: did you mean member=?"),
        (CohortStream, {"subjects": "a.*"}, "CohortStream has no option subjects=: did you mean subject=?"),
        (Record, {"value": b"", "ky": "a"}, "lanes_postgres.Record has no option ky=: did you mean key=?"),
        (Record, {"key": "a"}, "lanes_postgres.Record lacks value=: write lanes_postgres.Record(value)"),
        (Columns, {"kye": "a"}, "lanes_postgres.Columns has no option kye=: did you mean key=?"),
    ],
)
def test_an_unknown_argument_is_refused_with_a_similar_name(maker: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        maker(**arguments)
    assert str(refused.value).startswith(said)


def test_a_named_tuple_with_checked_names_stays_a_named_tuple() -> None:
    record = Record(b"1", "a", subject="orders")
    assert tuple(record) == (b"1", "a", "orders", (), None)
    assert pickle.loads(pickle.dumps(record)) == copy.copy(record) == record
    assert record._replace(key="b") == Record._make((b"1", "b", "orders", (), None))
    assert list(inspect.signature(Record).parameters) == ["value", "key", "subject", "headers", "time"]


@pytest.mark.parametrize(
    ("maker", "arguments"),
    [(KafkaSource, {"config": CONFIG, "topics": "a"}), (JetStreamSource, DURABLE), (Cohort, {"member": "b"})],
    ids=["a group", "a durable", "a cohort"],
)
def test_ranges_of_another_broker_are_refused_with_the_reason(maker: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no option ranges=: the broker places keys by a hash of its own"):
        maker(**arguments, ranges="r")


@pytest.mark.parametrize(
    ("maker", "arguments", "said"),
    [
        (
            JetStreamSource,
            {"server": SERVER, "stream": "orders", "durable": "billing"},
            "JetStreamSource lacks key=: write JetStreamSource(server, stream=…, key=…). key= is subject_token(1) for",
        ),
        (JetStreamDeadLetters, {"server": SERVER}, "JetStreamDeadLetters lacks subject=: write "),
        (KafkaSource, {"config": CONFIG}, "KafkaSource lacks topics=: write KafkaSource(config, topics=…)"),
        (KafkaDeadLetters, {}, "KafkaDeadLetters lacks config=, topic=: write KafkaDeadLetters(config, topic)"),
        (CohortStream, {}, "CohortStream lacks subject=: write CohortStream(subject=…)"),
        (Consumer, {"handler": handler}, "lanes.Consumer lacks source=: write lanes.Consumer(source, handler)"),
        (History, {}, "lanes.History lacks directory=: write lanes.History(directory)"),
        (Journal, {}, "lanes.Journal lacks directory=: write lanes.Journal(directory)"),
        (PostgresAttempts, {"subscription": "billing"}, "lanes_postgres.PostgresAttempts lacks connect=: write "),
        (Positions, {}, "lanes_postgres.Positions lacks subscription=: write lanes_postgres.Positions(subscription)"),
        (memsource.MemorySource, {}, "MemorySource lacks broker=: write MemorySource(broker)"),
    ],
)
def test_a_missing_argument_is_refused_with_the_whole_call(maker: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        maker(**arguments)
    assert str(refused.value).startswith(said)
