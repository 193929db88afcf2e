"""One message through an idle consumer passes few threads and tasks. `docs/journey.md` has the counts."""

from __future__ import annotations

import pytest
from anyio.to_thread import run_sync

import lanes
from lanes_kafka import KafkaSource
from lanes_kafka.client.mailbox import Demand
from lanes_kafka.client.thread import ClientThread
from tests.fakes.hand_offs import HandOffs
from tests.kafka.conftest import MakeTopic
from tests.kafka.workload import produce, until

pytestmark = pytest.mark.anyio


async def test_one_message_wakes_one_worker_and_makes_one_commit_and_no_demand(
    topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = topic(4)
    demands: list[int] = []
    ask = ClientThread.demand

    def asked(thread: ClientThread, demand: Demand) -> None:
        demands.append(demand.number)
        ask(thread, demand)

    monkeypatch.setattr(ClientThread, "demand", asked)
    handled: list[int] = []

    async def handler(message: lanes.Message) -> None:
        handled.append(message.position)

    consumer = lanes.Consumer(KafkaSource(events.config(), topics=events.name), handler)
    hand_offs = HandOffs(monkeypatch)
    async with consumer:
        await until(lambda: len(consumer.status().partitions) == 4)

        async def publish(number: int) -> None:
            await run_sync(produce, events, 1)

        counts = await hand_offs.of(publish, handled)
        # The first demand, the one after the assignment, and the one after the first message.
        assert len(demands) <= 3
    assert counts["to a worker"] == 1
    # The task of a commit starts, and gets the answer. The commits of two messages may be one.
    assert 0 < counts["to a commit"] <= 2
    # The message, the answer to its commit, and progress. The thread also looks twice a second whether the loop runs.
    assert 1 <= counts["Bridge._deliver"] <= 4
