"""The box of dead letters in a topic: listed, disposed of and republished."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.to_thread import run_sync
from confluent_kafka import Producer
from confluent_kafka.admin import AclOperation

import lanes
from lanes.dead_letters.box import DeadLetterBox, StoredDeadLetter
from lanes_kafka import KafkaDeadLetters
from lanes_kafka.dead_letters.box import KafkaDeadLetterBox
from lanes_kafka.dead_letters.wire import dead_letter_record
from tests.components import KafkaServer
from tests.fakes.dead_letters import dead_letter
from tests.kafka.conftest import MakeTopic
from tests.kafka.dead_letters import records
from tests.kafka.test_dead_letters import allow
from tests.kafka.workload import Topic

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend


only_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])


@contextlib.asynccontextmanager
async def opened(topic: Topic, config: dict[str, str] | None = None) -> AsyncIterator[KafkaDeadLetterBox]:
    box = KafkaDeadLetterBox(config or {"bootstrap.servers": topic.url, "group.id": "g"}, topic.name)
    await box.open()
    try:
        yield box
    finally:
        await box.aclose()


async def park(topic: Topic, *letters: lanes.DeadLetter) -> None:
    target = KafkaDeadLetters({"bootstrap.servers": topic.url}, topic.name)
    await target.open()
    for one in letters:
        await target.put(one)
    await target.aclose()


async def parked(box: DeadLetterBox, one: lanes.DeadLetter) -> StoredDeadLetter:
    found = (await box.find([one.id]))[one.id]
    assert isinstance(found, StoredDeadLetter)
    return found


async def test_dead_letters_are_listed_in_order_and_found_whole(topic: MakeTopic) -> None:
    dead = topic(partitions=3)
    sent = [dead_letter(key=b"%d" % number) for number in range(9)]
    sent += [dead_letter(key=None, value=b"", tombstone=True), dead_letter(value=b"x" * 900_000)]
    await park(dead, *sent)
    async with opened(dead) as box:
        # Two dead letters of one millisecond have no order.
        assert sorted(await box.ids()) == sorted(one.id for one in sent)
        assert len(await box.ids(4)) == 4
        found = await box.find([one.id for one in sent] + ["f" * 32])
    assert {one: item.dead_letter for one, item in found.items() if isinstance(item, StoredDeadLetter)} == {
        one.id: one for one in sent
    }
    assert {item.place.partition(" ")[0] for item in found.values() if isinstance(item, StoredDeadLetter)} <= {
        f"{dead.name}/{number}" for number in range(3)
    }


@only_asyncio
@pytest.mark.parametrize("policy", ["delete", "compact"])
async def test_a_disposed_dead_letter_is_listed_by_no_box(topic: MakeTopic, policy: str) -> None:
    dead = topic(partitions=2, config={"cleanup.policy": policy})
    first, second, third = sent = [dead_letter(), dead_letter(), dead_letter(key=None)]
    await park(dead, *sent)
    async with opened(dead) as box, opened(dead) as other:
        assert len(await other.ids()) == 3
        await box.dispose(await parked(box, first), "replayed")
        await box.dispose(await parked(box, second), "dropped")
        for one in (box, other):
            assert await one.ids() == [third.id]
            found = await one.find([letter.id for letter in sent])
            assert (found[first.id], found[second.id]) == ("replayed", "dropped")
            assert isinstance(found[third.id], StoredDeadLetter)
    async with opened(dead) as box:
        assert await box.ids() == [third.id]


@only_asyncio
async def test_a_disposition_follows_its_dead_letter_and_replaces_it_when_compacted(topic: MakeTopic) -> None:
    dead = topic(partitions=4, config={"cleanup.policy": "compact"})
    sent = dead_letter()
    await park(dead, sent)
    async with opened(dead) as box:
        await box.dispose(await parked(box, sent), "replayed")
    first, second = await run_sync(records, dead)
    assert first.partition() == second.partition()
    assert first.key() == second.key() == sent.id.encode()
    assert second.value() is None


@only_asyncio
async def test_copies_of_a_dead_letter_are_disposed_of_together(topic: MakeTopic) -> None:
    dead = topic(partitions=2)
    sent = dead_letter(key=None)
    producer = Producer({"bootstrap.servers": dead.url, "enable.idempotence": True})
    key, value, headers = dead_letter_record(sent)
    for number in (0, 1, 1):
        producer.produce(dead.name, value, key, partition=number, headers=headers)
    assert producer.flush(20) == 0
    async with opened(dead) as box:
        assert await box.ids() == [sent.id]
        await box.dispose(await parked(box, sent), "dropped")
        assert await box.ids() == []
    found = await run_sync(records, dead)
    assert sorted(one.partition() or 0 for one in found if one.value() is None) == [0, 1]


@only_asyncio
async def test_a_dead_letter_written_again_after_its_replay_stays_replayed(topic: MakeTopic) -> None:
    dead = topic()
    sent = dead_letter()
    await park(dead, sent)
    async with opened(dead) as box:
        await box.dispose(await parked(box, sent), "replayed")
        await park(dead, sent)
        assert await box.ids() == []
        assert await box.find([sent.id]) == {sent.id: "replayed"}


@only_asyncio
async def test_other_messages_are_counted_and_ignored(topic: MakeTopic) -> None:
    dead = topic()
    sent = dead_letter()
    producer = Producer({"bootstrap.servers": dead.url, "enable.idempotence": True})
    producer.produce(dead.name, b"anything")
    producer.produce(dead.name, b"x", headers=[("Lanes-Disposition", b"eaten"), ("Lanes-Id", sent.id.encode())])
    producer.flush(20)
    await park(dead, sent)
    async with opened(dead) as box:
        assert await box.ids() == [sent.id]
        assert box.other_messages == 2


@only_asyncio
async def test_new_dead_letters_are_read_and_none_twice(topic: MakeTopic) -> None:
    dead = topic(partitions=2)
    async with opened(dead) as box:
        assert await box.ids() == []
        for number in range(1, 4):
            await park(dead, dead_letter(key=b"%d" % number))
            assert len(await box.ids()) == number
        assert all(len(places) == 1 for _, places in box._seen.values())


@only_asyncio
async def test_distant_dead_letters_are_fetched_without_the_records_between(
    topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = topic()
    sent = [dead_letter() for _ in range(30)]
    await park(dead, *sent)
    monkeypatch.setattr("lanes_kafka.dead_letters.box._NEAR", 5)
    wanted = [sent[number] for number in (0, 3, 20, 29)]
    async with opened(dead) as box:
        found = await box.find([one.id for one in wanted])
    assert {one: item.dead_letter for one, item in found.items() if isinstance(item, StoredDeadLetter)} == {
        one.id: one for one in wanted
    }


@only_asyncio
async def test_a_topic_may_end_with_transaction_markers(topic: MakeTopic) -> None:
    dead = topic()
    sent = dead_letter()
    producer = Producer({"bootstrap.servers": dead.url, "transactional.id": dead.name})
    producer.init_transactions(20)
    for commit in (True, False):
        producer.begin_transaction()
        key, value, headers = dead_letter_record(sent if commit else dead_letter())
        producer.produce(dead.name, value, key, headers=headers)
        producer.flush(20)
        end = producer.commit_transaction if commit else producer.abort_transaction
        end(20)
    async with opened(dead) as box:
        with anyio.fail_after(10):
            assert await box.ids() == [sent.id]
            assert await box.ids() == [sent.id]


# --- republishing


@only_asyncio
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"key": None, "value": b"", "tombstone": True},
        {"key": b"lane", "record_key": b"record"},
        {"headers": (("none", b""), ("Lanes-Dead-Letter", b"of before")), "null_headers": (0,)},
    ],
    ids=["plain", "tombstone", "two keys", "headers"],
)
async def test_a_dead_letter_is_republished_at_the_end_of_its_partition(
    topic: MakeTopic, changes: dict[str, Any]
) -> None:
    orders, dead = topic(partitions=4), topic()
    sent = dead_letter(source=orders.name, subject=orders.name, **changes)
    await park(dead, sent)
    async with opened(dead) as box:
        place = await box.publish(await parked(box, sent))
        # The dead letter stays until the caller disposes of it.
        assert await box.ids() == [sent.id]
    assert place == f"{orders.name}/3 offset 0"
    (raw,) = await run_sync(records, orders)
    assert raw.partition() == 3
    assert raw.key() == sent.record_key
    assert raw.value() == (None if sent.tombstone else sent.value)
    kept = [
        (name, None if index in sent.null_headers else value)
        for index, (name, value) in enumerate(sent.headers)
        if name != "Lanes-Dead-Letter"
    ]
    assert raw.headers() == [*kept, ("Lanes-Dead-Letter", sent.id.encode())]


@only_asyncio
async def test_a_missing_origin_is_refused_and_not_created(topic: MakeTopic) -> None:
    dead = topic()
    few = topic(partitions=2)
    sent = [dead_letter(source=f"{dead.name}-not"), dead_letter(source=few.name)]
    await park(dead, *sent)
    async with opened(dead) as box:
        for one in sent:
            with pytest.raises(lanes.SourceError, match="does not exist; publish the letter by another client"):
                await box.publish(await parked(box, one))
    assert f"{dead.name}-not" not in dead.admin.list_topics(timeout=10).topics


@only_asyncio
@pytest.mark.parametrize("name", ["\ud800", "a\0b"], ids=["surrogate", "NUL"])
async def test_a_header_that_cannot_be_sent_is_refused_by_name(topic: MakeTopic, name: str) -> None:
    orders, dead = topic(), topic()
    sent = dead_letter(source=orders.name, subject=orders.name, partition=0, headers=(("fine", b"1"), (name, b"2")))
    await park(dead, sent)
    async with opened(dead) as box:
        # The first name would crash the process if it were sent unchanged.
        with pytest.raises(lanes.SourceError, match=f"letter {sent.id} has a header '.*', a name that this client"):
            await box.publish(await parked(box, sent))
        assert await box.ids() == [sent.id]
    assert await run_sync(records, orders) == []


# --- errors


@only_asyncio
async def test_a_missing_dead_letter_topic_is_refused(topic: MakeTopic) -> None:
    there = topic()
    with pytest.raises(lanes.ConfigError, match=r"'not-there' does not exist; correct the name, or bootstrap\.servers"):
        await KafkaDeadLetterBox({"bootstrap.servers": there.url}, "not-there").open()


@only_asyncio
@pytest.mark.parametrize("maker", [KafkaDeadLetterBox, KafkaDeadLetters])
async def test_a_missing_dead_letter_topic_is_refused_with_a_similar_one(maker: Any, topic: MakeTopic) -> None:
    there = topic()
    with pytest.raises(lanes.ConfigError) as refused:
        await maker({"bootstrap.servers": there.url}, f"{there.name}s").open()
    assert f"'{there.name}s' does not exist (did you mean '{there.name}'?); " in str(refused.value)


@pytest.fixture(scope="module")
def guarded(kafka_prepared: None) -> Iterator[KafkaServer]:
    with KafkaServer(users={"admin": "secretadmin", "ann": "secretann"}) as server:
        yield server


@only_asyncio
async def test_reading_needs_read_and_disposing_needs_write(guarded: KafkaServer, topic: MakeTopic) -> None:
    dead = topic(on=guarded)
    sent = dead_letter()
    await park(dead, sent)
    await run_sync(partial(allow, dead, AclOperation.READ))
    async with opened(dead, guarded.config("ann")) as box:
        assert await box.ids() == [sent.id]
        found = await parked(box, sent)
        with pytest.raises(lanes.SourceError, match="AUTHORIZATION_FAILED") as refused:
            await box.dispose(found, "dropped")
        assert not refused.value.retryable
        assert await box.ids() == [sent.id]


@only_asyncio
async def test_a_missing_read_permission_is_named(guarded: KafkaServer, topic: MakeTopic) -> None:
    dead = topic(on=guarded)
    await park(dead, dead_letter())
    await run_sync(partial(allow, dead, AclOperation.DESCRIBE))
    async with opened(dead, guarded.config("ann")) as box:
        with pytest.raises(lanes.SourceError, match=r"cannot read topic .* \(TOPIC_AUTHORIZATION_FAILED"):
            await box.ids()
