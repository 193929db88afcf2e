"""The source over Arrow batches keeps the contract of a source, and refuses rows whose order it cannot keep."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random
from typing import Any, Final

import anyio
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from lanes.core.types import Message, Partition, Room, Settlement
from lanes.dead_letter import details
from lanes.errors import SourceError
from lanes.source import Assigned, Delivered, Exhausted, Source
from lanes_spark.task import rows as task_rows
from lanes_spark.task.source import ArrowSource
from memsource.contract.source import Ability, Check, Sample, checks
from tests.spark.rows import SCHEMA, batches, rows

ROOM = Room(1_000, 1 << 20)

FINITE: Final[tuple[Ability, ...]] = ("finish",)
# The source begins without partitions, because the rows name them.
NOT_OF_ROWS = {"check_start_is_cancel_safe"}


class ArrowHarness:
    """Published rows, without the rows that earlier sources settled."""

    can: Collection[Ability] = FINITE
    patience = 0.005

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._rows: list[dict[str, Any]] = []
        self._settled: set[tuple[int, int]] = set()
        self._settled_of_newest = 0
        self._newest: ArrowSource | None = None

    async def publish(self, samples: Sequence[Sample]) -> None:
        fresh = []
        for sample in samples:
            number = len(self._rows)
            fresh.append(
                {
                    "key": sample.key,
                    "partition": sum(sample.key) % self._partitions,
                    "offset": number + number // 3,
                    "value": sample.value,
                    "headers": [{"key": name, "value": value} for name, value in sample.headers],
                }
            )
            self._rows.append(fresh[-1])
        if self._newest is not None:
            self._offer(fresh)

    def source(self) -> Source:
        source = self._newest = ArrowSource("orders", settled=self._note)
        self._settled_of_newest = 0
        self._offer([row for row in self._rows if (row["partition"], row["offset"]) not in self._settled])
        return source

    async def unsettled(self) -> int:
        assert self._newest is not None
        return self._newest.delivered - self._settled_of_newest

    @property
    def ack_wait(self) -> float:
        raise NotImplementedError

    async def elapse(self, seconds: float) -> None:
        raise NotImplementedError

    async def revoke(self, partition: Partition) -> None:
        raise NotImplementedError

    async def lose(self, partition: Partition) -> None:
        raise NotImplementedError

    async def finish(self) -> None:
        assert self._newest is not None
        self._newest.finish()

    def _offer(self, fresh: list[dict[str, Any]]) -> None:
        assert self._newest is not None
        for batch in batches(fresh, size=7):
            self._newest.offer(batch)

    def _note(self, messages: Sequence[Message]) -> None:
        self._settled_of_newest += len(messages)
        self._settled.update((message.partition.id.number, message.position) for message in messages)


@pytest.mark.anyio
@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize(
    "check",
    [check for check in checks(FINITE) if check.__name__ not in NOT_OF_ROWS],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
async def test_the_arrow_source_keeps_the_contract_of_a_source(check: Check, partitions: int) -> None:
    await check(ArrowHarness(partitions))


async def first_run(batch: Any, room: Room = ROOM) -> list[Message]:
    source = ArrowSource("orders")
    await source.open()
    source.offer(batch)
    assert all(isinstance(event, Assigned) for event in await source.receive(room))
    return [message for event in await source.receive(room) if isinstance(event, Delivered) for message in event.run]


@pytest.mark.anyio
async def test_a_message_of_a_row_is_that_of_a_live_consumer() -> None:
    plain, tombstone = rows(2, partitions=1)
    plain["headers"] = [{"key": "a", "value": b"1"}, {"key": "b", "value": None}, {"key": "a", "value": b"2"}]
    tombstone |= {"value": None, "headers": None, "timestamp": None, "key": None}
    (batch,) = batches([plain, tombstone])
    message, deleted = await first_run(batch)
    assert (message.key, message.value, message.position) == (b"key-0-0", b"value-0", 0)
    assert str(message.partition.id) == "orders/0"
    assert (message.subject, message.attempt) == ("orders", 1)
    assert message.headers == [("a", b"1"), ("b", b""), ("a", b"2")]
    assert message.size == len(b"key-0-0value-0a1ba2")
    known = details(message)
    assert (known.record_key, known.tombstone, known.null_headers) == (b"key-0-0", False, (1,))
    assert known.timestamp == 1_700_000_000.0
    assert (deleted.key, deleted.value, deleted.headers, deleted.size) == (None, b"", [], 0)
    assert details(deleted).tombstone
    assert details(deleted).timestamp is None


@pytest.mark.anyio
@pytest.mark.parametrize("text", [pa.string(), pa.large_string()])
async def test_keys_and_values_may_be_strings(text: Any) -> None:
    schema = pa.schema([("value", text), ("offset", pa.int32()), ("partition", pa.int64()), ("key", text)])
    (message,) = await first_run(
        pa.RecordBatch.from_pylist([{"key": "schlüssel", "partition": 2, "offset": 1, "value": "wert"}], schema=schema)
    )
    assert (message.key, message.value, list(message.headers)) == ("schlüssel".encode(), b"wert", [])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("second", "named"),
    [
        ({"offset": 5}, "orders/0: position 5 is repeated"),
        ({"offset": 3}, "orders/0: position 3 follows position 5"),
        ({"offset": None}, "partition 0 and offset None"),
        ({"partition": None}, "partition None and offset 6"),
        ({"partition": 1, "offset": -1}, "partition 1 and offset -1"),
    ],
)
async def test_rows_without_valid_rising_positions_are_refused(second: dict[str, Any], named: str) -> None:
    first = {"key": b"a", "partition": 0, "offset": 5, "value": b""}
    (batch,) = batches([first, first | {"offset": 6} | second])
    with pytest.raises(SourceError, match=named):
        await first_run(batch)


@pytest.mark.anyio
@pytest.mark.parametrize(("position", "named"), [(5, "is repeated"), (3, "follows position 5")])
async def test_the_order_is_checked_across_batches(position: int, named: str) -> None:
    source = ArrowSource("orders")
    for offset in (5, position):
        (batch,) = batches([{"key": b"a", "partition": 0, "offset": offset, "value": b""}])
        source.offer(batch)
    await source.receive(ROOM)
    with pytest.raises(SourceError, match=f"orders/0: position {position} {named}"):
        await source.receive(ROOM)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "kind", "named"),
    [
        ("offset", None, "no column 'offset', only key, partition"),
        ("partition", None, "no column 'partition'"),
        ("key", pa.int64(), "'key' of the rows is int64, .* cast it to binary"),
        ("partition", pa.string(), "'partition' of the rows is string, .* cast it to int"),
        ("offset", pa.float64(), "'offset' of the rows is double, .* cast it to bigint"),
        ("timestamp", pa.int64(), "'timestamp' of the rows is int64, .* cast it to timestamp"),
        (
            "headers",
            pa.string(),
            "'headers' of the rows is string, .* cast it to array<struct<key:string,value:binary>>",
        ),
    ],
)
async def test_rows_of_another_shape_are_refused(name: str, kind: Any, named: str) -> None:
    fields = [field for field in SCHEMA if field.name != name] + ([] if kind is None else [pa.field(name, kind)])
    one = {"key": b"", "partition": 0, "offset": 0, "value": b""}
    if name in one or kind is not None:
        one[name] = "" if kind == pa.string() else 0
    (batch,) = batches([one], schema=pa.schema(fields))
    with pytest.raises(SourceError, match=named):
        await first_run(batch)


async def expect_nothing(source: ArrowSource) -> None:
    with anyio.move_on_after(0.01):
        assert await source.receive(ROOM) == []


@pytest.mark.anyio
async def test_the_next_era_waits_until_the_one_before_is_settled() -> None:
    schema = pa.schema([*SCHEMA, ("era", pa.int32())])
    eras = [one | {"era": number // 4, "offset": number} for number, one in enumerate(rows(8, partitions=1))]
    source = ArrowSource("orders")
    await source.open()
    for batch in batches(eras, schema=schema):
        source.offer(batch)
    await source.receive(ROOM)
    (first,) = await source.receive(ROOM)
    assert isinstance(first, Delivered)
    assert [message.position for message in first.run] == [0, 1, 2, 3]
    await expect_nothing(source)
    await source.settle([Settlement(first.partition, first.run[1:])])
    await expect_nothing(source)
    await source.settle([Settlement(first.partition, first.run)])
    (second,) = await source.receive(ROOM)
    assert isinstance(second, Delivered)
    assert [message.position for message in second.run] == [4, 5, 6, 7]


@pytest.mark.anyio
async def test_an_era_that_falls_is_refused() -> None:
    schema = pa.schema([*SCHEMA, ("era", pa.int32())])
    (batch,) = batches([one | {"era": 1 - number} for number, one in enumerate(rows(2, partitions=1))], schema=schema)
    source = ArrowSource("orders")
    source.offer(batch)
    await source.receive(ROOM)
    with pytest.raises(SourceError, match="position 2 is of era 0 and follows era 1"):
        await source.receive(ROOM)


def some_rows(chance: Random) -> list[dict[str, Any]]:
    """Return rows of a few partitions in any order, with or without eras, with keys and values of any size or none."""
    found: list[dict[str, Any]] = []
    eras = chance.choice([1, 1, 3])
    for number in range(chance.randint(1, 120)):
        texts = [chance.choice([None, b"", b"x" * chance.randint(1, 30)]) for _ in range(2)]
        found.append(
            {
                "key": texts[0],
                "partition": chance.randint(0, 4),
                "offset": number + 2,
                "value": texts[1],
                "headers": chance.choice([None, None, [{"key": "a", "value": b"12"}, {"key": "b", "value": None}]]),
                "era": None if eras == 1 else number // 50,
            }
        )
    return found


def test_the_size_of_headers_is_in_bytes() -> None:
    named = [{"key": "Größe", "value": b"5"}, None, {"key": "none", "value": None}, {"key": None, "value": b"12"}]
    assert task_rows.headers_size(named) == (7 + 1) + 4 + 2
    assert task_rows.headers_size([{"key": "a", "value": b"12"}]) == 1 + 2


def size_of(row: dict[str, Any]) -> int:
    return len(row["key"] or b"") + len(row["value"] or b"") + (4 if row["headers"] else 0)


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(40))
async def test_every_row_is_delivered_once_in_order_within_the_room(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = Random(seed)
    monkeypatch.setattr(task_rows, "_WINDOW", chance.choice([1, 4, 1_024]))
    offered = some_rows(chance)
    kinds = {field.name: field.type for field in SCHEMA} | {"era": pa.int32()}
    if seed % 2:
        kinds |= {"key": pa.large_binary(), "value": pa.large_binary(), "partition": pa.int64()}
    source = ArrowSource("orders")
    for batch in batches(offered, size=chance.choice([1, 3, 50]), schema=pa.schema(list(kinds.items()))):
        source.offer(batch)
    source.finish()
    delivered: dict[int, list[tuple[Any, ...]]] = {}
    exhausted = False
    while not exhausted:
        room = Room(chance.randint(1, 40), chance.randint(0, 200))
        events = await source.receive(room)
        exhausted = any(isinstance(event, Exhausted) for event in events)
        runs = [event for event in events if isinstance(event, Delivered)]
        sizes = [message.size for event in runs for message in event.run]
        assert len(sizes) <= room.messages
        # A message larger than the room is delivered alone, except for messages without a size.
        assert sum(sizes) <= room.bytes or len([size for size in sizes if size]) == 1
        for event in runs:
            assert event.size == sum(message.size for message in event.run)
            seen = delivered.setdefault(event.partition.id.number, [])
            seen += [(one.position, one.key, one.value, one.size) for one in event.run]
            await source.settle([Settlement(event.partition, event.run)])
    wanted: dict[int, list[tuple[Any, ...]]] = {}
    for row in offered:
        one = (row["offset"], row["key"], row["value"] or b"", size_of(row))
        wanted.setdefault(row["partition"], []).append(one)
    assert delivered == wanted
    assert not source.left
