"""The acquisition of a partition raises the epoch under the lock, and releases the lock after a failure."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from lanes import PartitionId, SourceError
from lanes.ownership import (
    Acquired,
    Held,
    HeldLock,
    LocalLocks,
    Locks,
    State,
    StateChange,
    StateKey,
    StateStore,
    acquire,
)
from memsource.memory.locks import LockServer, MemoryLocks
from memsource.memory.states import MemoryStates

pytestmark = pytest.mark.anyio

KEY = StateKey("billing", PartitionId("orders", 7))
NAME = "orders/billing/7"


def nothing() -> None:
    pass


async def acquired(locks: Locks, states: StateStore) -> Acquired | None:
    return await acquire(locks, states, KEY, name=NAME, start=5, changed=nothing, clock=anyio.current_time)


async def test_each_acquisition_continues_with_a_higher_epoch() -> None:
    server, states = LockServer(), MemoryStates()
    one, other = (MemoryLocks(server, clock=anyio.current_time) for _ in range(2))
    first = await acquired(one, states)
    assert first is not None and first.state.floor == 5
    assert await acquired(other, states) is None
    assert (await states.read([KEY]))[KEY] == first.state, "who does not hold the lock raises no epoch"
    assert await states.store([StateChange(KEY, State(first.state.epoch, 8, [(9, 10)]))]) == [True]
    await first.held.release()
    second = await acquired(other, states)
    assert second is not None and second.state == State(first.state.epoch + 1, 8, ((9, 10),))


async def test_a_late_store_of_a_lost_lock_is_refused() -> None:
    server, states = LockServer(), MemoryStates()
    one, other = (MemoryLocks(server, clock=anyio.current_time) for _ in range(2))
    first = await acquired(one, states)
    server.lose()
    second = await acquired(other, states)
    assert first is not None and second is not None
    # The first owner has not noticed its loss yet.
    assert await states.store([StateChange(KEY, State(first.state.epoch, 9))]) == [False]
    assert (await states.read([KEY]))[KEY] == second.state
    one.renew()
    assert first.held.lost == "the lock service no longer has it"


async def test_a_failed_claim_releases_the_lock() -> None:
    async def refused(what: str, seconds: float) -> None:
        raise SourceError("the database is away", retryable=True)

    server = LockServer()
    locks = MemoryLocks(server, clock=anyio.current_time)
    with pytest.raises(SourceError, match="the database is away"):
        await acquired(locks, MemoryStates(refused))
    assert server.holder(NAME, anyio.current_time()) is None
    assert await acquired(locks, MemoryStates()) is not None


async def test_a_cancelled_claim_releases_the_lock() -> None:
    reached = anyio.Event()

    async def slow(what: str, seconds: float) -> None:
        reached.set()
        await anyio.sleep_forever()

    server = LockServer()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(acquired, MemoryLocks(server, clock=anyio.current_time), MemoryStates(slow))
        await reached.wait()
        assert server.holder(NAME, anyio.current_time()) is not None
        tasks.cancel_scope.cancel()
    assert server.holder(NAME, anyio.current_time()) is None


@pytest.mark.parametrize("how", ["lost", "frozen"])
async def test_a_lock_that_is_lost_during_the_claim_owns_nothing(how: str) -> None:
    now = [100.0]
    server = LockServer()
    locks = MemoryLocks(server, lease=10.0, clock=lambda: now[0])

    async def meanwhile(what: str, seconds: float) -> None:
        await anyio.lowlevel.checkpoint()
        if how == "lost":
            server.lose()
            locks.renew()
        else:
            now[0] += 10.0

    found = await acquire(
        locks, MemoryStates(meanwhile), KEY, name=NAME, start=0, changed=nothing, clock=lambda: now[0]
    )
    assert found is None
    assert server.holder(NAME, now[0]) is None


@pytest.mark.parametrize("how", ["lost", "expired"])
async def test_a_claim_that_waits_ends_with_its_lock(how: str) -> None:
    """A pool without a free connection would let the claim raise the epoch of the next owner."""
    server = LockServer()
    reached, free, ended = anyio.Event(), anyio.Event(), anyio.Event()

    async def busy(what: str, seconds: float) -> None:
        reached.set()
        await free.wait()

    slow = MemoryStates(busy)
    lease = 3600.0 if how == "lost" else 0.2
    locks = MemoryLocks(server, lease=lease, clock=anyio.current_time)
    found: list[Acquired | None] = []
    changes: list[str] = []

    def changed() -> None:
        changes.append(how)

    async def waits() -> None:
        found.append(await acquire(locks, slow, KEY, name=NAME, start=0, changed=changed, clock=anyio.current_time))
        ended.set()

    with anyio.fail_after(10.0):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(waits)
            await reached.wait()
            if how == "lost":
                server.lose()
                locks.renew()
                assert changes == ["lost"]
            await ended.wait()
    assert found == [None] and slow.stored() == {}
    assert server.holder(NAME, anyio.current_time()) is None


async def test_a_claim_may_last_as_long_as_its_lock_is_renewed() -> None:
    async def slow(what: str, seconds: float) -> None:
        await anyio.sleep(1.5)

    locks = MemoryLocks(LockServer(), lease=0.6, clock=anyio.current_time)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(locks.run)
        assert await acquired(locks, MemoryStates(slow)) is not None
        tasks.cancel_scope.cancel()


async def test_a_lock_that_comes_too_late_claims_nothing() -> None:
    now, server, states = [100.0], LockServer(), MemoryStates()

    class Late(MemoryLocks):
        async def try_acquire(self, name: str, changed: Callable[[], None]) -> Held | None:
            held = await super().try_acquire(name, changed)
            now[0] += 10.0
            return held

    locks = Late(server, lease=10.0, clock=lambda: now[0])
    assert await acquire(locks, states, KEY, name=NAME, start=0, changed=nothing, clock=lambda: now[0]) is None
    assert states.stored() == {}


async def test_local_locks_of_one_domain_exclude_each_other() -> None:
    one, other, beside = LocalLocks("here"), LocalLocks("here"), LocalLocks("there")
    held = await one.try_acquire(NAME, nothing)
    assert held is not None and held.deadline == float("inf")
    assert repr(one) == "<LocalLocks: 1 held>" and repr(other) == "<LocalLocks: 0 held>"
    assert await other.try_acquire(NAME, nothing) is None
    apart = await beside.try_acquire(NAME, nothing)
    assert apart is not None
    await one.aclose()
    assert await other.try_acquire(NAME, nothing) is not None
    for each in (other, beside):
        await each.aclose()


async def test_a_late_renewal_loses_the_lock() -> None:
    now, calls = [0.0], [0]

    def changed() -> None:
        calls[0] += 1

    async def free(held: HeldLock) -> None: ...

    held = HeldLock("a", changed, free, deadline=10.0, clock=lambda: now[0])
    assert held.renewed(9.0) and held.deadline == 10.0 and calls == [0], "a deadline never falls"
    now[0] = 5.0
    assert held.renewed(15.0) and held.deadline == 15.0 and calls == [1]
    now[0] = 15.0
    assert not held.renewed(25.0) and held.deadline == 15.0 and calls == [2]
    assert held.lost == "its deadline passed before a renewal was confirmed" and not held.active
    held.lose("again")
    assert held.lost.startswith("its deadline") and calls == [2]
    assert repr(held) == f"<HeldLock 'a': lost: {held.lost}>"


async def test_a_released_lock_is_not_lost() -> None:
    calls = [0]

    def changed() -> None:
        calls[0] += 1

    async def free(held: HeldLock) -> None: ...

    held = HeldLock("a", changed, free, deadline=10.0, clock=lambda: 0.0)
    await held.release()
    held.lose("the connection ended")
    assert not held.renewed(20.0)
    assert (held.lost, held.deadline, calls) == ("", 10.0, [0]) and repr(held) == "<HeldLock 'a': released>"
