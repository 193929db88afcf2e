"""The durables in memory keep the contract of a cohort's durables, and the contract finds those that do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, Literal, get_args

import pytest

from lanes.cohort.leases import ConsumerExists, EpochConsumer, EpochConsumers, UnknownResult
from memsource.contract.epochs import EPOCH_CHECKS, EpochCheck, EpochHarness
from memsource.contract.harness import ContractBroken
from memsource.jetstream.epoch_consumers import Durable, EpochStream, MemoryEpochConsumers, Retention
from memsource.jetstream.link import Link, LinkFault

SIZE: Final = 1 << 20
RETENTIONS: Final[tuple[Retention, ...]] = get_args(Retention)


class MemoryHarness:
    """A stream whose clock stands still. ``wrap`` replaces each client."""

    def __init__(
        self, retention: Retention, wrap: Callable[[MemoryEpochConsumers], EpochConsumers] | None = None
    ) -> None:
        self.retention: Retention = retention
        self.stream = EpochStream(4, retention=retention)
        self._wrap = wrap
        self._made: dict[EpochConsumers, MemoryEpochConsumers] = {}

    def consumers(self, lease: int = 0) -> EpochConsumers:
        made = MemoryEpochConsumers(self.stream, Link(lambda: 0.0, _never, timeout=0.001), lease)
        wrapped: EpochConsumers = made if self._wrap is None else self._wrap(made)
        self._made[wrapped] = made
        return wrapped

    async def publish(self, *partitions: int) -> list[int]:
        return [self.stream.publish("x", key="k", partition=partition).position for partition in partitions]

    async def pull(self, durable: Durable, count: int) -> list[int] | None:
        deliveries = self.stream.pull(durable, count, SIZE, 0.0)
        return None if deliveries is None else [each.record.position for each in deliveries]

    async def ack(self, durable: Durable, sequence: int) -> bool:
        return self.stream.ack(durable, sequence, 0.0)

    def fail(self, consumers: EpochConsumers, what: Literal["request", "reply"]) -> None:
        kind: Literal["request lost", "reply lost"] = "request lost" if what == "request" else "reply lost"
        self._made[consumers].link.faults.append(LinkFault(kind))


def _never(at: float, act: Callable[[float], None]) -> None:
    raise AssertionError(f"nothing is to be done later, at {at}: {act}")


def test_a_gap_of_sequences_is_never_negative() -> None:
    stream = EpochStream(2)
    stream.publish(partition=0)
    stream.skip(0)
    stream.skip(3)
    with pytest.raises(ValueError, match=r"count=-1: must be 0 or more, because sequences only rise"):
        stream.skip(-1)
    assert stream.publish(partition=1).position == 5


@pytest.mark.anyio
@pytest.mark.parametrize("retention", RETENTIONS)
@pytest.mark.parametrize("check", EPOCH_CHECKS, ids=lambda check: check.__name__)
async def test_the_durables_in_memory_keep_the_contract(check: EpochCheck, retention: Retention) -> None:
    harness: EpochHarness = MemoryHarness(retention)
    await check(harness)


# --- durables that break the contract


class _Wrong:
    """Durables that delegate every call; each subclass breaks one promise."""

    def __init__(self, inner: MemoryEpochConsumers) -> None:
        self.inner = inner

    async def found(self, partition: int) -> tuple[Sequence[EpochConsumer], int]:
        return await self.inner.found(partition)

    async def names(self) -> Sequence[tuple[int, int, int]]:
        return await self.inner.names()

    async def marked(self) -> int | None:
        return await self.inner.marked()

    async def mark(self) -> None:
        await self.inner.mark()

    async def create(self, partition: int, epoch: int, sub: int, *, nonce: str, start: int | None) -> None:
        await self.inner.create(partition, epoch, sub, nonce=nonce, start=start)

    async def delete(self, partition: int, epoch: int, sub: int) -> None:
        await self.inner.delete(partition, epoch, sub)


class _InSeconds(_Wrong):
    async def found(self, partition: int) -> tuple[Sequence[EpochConsumer], int]:
        found, clock = await self.inner.found(partition)
        return found, clock // 1000


class _ByName(_Wrong):
    """The names are sorted as text, so 10 precedes 9."""

    async def found(self, partition: int) -> tuple[Sequence[EpochConsumer], int]:
        found, clock = await self.inner.found(partition)
        return sorted(found, key=lambda each: f"{each.epoch}-{each.sub}"), clock


class _WithoutNonce(_Wrong):
    async def found(self, partition: int) -> tuple[Sequence[EpochConsumer], int]:
        found, clock = await self.inner.found(partition)
        return [replace(each, nonce="") for each in found], clock


class _WithoutFloor(_Wrong):
    async def found(self, partition: int) -> tuple[Sequence[EpochConsumer], int]:
        found, clock = await self.inner.found(partition)
        floors = [self.inner.stream.consumer(Durable(each.partition, each.epoch, each.sub)) for each in found]
        return [
            replace(each, floor=each.floor if of.unfinished else 0) for each, of in zip(found, floors, strict=True)
        ], clock


class _WithItsOwnLease(_Wrong):
    async def found(self, partition: int) -> tuple[Sequence[EpochConsumer], int]:
        found, clock = await self.inner.found(partition)
        return [replace(each, lease=self.inner.lease) for each in found], clock


class _OfOnePartition(_Wrong):
    async def names(self) -> Sequence[tuple[int, int, int]]:
        return [name for name in await self.inner.names() if name[0] == 0]


class _Overwrites(_Wrong):
    """Durables whose ``create`` replaces an existing consumer, as the broker's client does."""

    async def create(self, partition: int, epoch: int, sub: int, *, nonce: str, start: int | None) -> None:
        await self.inner.delete(partition, epoch, sub)
        await self.inner.create(partition, epoch, sub, nonce=nonce, start=start)


