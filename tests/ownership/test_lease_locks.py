"""Locks over a lease store outlive lost requests and answers, and end at their deadline without an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

import anyio
import pytest

from lanes import ConfigError, SourceError
from lanes.ownership import Held, LeaseLocks
from memsource.jetstream.lease_store import Bucket, MemoryLeaseStore
from memsource.jetstream.link import Link, LinkFault
from memsource.sim.loop.choosers import Fifo
from memsource.sim.loop.virtual import run

LEASE = 6.0


def virtual(test: Callable[[], Awaitable[None]]) -> None:
    run(test, chooser=Fifo())


def never(at: float, act: Callable[[float], None]) -> None:
    raise AssertionError(f"nothing is to be done later, at {at}: {act}")


def make(bucket: Bucket) -> tuple[LeaseLocks, Link]:
    link = Link(anyio.current_time, never, timeout=0.5)
    return LeaseLocks(MemoryLeaseStore(bucket, link), lease=LEASE, clock=anyio.current_time), link


async def acquire(locks: LeaseLocks) -> Held:
    held = await locks.try_acquire("orders/7", lambda: None)
    assert held is not None
    return held


@pytest.mark.parametrize("kind", ["request lost", "reply lost"])
def test_a_renewal_without_an_answer_is_made_again(kind: Literal["request lost", "reply lost"]) -> None:
    async def test() -> None:
        locks, link = make(Bucket())
        held = await acquire(locks)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(locks.run)
            for faults in ([kind], [None, kind], [kind, kind, None, kind]):
                link.faults.extend(None if each is None else LinkFault(each) for each in faults)
                first = held.deadline
                await anyio.sleep(LEASE / 2)
                assert not held.lost and held.deadline > first and not link.faults
            tasks.cancel_scope.cancel()

    virtual(test)


def test_a_cut_link_ends_the_lock_at_its_deadline() -> None:
    async def test() -> None:
        bucket = Bucket()
        (locks, link), (other, _) = make(bucket), make(bucket)
        held = await acquire(locks)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(locks.run)
            link.cut = True
            await anyio.sleep(held.deadline - anyio.current_time() - 0.01)
            assert await other.try_acquire("orders/7", lambda: None) is None
            await anyio.sleep(0.02)
            assert held.lost == "its deadline passed before a renewal was confirmed"
            await anyio.sleep(LEASE / 6 + 0.5)
            assert await other.try_acquire("orders/7", lambda: None) is not None
            await held.release()
            with pytest.raises(SourceError, match="no answer within") as refused:
                await locks.try_acquire("orders/8", lambda: None)
            assert refused.value.retryable
            with pytest.raises(SourceError, match="no answer within"):
                await locks.open()
            tasks.cancel_scope.cancel()

    virtual(test)


def test_a_lock_that_is_lost_at_its_deadline_is_given_up_at_the_store() -> None:
    """The renewals had no answer, but they took effect."""

    async def unheard(writes: bool) -> LinkFault | None:
        return LinkFault("reply lost") if writes else None

    async def test() -> None:
        bucket = Bucket()
        (locks, link), (other, _) = make(bucket), make(bucket)
        held = await acquire(locks)
        link.before = unheard
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(locks.run)
            await anyio.sleep(held.deadline - anyio.current_time() + 0.01)
            assert held.lost == "its deadline passed before a renewal was confirmed"
            await anyio.sleep(1.0)
            assert repr(locks) == "<LeaseLocks: 0 held, lease 6 s>"
            assert await other.try_acquire("orders/7", lambda: None) is not None
            tasks.cancel_scope.cancel()

    virtual(test)


def test_an_acquisition_without_an_answer_ends_by_itself() -> None:
    async def test() -> None:
        locks, link = make(Bucket())
        link.faults.extend([None, LinkFault("reply lost")])
        with pytest.raises(SourceError):
            await locks.try_acquire("orders/7", lambda: None)
        assert await locks.try_acquire("orders/7", lambda: None) is None
        await anyio.sleep(LEASE + 0.5)
        await acquire(locks)

    virtual(test)


def test_a_release_without_an_answer_is_made_again() -> None:
    async def test() -> None:
        bucket = Bucket()
        (locks, link), (other, _) = make(bucket), make(bucket)
        held = await acquire(locks)
        link.faults.extend([LinkFault("request lost"), None, LinkFault("request lost")])
        await held.release()
        assert await other.try_acquire("orders/7", lambda: None) is not None
        assert not held.lost and repr(locks) == "<LeaseLocks: 0 held, lease 6 s>"

    virtual(test)


def test_a_store_that_is_gone_ends_run() -> None:
    async def test() -> None:
        locks, link = make(Bucket())
        await acquire(locks)
        link.sever()
        with pytest.raises(SourceError, match="has crashed"):
            await locks.run()

    virtual(test)


@pytest.mark.parametrize("lease", [0, 2, 3.5, "10"])
def test_a_lease_that_is_no_whole_number_of_seconds_is_refused(lease: float) -> None:
    store = MemoryLeaseStore(Bucket(), Link(lambda: 0.0, never))
    with pytest.raises(ConfigError, match="lease="):
        LeaseLocks(store, lease=lease)
