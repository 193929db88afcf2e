"""Messages of a dead process keep their order although its acknowledgements or another process disturb a takeover."""

from __future__ import annotations

import asyncio

import pytest

from lanes import SourceError
from lanes.clock import monotonic
from lanes.core.types import Room
from memsource.sim.loop.virtual import until
from tests.simulated.jetstream.stage import Stage, played
from tests.simulated.jetstream.test_durable_source import all_received, closed, opened, received, settle, source_of
from tests.simulated.jetstream.test_takeovers import left, process


@pytest.mark.parametrize("extended", [1, 3, 6])
def test_messages_that_the_server_sorted_in_two_batches_are_requeued(
    extended: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An in-progress acknowledgement during the shrink of ack_wait splits the batch."""

    async def scene(stage: Stage) -> None:
        first = await opened(stage)
        await stage.publish(*["S.a"] * 6)
        assert len(await all_received(first, 6)) == 6
        await closed(first)
        data = stage.server.api.streams["S"].consumers["work"].data
        expire, runs = data._expire, []

        def expire_late(now: float) -> None:
            runs.append(data.settings.ack_wait)
            if runs == [0.001] * 2:
                data.extend(extended, now)
            expire(now)

        data._expire = expire_late  # type: ignore[method-assign]
        second = source_of(await stage.connect())
        await second.open()
        room = Room(3, 1_000_000)
        await second.receive(room)
        found: list[int] = []
        while len(found) < 6:
            run = [message for message in await received(second, room) if message.position not in found]
            found += [message.position for message in run]
            await settle(second, run)
        assert found == [1, 2, 3, 4, 5, 6]
        await closed(second)

    played(scene)
    assert ("arrived out of order" in caplog.text) is (extended < 6)


def test_messages_of_a_hold_back_that_exceed_the_room_wait_for_it() -> None:
    async def scene(stage: Stage) -> None:
        room = Room(3, 1_000_000)
        await stage.stream("S")
        await stage.publish(*["S.a"] * 6)
        first = await opened(stage, takeover="hold-back")
        assert [message.position for message in await received(first, room)] == [1, 2, 3]
        await closed(first)
        data = stage.server.api.streams["S"].consumers["work"].data
        second = await opened(stage, takeover="hold-back")
        stage.server.later(monotonic() + 20.0, lambda now: data.extend(2, now))
        stage.network.schedule()
        run = await received(second, room)
        assert [message.position for message in run] == [1, 2, 3]
        waiting = asyncio.create_task(received(second, Room(0, 1_000_000)))
        assert await until(lambda: any(each.payload == b"+WPI" for each in stage.sent), 30.0)
        assert not waiting.done()
        waiting.cancel()
        await settle(second, run)
        assert await all_received(second, 3) == [4, 5, 6]
        await closed(second)

    played(scene)


def test_a_process_that_takes_a_part_of_every_batch_is_named() -> None:
    async def scene(stage: Stage) -> None:
        await left(stage, 6)
        made, other = await process(stage), await process(stage)
        await other.pulls.renew()

        async def pull() -> None:
            while True:
                if not other.pulls.outstanding:
                    await other.pulls.request_exactly(2)
                await other.pulls.wait(0.1)
                other.pulls.take()

        pulling = asyncio.create_task(pull())
        with pytest.raises(SourceError, match="pulled by another client"):
            await made.run(Room(3, 1_000_000))
        pulling.cancel()

    played(scene)
