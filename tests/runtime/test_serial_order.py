"""``order="serial"``: one partition, whose messages run sequentially."""

from __future__ import annotations

from pathlib import Path

import pytest

from lanes import ConfigError, History, Message, Retry
from memsource import GroupSource
from tests.fakes.grouped import Knowing, group_of
from tests.fakes.support import Gated, consumer_of, turns
from tests.fakes.threaded import assert_kept


@pytest.mark.anyio
async def test_serial_order_handles_one_partition() -> None:
    source = GroupSource(group_of("ab", partitions=2), "m-1")
    with pytest.raises(ConfigError, match=r'order="serial": memory/m-1 assigned memory/1, a second partition; use'):
        await consumer_of(source, Gated(free=[b"a", b"b"]), order="serial").run()


@pytest.mark.anyio
async def test_serial_order_is_one_at_a_time_and_waits_for_retries(tmp_path: Path) -> None:
    group = group_of("abcab")
    source = GroupSource(group, "m-1")
    source.finish()
    running = peak = 0
    order: list[int] = []

    async def handler(message: Message) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await turns(5)
        running -= 1
        if message.position == 2 and message.attempt == 1:
            raise ValueError("once more")
        order.append(message.position)

    retry = Retry(attempts=2, backoff=0.001)
    await consumer_of(source, handler, order="serial", retry=retry, history=History(tmp_path, member="m-1")).run()
    assert (order, peak) == ([0, 1, 2, 3, 4], 1)
    assert_kept(tmp_path)


@pytest.mark.anyio
@pytest.mark.parametrize(("partitions", "order"), [(2, "serial"), (100, "serial")])
async def test_serial_order_is_refused_before_anything_is_received(partitions: int, order: str) -> None:
    source = Knowing(group_of("ab"), "m")
    source.partitions = partitions
    source.finish()
    handler = Gated(free=[b"a", b"b"])
    said = rf'order="serial": memory/m has {partitions} partitions; use order="partition", or a topic or log'
    with pytest.raises(ConfigError, match=said):
        await consumer_of(source, handler, order=order).run()
    assert source.called("receive") == []


@pytest.mark.anyio
@pytest.mark.parametrize(("partitions", "order"), [(1, "serial"), (None, "serial"), (2, "partition"), (2, "key")])
async def test_an_order_that_the_source_can_keep_is_accepted(partitions: int | None, order: str) -> None:
    source = Knowing(group_of("ab"), "m")
    source.partitions = partitions
    source.finish()
    await consumer_of(source, Gated(free=[b"a", b"b"]), order=order).run()
