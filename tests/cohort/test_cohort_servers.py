"""The simulated bucket, durables and links of a cohort behave like the objects of a server."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from lanes.cohort.leases import Conflict, ConsumerExists, Entry, UnknownResult
from lanes.errors import SourceError
from memsource.jetstream.epoch_consumers import Durable, EpochStream, Retention
from memsource.jetstream.lease_store import Bucket, MemoryLeaseStore
from memsource.jetstream.link import Link, LinkFault

SIZE = 1 << 20

# --- the bucket


def test_a_key_expires_in_whole_seconds_and_a_little_late() -> None:
    bucket = Bucket(seed=3)
    written = bucket.write("l.0", b"x", 10.0, revision=0, ttl=3.0)
    at = bucket.next_at()
    assert 13.0 <= at <= 13.25
    assert bucket.read("l.0", at - 0.001) == Entry(b"x", written)
    assert bucket.read("l.0", at) == Entry(None, 0)
    assert bucket.next_at() == math.inf
    for ttl in (0.5, 1.5, 0.0):
        with pytest.raises(ValueError, match=f"ttl={ttl} of key 'l.0': must be whole seconds, 1 or more"):
            bucket.write("l.0", b"x", 20.0, revision=0, ttl=ttl)
    for revision, fence in ((None, None), (0, ("l.0", 1))):
        with pytest.raises(ValueError, match="pass either a revision or a fence"):
            bucket.write("l.0", b"x", 20.0, revision=revision, fence=fence)


def test_a_key_that_is_renewed_does_not_expire_at_its_first_deadline() -> None:
    bucket = Bucket(late=0.0)
    first = bucket.write("l.0", b"x", 0.0, revision=0, ttl=3.0)
    second = bucket.write("l.0", b"y", 2.0, revision=first, ttl=3.0)
    assert bucket.read("l.0", 4.9) == Entry(b"y", second)
    assert bucket.read("l.0", 5.0) == Entry(None, 0)


def test_the_marker_of_an_expired_key_has_a_revision_and_no_value() -> None:
    bucket = Bucket(markers=True, late=0.0)
    written = bucket.write("l.0", b"x", 0.0, revision=0, ttl=1.0)
    left = bucket.read("l.0", 1.0)
    assert left.value is None and left.revision > written
    assert bucket.entries("", 1.0) == {}
    with pytest.raises(Conflict, match=r"key 'l\.0' has revision 0"):
        bucket.write("s.0", b"x", 1.0, revision=None, fence=("l.0", left.revision))
    bucket.write("l.0", b"y", 1.0, revision=left.revision)


def test_a_bucket_that_is_lost_is_empty_and_may_continue_above_its_former_revisions() -> None:
    bucket = Bucket()
    first = bucket.write("l.0", b"x", 0.0, revision=0, ttl=5.0)
    bucket.lose(1.0, first=1000)
    assert (bucket.read("l.0", 1.0), bucket.next_at()) == (Entry(None, 0), math.inf)
    assert bucket.write("l.0", b"y", 1.0, revision=0) == 1001
    bucket.drop("l.0", 2.0)
    assert bucket.read("l.0", 2.0) == Entry(None, 0)
    assert first < 1000


def test_a_bucket_that_loses_its_last_writes_uses_their_revisions_again() -> None:
    bucket = Bucket(late=0.0)
    kept = bucket.write("plan", b"1", 0.0, revision=0)
    lease = bucket.write("l.0", b"a", 1.0, revision=0, ttl=10.0)
    again = bucket.write("l.0", b"b", 5.0, revision=lease, ttl=10.0)
    bucket.write("s.0", b"x", 5.0, revision=None, fence=("l.0", again))
    bucket.fall_back(1.0, 5.5)
    assert bucket.read("plan", 5.5) == Entry(b"1", kept)
    assert bucket.read("s.0", 5.5) == Entry(None, 0)
    assert bucket.read("l.0", 5.5) == Entry(b"a", lease)
    assert bucket.next_at() == 11.0
    assert bucket.write("l.0", b"c", 6.0, revision=lease) == again


def test_a_watcher_of_the_simulated_bucket_gets_every_write() -> None:
    bucket, heard = Bucket(), list[str]()
    bucket.watch(heard.append)
    bucket.watch(heard.append)
    revision = bucket.write("plan", b"1", 0.0, revision=0)
    with pytest.raises(Conflict):
        bucket.write("plan", b"2", 0.0, revision=0)
    bucket.unwatch(heard.append)
    bucket.write("plan", b"2", 0.0, revision=revision)
    assert heard == ["plan"]


# --- the durables


def stream(retention: Retention, *positions: int) -> EpochStream:
    made = EpochStream(1, retention=retention)
    if retention == "interest":
        made.create(Durable(0, 0, 0), 0.0, nonce="", start=None)
    for _ in positions:
        made.publish("x", key="k", partition=0)
    return made


def pulled(made: EpochStream, name: Durable, count: int = 10) -> list[int]:
    deliveries = made.pull(name, count, SIZE, 0.0)
    assert deliveries is not None
    return [each.record.position for each in deliveries]


def test_a_durable_of_a_stream_with_limits_begins_at_its_start() -> None:
    made = stream("limits", 1, 2, 3, 4)
    old, new = Durable(0, 1, 0), Durable(0, 2, 0)
    made.create(old, 0.0, nonce="a", start=None)
    assert pulled(made, old) == [1, 2, 3, 4]
    for position in (1, 2, 4):
        assert made.ack(old, position, 0.0)
    assert [(each.epoch, each.floor) for each in made.found(0)] == [(1, 2)]
    made.create(new, 0.0, nonce="b", start=3)
    assert [(each.nonce, each.floor) for each in made.found(0)] == [("a", 2), ("b", 2)]
    assert pulled(made, new) == [3, 4]
    with pytest.raises(ConsumerExists) as there:
        made.create(new, 0.0, nonce="c", start=1)
    assert there.value.nonce == "b"


def test_a_work_queue_has_one_durable_with_the_unfinished_messages() -> None:
    made = stream("workqueue", 1, 2, 3, 4)
    old, new = Durable(0, 1, 0), Durable(0, 2, 0)
    made.create(old, 0.0, nonce="a", start=None)
    assert pulled(made, old) == [1, 2, 3, 4]
    made.ack(old, 2, 0.0)
    with pytest.raises(ConsumerExists) as there:
        made.create(new, 0.0, nonce="b", start=None)
    assert there.value.nonce is None
    made.delete(old, 0.0)
    with pytest.raises(ValueError, match="a durable of a work queue has no start"):
        made.create(new, 0.0, nonce="b", start=2)
    made.create(new, 0.0, nonce="b", start=None)
    assert pulled(made, new) == [1, 3, 4]


def test_a_stream_with_interest_keeps_the_messages_that_its_durables_need() -> None:
    made = stream("interest", 1, 2, 3)
    old, new = Durable(0, 0, 0), Durable(0, 1, 0)
    assert pulled(made, old) == [1, 2, 3]
    made.ack(old, 1, 0.0)
    made.create(new, 0.0, nonce="b", start=2)
    made.delete(old, 0.0)
    assert pulled(made, new) == [2, 3]
    made.delete(new, 0.0)
    # The last durable takes all messages with it, and later messages are not kept.
    made.publish("x", key="k", partition=0)
    made.create(Durable(0, 2, 0), 0.0, nonce="c", start=None)
    assert pulled(made, Durable(0, 2, 0)) == []


def test_a_deleted_durable_gives_no_answer() -> None:
    made = stream("limits", 1)
    name = Durable(0, 1, 0)
    made.create(name, 0.0, nonce="a", start=None)
    assert pulled(made, name) == [1]
    made.delete(name, 0.0)
    made.delete(name, 0.0)
    assert (made.pull(name, 1, SIZE, 0.0), made.ack(name, 1, 0.0), made.stale) == (None, False, 2)
    assert [name for _, name in made.deleted] == [name]
    made.set_back = 5.0
    assert made.server_ms(10.0) == made.server_ms(15.0) - 5000


# --- the link


def store(now: Callable[[], float], later: list[tuple[float, Callable[[float], None]]]) -> MemoryLeaseStore:
    return MemoryLeaseStore(Bucket(), Link(now, lambda at, act: later.append((at, act)), timeout=0.001))


@pytest.mark.anyio
async def test_a_delayed_write_is_applied_after_its_call_has_failed() -> None:
    later: list[tuple[float, Callable[[float], None]]] = []
    made = store(lambda: 1.0, later)
    made.link.faults.extend([LinkFault("late", 4.0), LinkFault("late", 4.0), None])
    with pytest.raises(UnknownResult):
        await made.write("plan", b"1", revision=0)
    # A late read gets nothing.
    with pytest.raises(UnknownResult):
        await made.read("plan")
    assert await made.read("plan") == Entry(None, 0)
    ((at, act),) = later
    assert at == 5.0
    act(5.0)
    assert (await made.read("plan")).value == b"1"
    # The second write is refused, and no call gets the answer.
    act(6.0)


@pytest.mark.anyio
async def test_no_call_reaches_the_server_over_a_cut_link_or_after_a_crash() -> None:
    later: list[tuple[float, Callable[[float], None]]] = []
    made = store(lambda: 1.0, later)
    made.link.cut = True
    for fault in (None, None, LinkFault("late", 4.0), LinkFault("reply lost")):
        made.link.faults.append(fault)
        with pytest.raises(UnknownResult, match=r"no answer within 0.001 s"):
            await made.write("plan", b"1", revision=0)
    made.link.cut = False
    assert later == []
    assert await made.read("plan") == Entry(None, 0)
    made.link.sever()
    with pytest.raises(SourceError, match="crashed"):
        await made.read("plan")
    assert repr(made.link) == "<Link: severed, 2 reads, 4 writes>"
