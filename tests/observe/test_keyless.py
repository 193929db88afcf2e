"""The first messages of a source with ``order="key"`` have no key: one warning names the remedies."""

from __future__ import annotations

from typing import Any

import pytest

from lanes.core.types import Message, Partition, PartitionId
from lanes.errors import MessageError
from lanes.observe.keyless import KeylessWatch
from lanes.source import Delivered
from memsource.memory.broker import MemoryBroker
from memsource.memory.scripted import READER
from memsource.memory.source import MemorySource
from tests.fakes.support import acknowledge, consumer_of, started, until

pytestmark = pytest.mark.anyio


async def handled(count: int, *, keys: list[str | None], **settings: Any) -> None:
    """Handle ``count`` messages whose keys repeat ``keys``."""
    broker = MemoryBroker()
    for number in range(count):
        broker.publish(b"secret", key=keys[number % len(keys)])
    consumer = consumer_of(MemorySource(broker), acknowledge, **settings)
    async with started(consumer) as run:
        await until(lambda: consumer.status().settled == count)
        await run.stop()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "have no key" in line]


async def test_one_warning_names_the_stream_and_the_remedies(caplog: pytest.LogCaptureFixture) -> None:
    await handled(350, keys=[None])
    (line,) = warnings(caplog)
    for word in ["messages of memory have no key", "key=…", 'keyless="one_lane"', 'order="none"']:
        assert word in line


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        ([None] * 60 + ["ann"], {}),
        (["ann"], {}),
        ([None], {"keyless": "one_lane"}),
        ([None], {"order": "none"}),
        ([None], {"order": "partition"}),
    ],
    ids=["mixed", "with keys", "one lane", "no order", "order of the partition"],
)
async def test_keys_or_another_order_cause_no_warning(
    keys: list[str | None], settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    await handled(350, keys=keys, **settings)
    assert warnings(caplog) == []


async def test_fewer_messages_than_a_hundred_are_no_evidence(caplog: pytest.LogCaptureFixture) -> None:
    await handled(99, keys=[None])
    assert warnings(caplog) == []


def test_messages_whose_key_cannot_be_read_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    partition = Partition(PartitionId("orders", 0), READER)
    watch = KeylessWatch("the source")
    broken = Message(partition, 0, None, 1, None, None)
    broken.broken = MessageError("no key")
    assert not watch.delivered(Delivered(partition, [broken] * 200, 200))
    assert caplog.messages == []
    assert watch.delivered(Delivered(partition, [Message(partition, 1, None, 1, None, None)] * 100, 100))
    assert "the source: the first 100 messages of orders have no key" in caplog.messages[0]
