"""The epoch names an assignment in messages, events, spans, dead letters and the history."""

from __future__ import annotations

from pathlib import Path

import pytest

from lanes import Consumer, GroupEvent, History, Message, Retry, Settings, Term
from memsource import MemoryBroker, MemoryDeadLetters, MemorySource, Row, read
from tests.fakes.support import publish, started, until
from tests.fakes.telemetry import Sdk

TOKENS = 1 << 50, (1 << 50) + 7


@pytest.mark.anyio
async def test_the_epoch_of_a_message_identifies_the_rows_of_its_assignment(tmp_path: Path, sdk: Sdk) -> None:
    """Three assignments of two partitions; one has no fencing token."""
    broker, events, seen = MemoryBroker(2), list[GroupEvent](), list[Message]()
    source, dead_letters = MemorySource(broker, assigned=[1]), MemoryDeadLetters(broker)
    history = History(tmp_path, member="m-1")

    async def handler(message: Message) -> None:
        seen.append(message)
        raise Term("never")

    consumer = Consumer(
        source,
        handler,
        settings=Settings(retry=Retry(attempts=1)),
        dead_letters=dead_letters,
        history=history,
        on_event=events.append,
    )
    status = set()
    async with started(consumer) as run:
        await until(lambda: consumer.ready)
        publish(broker, ["a"], partition=1)
        await until(lambda: len(broker.dead_letters) == 1)
        for token in TOKENS:
            source.assign(0, fencing_token=token)
            publish(broker, ["a"], partition=0)
            await until(lambda: broker.unfinished == 0)
            status |= {(name, one.epoch) for name, one in consumer.status().partitions.items()}
            source.revoke(0)
            await until(lambda: source.owned == [1])
        assert await run.stop() is None

    assert history.path is not None
    rows = read([history.path])[0].rows
    # Partition and epoch → the number of the assignment.
    owners = {(row.partition, int(row.number)): row.assignment for row in rows if row.event == "assigned"}
    assert owners == {("memory/1", 1): 1, ("memory/0", TOKENS[0]): 2, ("memory/0", TOKENS[1]): 3}
    assert status == owners.keys()
    assert {(str(event.partition), event.epoch) for event in events} == owners.keys()
    assert {(str(m.partition.id), m.partition.epoch, m.partition.assignment) for m in seen} == {
        (*of, number) for of, number in owners.items()
    }
    assert all(message.epoch == message.partition.epoch for message in seen)

    def rows_of(event: str) -> set[tuple[str, int, int]]:
        return {_place(row) for row in rows if row.event == event}

    spans = set()
    for span in sdk.spans():
        told = dict(span.attributes or {})
        of = f"{told['messaging.destination.name']}/{told['messaging.destination.partition.id']}", told["lanes.epoch"]
        spans.add((of[0], owners[of], told["lanes.position"]))  # type: ignore[index]
    assert spans == rows_of("started") and len(spans) == 3
    of_letters = {
        (f"{one.source}/{one.partition}", owners[f"{one.source}/{one.partition}", one.epoch], one.position)
        for one in broker.dead_letters
    }
    assert of_letters == rows_of("dlq_confirmed") and len(of_letters) == 3


def _place(row: Row) -> tuple[str, int, int]:
    return row.partition, row.assignment, row.position
