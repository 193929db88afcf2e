"""The lease store in memory keeps the contract of lease stores, and the contract finds stores that do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

import pytest

from lanes.cohort.leases import Entry, LeaseStore
from memsource.contract.harness import ContractBroken
from memsource.contract.leases import LEASE_CHECKS, LeaseCheck, LeaseHarness
from memsource.jetstream.lease_store import Bucket, MemoryLeaseStore
from memsource.jetstream.link import Link, LinkFault


class MemoryHarness:
    """A bucket whose clock moves only by ``elapse``. ``wrap`` replaces each client."""

    def __init__(self, bucket: Bucket, wrap: Callable[[MemoryLeaseStore], LeaseStore] | None = None) -> None:
        self.now = 0.0
        self.bucket = bucket
        self._wrap = wrap
        self._stores: dict[LeaseStore, MemoryLeaseStore] = {}

    def store(self) -> LeaseStore:
        made = MemoryLeaseStore(self.bucket, Link(lambda: self.now, _never, timeout=0.001))
        wrapped: LeaseStore = made if self._wrap is None else self._wrap(made)
        self._stores[wrapped] = made
        return wrapped

    async def elapse(self, seconds: float) -> None:
        self.now += seconds

    def fail(self, store: LeaseStore, what: Literal["request", "reply"]) -> None:
        kind: Literal["request lost", "reply lost"] = "request lost" if what == "request" else "reply lost"
        self._stores[store].link.faults.append(LinkFault(kind))


def _never(at: float, act: Callable[[float], None]) -> None:
    raise AssertionError(f"nothing is to be done later, at {at}: {act}")


BUCKETS: Final[Mapping[str, Callable[[], Bucket]]] = {
    "plain": Bucket,
    "with_markers": lambda: Bucket(markers=True),
    "made_anew": lambda: Bucket(first=1_700_000_000_000),
}


@pytest.mark.anyio
@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("check", LEASE_CHECKS, ids=lambda check: check.__name__)
async def test_the_lease_store_in_memory_keeps_the_contract(check: LeaseCheck, bucket: str) -> None:
    harness: LeaseHarness = MemoryHarness(BUCKETS[bucket]())
    await check(harness)


# --- stores that break the contract


@dataclass(frozen=True)
class _Ask:
    """The arguments of a write besides key and value."""

    revision: int | None
    ttl: float | None
    fence: tuple[str, int] | None


class _Wrong:
    """A store that delegates every call; each subclass breaks one promise."""

    def __init__(self, inner: MemoryLeaseStore) -> None:
        self.inner = inner

    async def read(self, key: str) -> Entry:
        return await self.inner.read(key)

    async def write(
        self,
        key: str,
        value: bytes,
        *,
        revision: int | None,
        ttl: float | None = None,
        fence: tuple[str, int] | None = None,
    ) -> int:
        ask = await self.asked(key, _Ask(revision, ttl, fence))
        return await self.inner.write(key, value, revision=ask.revision, ttl=ask.ttl, fence=ask.fence)

    async def asked(self, key: str, ask: _Ask) -> _Ask:
        return ask

    async def entries(self, prefix: str) -> Mapping[str, Entry]:
        return await self.inner.entries(prefix)


class _Unconditional(_Wrong):
    async def asked(self, key: str, ask: _Ask) -> _Ask:
        return replace(ask, revision=(await self.inner.read(key)).revision, fence=None)


class _WithoutFence(_Wrong):
    async def asked(self, key: str, ask: _Ask) -> _Ask:
        there = (await self.inner.read(key)).revision
        return ask if ask.fence is None else replace(ask, revision=there, fence=None)


class _LivesForEver(_Wrong):
    async def asked(self, key: str, ask: _Ask) -> _Ask:
        return replace(ask, ttl=None)


class _ExpiresEarly(_Wrong):
    async def asked(self, key: str, ask: _Ask) -> _Ask:
        return replace(ask, ttl=None if ask.ttl is None else ask.ttl / 2)


class _SendsAgain(_Wrong):
    """A store that repeats a write with an unknown result, so no fault reaches the caller."""

    async def asked(self, key: str, ask: _Ask) -> _Ask:
        self.inner.link.faults.clear()
        return ask


class _Cached(_Wrong):
    def __init__(self, inner: MemoryLeaseStore) -> None:
        super().__init__(inner)
        self.known: dict[str, Entry] = {}

    async def read(self, key: str) -> Entry:
        if key not in self.known:
            self.known[key] = await self.inner.read(key)
        return self.known[key]


class _EveryKey(_Wrong):
    async def entries(self, prefix: str) -> Mapping[str, Entry]:
        return await self.inner.entries(prefix.rstrip("."))


WRONG: Final[Mapping[type[_Wrong], str]] = {
    _Unconditional: "check_revision_0_creates_once",
    _WithoutFence: "check_a_fence_is_the_revision_of_another_key",
    _LivesForEver: "check_a_key_expires",
    _ExpiresEarly: "check_a_key_expires",
    _Cached: "check_a_write_is_read_by_every_client",
    _EveryKey: "check_entries_are_those_with_the_prefix",
    _SendsAgain: "check_a_lost_request_is_unknown",
}


@pytest.mark.anyio
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__.lstrip("_"))
async def test_the_contract_finds_a_lease_store_that_breaks_it(wrong: type[_Wrong]) -> None:
    (check,) = [check for check in LEASE_CHECKS if check.__name__ == WRONG[wrong]]
    with pytest.raises(ContractBroken):
        await check(MemoryHarness(Bucket(), wrong))
