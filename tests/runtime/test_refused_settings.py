"""A consumer refuses settings that do not fit its source or handler, and handlers that cannot be called."""

from __future__ import annotations

from typing import Any

import pytest

from lanes import ConfigError, Consumer, Settings
from memsource import MemoryBroker, MemorySource
from tests.fakes.support import acknowledge, acknowledge_all, consumer_of


@pytest.mark.anyio
async def test_a_batch_above_what_the_broker_allows_is_refused_before_the_first_message() -> None:
    broker = MemoryBroker(max_unacked=5)
    broker.publish()
    source = MemorySource(broker)
    with pytest.raises(ConfigError, match="batch=6 is above max_in_flight=5"):
        await consumer_of(source, acknowledge_all, batch=6).run()
    assert broker.deliveries(0) == 0


@pytest.mark.anyio
async def test_a_bound_of_a_partition_above_what_the_broker_allows_is_refused_before_the_first_message() -> None:
    broker = MemoryBroker(max_unacked=5)
    broker.publish()
    with pytest.raises(ConfigError, match="max_in_flight_per_partition=6 is above max_in_flight=5"):
        await consumer_of(MemorySource(broker), acknowledge, max_in_flight_per_partition=6).run()
    assert broker.deliveries(0) == 0


def test_a_timeout_that_nothing_can_keep_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'timeout=1 with sync_handlers="inline": .*; use sync_handlers="threads"'):
        consumer_of(MemorySource(MemoryBroker()), lambda message: None, timeout=1.0, sync_handlers="inline")
    consumer_of(MemorySource(MemoryBroker()), acknowledge, timeout=1.0, sync_handlers="inline")


@pytest.mark.parametrize("decode", [5, acknowledge])
def test_decode_is_a_plain_function(decode: Any) -> None:
    with pytest.raises(ConfigError, match=r"^decode.*: pass a (plain )?function of one message$"):
        consumer_of(MemorySource(MemoryBroker()), acknowledge, decode=decode)


@pytest.mark.anyio
async def test_a_bound_above_the_limit_of_the_broker_is_refused_before_the_first_message() -> None:
    broker = MemoryBroker(max_unacked=5)
    broker.publish()
    source = MemorySource(broker)
    with pytest.raises(ConfigError, match=r"max_in_flight=6 is above the 5 unsettled messages"):
        await consumer_of(source, acknowledge, max_in_flight=6).run()
    assert broker.deliveries(0) == 0
    assert source.called("aclose")


def test_a_handler_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match="not callable"):
        Consumer(MemorySource(MemoryBroker()), None, settings=Settings())  # type: ignore[arg-type]