class _Silent(_Wrong):
    async def create(self, partition: int, epoch: int, sub: int, *, nonce: str, start: int | None) -> None:
        with suppress(ConsumerExists):
            await self.inner.create(partition, epoch, sub, nonce=nonce, start=start)


class _FromTheFirst(_Wrong):
    async def create(self, partition: int, epoch: int, sub: int, *, nonce: str, start: int | None) -> None:
        await self.inner.create(partition, epoch, sub, nonce=nonce, start=None)


class _Keeps(_Wrong):
    async def delete(self, partition: int, epoch: int, sub: int) -> None:
        return


class _DeletesAll(_Wrong):
    async def delete(self, partition: int, epoch: int, sub: int) -> None:
        for name in await self.inner.names():
            await self.inner.delete(*name)


class _SendsAgain(_Wrong):
    """Durables that repeat a call with an unknown result."""

    async def create(self, partition: int, epoch: int, sub: int, *, nonce: str, start: int | None) -> None:
        try:
            await self.inner.create(partition, epoch, sub, nonce=nonce, start=start)
        except UnknownResult:
            await self.inner.create(partition, epoch, sub, nonce=nonce, start=start)


class _MarkedByItsDurables(_Wrong):
    async def marked(self) -> int | None:
        return 0 if await self.inner.names() else None

    async def mark(self) -> None:
        return


class _MarksOnce(_Wrong):
    async def mark(self) -> None:
        if await self.inner.marked() is not None:
            raise ConsumerExists("it is marked", nonce=None)
        await self.inner.mark()


class _MarksItsOwnLease(_Wrong):
    async def mark(self) -> None:
        self.inner.stream.marked = None
        await self.inner.mark()


class _MarksByADurable(_Wrong):
    async def mark(self) -> None:
        with suppress(ConsumerExists):
            await self.inner.create(1, 0, 0, nonce="", start=None)
        await self.inner.mark()


WRONG: Final[Mapping[type[_Wrong], str]] = {
    _InSeconds: "check_nothing_is_found_at_first",
    _ByName: "check_they_rise_by_epoch_and_sub_number",
    _WithoutNonce: "check_what_is_made_is_found_by_every_client",
    _WithoutFloor: "check_the_floor_is_what_is_acknowledged",
    _WithItsOwnLease: "check_each_tells_the_lease_of_who_made_it",
    _OfOnePartition: "check_what_is_made_is_found_by_every_client",
    _Overwrites: "check_they_are_made_strictly",
    _Silent: "check_they_are_made_strictly",
    _FromTheFirst: "check_it_delivers_what_it_begins_with",
    _Keeps: "check_what_is_deleted_answers_nobody",
    _DeletesAll: "check_what_is_deleted_is_gone",
    _SendsAgain: "check_a_lost_request_is_unknown",
    _MarkedByItsDurables: "check_a_mark_outlives_every_durable",
    _MarksOnce: "check_a_mark_outlives_every_durable",
    _MarksByADurable: "check_a_mark_outlives_every_durable",
    _MarksItsOwnLease: "check_a_mark_tells_the_longest_lease",
}


@pytest.mark.anyio
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__.lstrip("_"))
async def test_the_contract_finds_durables_that_break_it(wrong: type[_Wrong]) -> None:
    (check,) = [check for check in EPOCH_CHECKS if check.__name__ == WRONG[wrong]]
    with pytest.raises(ContractBroken):
        await check(MemoryHarness("limits", wrong))
