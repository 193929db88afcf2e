"""``MemoryBroker`` redelivers by its rules, accepts only the newest token, and refuses wrong calls."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Awaitable, Callable
from textwrap import dedent
from typing import Any

import pytest

import lanes
from lanes import ConfigError
from lanes.core.types import Room
from lanes.source import Assigned, Delivered
from memsource import MemoryBroker, MemorySource
from memsource.memory import source as source_module
from memsource.memory.broker import Delivery


def filled(count: int, **settings: Any) -> MemoryBroker:
    broker = MemoryBroker(**settings)
    for number in range(count):
        broker.publish(b"%d" % number)
    return broker


def positions(deliveries: list[Delivery]) -> list[int]:
    return [delivery.record.position for delivery in deliveries]


def test_positions_in_memory_rise_and_may_have_gaps() -> None:
    broker = MemoryBroker()
    broker.skip(5)
    broker.publish()
    broker.skip(2)
    broker.publish()
    assert positions(broker.deliver(0, 10, 1, 0.0)) == [5, 8]
    with pytest.raises(ValueError, match="only rise"):
        broker.skip(-1)


def test_a_key_stays_in_its_partition_and_keyless_messages_rotate() -> None:
    broker = MemoryBroker(3)
    assert len({broker.publish(key="customer-42").partition for _ in range(9)}) == 1
    assert [broker.publish().partition for _ in range(4)] == [0, 1, 2, 0]
    assert broker.publish(key="customer-42", partition=2).partition == 2
    assert {broker.publish(key=number).partition for number in range(50)} == {0, 1, 2}


def test_a_record_shows_its_size_and_not_its_bytes() -> None:
    record = MemoryBroker(name="orders").publish("päyload", key="k", headers=[("name", b"value")])
    assert (record.value, record.key, record.subject) == ("päyload".encode(), b"k", "orders")
    assert record.size == 8 + 1 + 9
    assert repr(record) == "<Record 0 position 0, 18 bytes>"
    assert MemoryBroker().publish(headers=[("größe", b""), ("\ud800", b"z")]).size == 7 + 2


def test_the_message_that_reaches_the_size_is_the_last() -> None:
    broker = MemoryBroker()
    for size in (4, 4, 4, 100, 1):
        broker.publish(b"x" * size)
    assert positions(broker.deliver(0, 10, 5, 0.0)) == [0, 1]
    assert positions(broker.deliver(0, 10, 5, 0.0)) == [2, 3]
    assert positions(broker.deliver(0, 10, 0, 0.0)) == []
    assert positions(broker.deliver(0, 0, 5, 0.0)) == []
    assert broker.waiting() == 1


def test_only_the_newest_token_acknowledges() -> None:
    broker = filled(1)
    (first,) = broker.deliver(0, 1, 1, 0.0)
    broker.redeliver([0])
    broker.ack(first.token)
    assert (broker.acked(), broker.stale) == ([], 1)
    (second,) = broker.deliver(0, 1, 1, 0.0)
    assert (second.count, second.token != first.token) == (2, True)
    broker.ack(first.token)
    assert (broker.acked(), broker.stale) == ([], 2)
    for _ in range(3):
        broker.ack(second.token)
    assert (broker.acked(), broker.unacked(), broker.unfinished) == ([0], [], 0)
    # Any token of an acknowledged message may arrive again: that is a repetition and no mistake.
    broker.ack(first.token)
    assert broker.stale == 2
    with pytest.raises(KeyError):
        broker.ack(99)


def test_an_acknowledgement_may_be_lost() -> None:
    broker = filled(2)
    for delivery in broker.deliver(0, 2, 100, 0.0):
        broker.ack(delivery.token)
    broker.redeliver([1])
    assert (broker.acked(), broker.unacked()) == ([0], [1])
    assert positions(broker.deliver(0, 2, 100, 0.0)) == [1]


def test_requeued_messages_come_first_in_the_order_of_requeuing() -> None:
    broker = filled(6)
    broker.deliver(0, 4, 100, 0.0)
    broker.redeliver([3, 1])
    broker.redeliver([0, 3])
    assert broker.waiting() == 5
    assert positions(broker.deliver(0, 10, 100, 0.0)) == [1, 0, 3, 4, 5]
    with pytest.raises(ValueError, match="never delivered"):
        MemoryBroker().redeliver([0])


def test_a_new_owner_gets_everything_unacknowledged_by_position() -> None:
    broker = filled(5)
    deliveries = broker.deliver(0, 4, 100, 0.0)
    broker.ack(deliveries[1].token)
    broker.redeliver([3, 0])
    broker.requeue(0)
    assert broker.unacked() == [0, 2, 3]
    assert positions(broker.deliver(0, 10, 100, 0.0)) == [0, 2, 3, 4]


def test_the_ack_wait_runs_out_unless_it_is_extended() -> None:
    broker = filled(3, ack_wait=10.0)
    first, second, third = broker.deliver(0, 3, 100, 0.0)
    broker.ack(first.token)
    broker.extend(second.token, 6.0)
    assert broker.expire(9.9) == 0
    assert broker.expire(10.0) == 1
    assert positions(broker.deliver(0, 3, 100, 10.0)) == [2]
    # An extension by an old token extends nothing.
    broker.extend(third.token, 19.0)
    assert broker.expire(16.0) == 1
    assert broker.expire(20.0) == 1
    assert broker.stale == 0


def test_the_broker_bounds_unacknowledged_messages() -> None:
    broker = filled(5, max_unacked=2)
    first, _ = broker.deliver(0, 10, 100, 0.0)
    assert broker.deliver(0, 10, 100, 0.0) == []
    # An unacknowledged message already counts, so its redelivery is allowed.
    broker.redeliver([0])
    assert positions(broker.deliver(0, 10, 100, 0.0)) == [0]
    broker.redeliver([1])
    broker.ack(first.token)
    assert positions(broker.deliver(0, 10, 100, 0.0)) == [1]


def test_watchers_are_called_for_every_change() -> None:
    broker = MemoryBroker(max_unacked=1)
    heard: list[int] = []

    def watcher() -> None:
        heard.append(1)

    broker.watch(watcher)
    broker.watch(watcher)
    broker.publish()
    (delivery,) = broker.deliver(0, 1, 1, 0.0)
    broker.ack(delivery.token)
    broker.redeliver([0])
    assert len(heard) == 3
    broker.unwatch(watcher)
    broker.unwatch(watcher)
    broker.publish()
    assert len(heard) == 3


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: MemoryBroker(0), "1 or more"),
        (lambda: MemoryBroker(ack_wait=0.0), "ack_wait"),
        (lambda: MemoryBroker(max_unacked=0), "max_unacked"),
        (lambda: MemorySource(MemoryBroker(), batch=0), "batch"),
    ],
)
def test_invalid_settings_are_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


def test_a_partition_that_does_not_exist_is_named() -> None:
    with pytest.raises(IndexError, match="partition=2: memory has only the partitions 0 to 1"):
        MemoryBroker(2).publish(partition=2)
    with pytest.raises(IndexError, match="partition=-1: memory has only"):
        MemoryBroker(2).unacked(-1)


@pytest.mark.anyio
async def test_partitions_are_assigned_once_and_read_in_turns() -> None:
    broker = MemoryBroker(2)
    source = MemorySource(broker, assigned=[1])
    with pytest.raises(KeyError):
        source.revoke(0)
    await source.open()
    source.assign(0)
    with pytest.raises(ValueError, match="is owned"):
        source.assign(0)
    for partition in broker.partitions:
        for _ in range(4):
            broker.publish(partition=partition)
    events = await source.receive(Room(4, 100))
    assert [event.partition.id.number for event in events if isinstance(event, Assigned)] == [1, 0]
    assert sorted(source.owned) == [0, 1]
    # Messages without key and value have size 0: there is room for four, and partitions take turns.
    taken = [await source.receive(Room(4, 100)) for _ in range(2)]
    runs = [(e.partition.id.number, len(e.run)) for events in taken for e in events if isinstance(e, Delivered)]
    assert runs == [(1, 4), (0, 4)]


def test_the_repr_of_a_broker_shows_counts() -> None:
    broker = filled(3, partitions=2)
    assert repr(broker) == "<MemoryBroker memory: 2 partitions, 3 messages>"
    assert repr(MemorySource(broker)) == "<MemorySource memory: 0 of 2 partitions>"


@pytest.mark.anyio
async def test_the_example_in_the_docstring_runs() -> None:
    text = inspect.getdoc(source_module) or ""
    example = dedent(text[text.index("    async def test_every_order") :])
    names: dict[str, Any] = {"lanes": lanes, "MemoryBroker": MemoryBroker, "MemorySource": MemorySource}
    exec(compile(example, "the docstring of memsource.memory.source", "exec"), names)
    test: Callable[[], Awaitable[None]] = names["test_every_order_is_booked"]
    await test()


@pytest.mark.process
def test_memsource_imports_no_test_runner() -> None:
    program = (
        "import sys, memsource, memsource.contract.source; sys.exit('pytest' in sys.modules or 'trio' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
