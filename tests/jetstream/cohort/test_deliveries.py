"""A member drops deliveries after a missing one, and acts on each status and partition event; no server runs."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from nats.aio.client import Client

import lanes
from lanes.clock import monotonic
from lanes.cohort.leases import UnknownResult
from lanes.core.cohort.actions import LeaseLost, LeaseRevoked
from lanes.core.cohort.ledger import Done
from lanes.core.types import Message, Settlement
from lanes_jetstream import subject_token
from lanes_jetstream.cohort import source as cohort_source
from lanes_jetstream.cohort.epoch_consumers import JetStreamEpochConsumers
from lanes_jetstream.cohort.partitioning import KeyWatch
from lanes_jetstream.cohort.pulls import ConsumerPulls
from lanes_jetstream.wire.answers import ApiError
from lanes_jetstream.wire.connection import Connection
from tests.cohort.stub_cohort import taken_over
from tests.jetstream.cohort.stubs import Held, StubInbox, consumer_of, owned_partition, positions

pytestmark = pytest.mark.anyio


def kind(pulls: ConsumerPulls) -> str | None:
    broken = pulls.check()
    return None if broken is None else broken.kind


def failed(held: Held) -> bool:
    return held.partitions.failure is not None


async def test_arrivals_are_taken_in_order() -> None:
    side = StubInbox()
    of = owned_partition(side.pulls[0])
    for delivery, sequence in enumerate((4, 9, 11), start=1):
        await side.deliver("c", sequence, delivery)
    assert side.inbox.wake.is_set()
    delivered = of.take(subject_token(1), None)
    assert delivered is not None
    assert [(m.position, m.key) for m in delivered.run] == [(4, b"k"), (9, b"k"), (11, b"k")]
    assert (of.again, of.ledger.highest, of.lag) == ([], 11, 3 + 5)
    assert of.pulls is not None
    assert of.pulls.check() is None


async def test_all_deliveries_after_a_missing_one_are_dropped() -> None:
    side = StubInbox()
    of = owned_partition(side.pulls[0])
    await side.deliver("c", 4, 1)
    await side.deliver("c", 9, 3)
    await side.deliver("c", 11, 4)
    assert positions(of) == [4]
    assert side.pulls[0].check() == ("gap", "delivery 2 missing, got 3")
    assert of.ledger.snapshot() == Done(4, (4,))


async def test_a_missing_last_delivery_is_detected() -> None:
    """No later delivery reveals the loss; the idle server reports its last delivery number."""
    side = StubInbox()
    (pulls,) = side.pulls
    of = owned_partition(pulls)
    await side.deliver("c", 4, 1)
    await side.say(pulls, Status="100", Description="Idle Heartbeat", Nats_Last_Consumer="1")
    assert positions(of) == [4]
    assert pulls.check() is None
    await side.say(pulls, Status="100", Description="Idle Heartbeat", Nats_Last_Consumer="2")
    assert positions(of) == []
    assert pulls.check() == ("gap", "delivery 2 missing")


async def test_finished_messages_are_acknowledged_again_and_others_delivered() -> None:
    """The ledger knows finished messages of earlier owners, and of this owner after a new consumer."""
    side = StubInbox(["c", "d"])
    of = owned_partition(side.pulls[0], Done(9, (7,)))
    for delivery, sequence in enumerate((5, 7, 9, 10), start=1):
        await side.deliver("c", sequence, delivery)
    delivered = of.take(None, None)
    assert delivered is not None
    assert [message.position for message in delivered.run] == [7, 10]
    assert [reply.split(".")[5] for reply in of.again] == ["5", "9"]
    of.ledger.settled(7)
    of.follow(side.pulls[1])
    await side.deliver("c", 11, 5)
    for delivery, sequence in enumerate((7, 10, 11), start=1):
        await side.deliver("d", sequence, delivery)
    delivered = of.take(None, None)
    assert delivered is not None
    # The message is in flight here: it is passed on, because its token must be replaced.
    assert [message.position for message in delivered.run] == [10, 11]
    assert [reply.split(".")[3:6] for reply in of.again] == [["d", "1", "7"]]


async def test_a_new_consumer_resets_the_backlog() -> None:
    side = StubInbox(["c", "d"])
    of = owned_partition(side.pulls[0])
    await side.deliver("c", 4, 1)
    await side.deliver("c", 5, 2)
    assert positions(of) == [4, 5]
    assert of.lag == 2 + 5
    of.follow(side.pulls[1])
    assert [of.lag] == [None]
    await side.deliver("d", 4, 1, reply="$JS.ACK.S.d.1.4.1.1700000000.3")
    assert positions(of) == [4]
    assert (of.lag, of.backlog.missed) == (2 + 3, 0)


async def test_a_failing_key_function_makes_a_broken_message() -> None:
    side = StubInbox()
    of = owned_partition(side.pulls[0])
    await side.deliver("c", 4, 1)
    delivered = of.take(subject_token(7), None)
    assert delivered is not None
    assert isinstance(delivered.run[0].broken, lanes.errors.MessageError)


async def test_a_key_in_two_partitions_stops_the_source() -> None:
    side, watch = StubInbox(), KeyWatch()
    watch.see(b"k", 4)
    of = owned_partition(side.pulls[0])
    await side.deliver("c", 4, 1)
    with pytest.raises(lanes.SourceError, match=r"3 and 4|4 and 3"):
        of.take(subject_token(1), watch)


async def test_a_status_of_a_consumer_is_a_kind_of_interruption() -> None:
    side = StubInbox(["c", "d"])
    first, second = side.pulls
    await side.say(first, Status="503")
    assert (kind(first), kind(second)) == ("unanswered", None)
    await side.say(second, Status="409", Description="Consumer Deleted")
    assert second.failure is not None
    assert second.deleted
    side = StubInbox(["c", "d"])
    first, second = side.pulls
    await side.say(first, to=first.confirmation)
    assert first.check() is None
    await side.say(first, to=first.confirmation, Status="503")
    assert kind(first) == "unanswered"
    second.end()
    await side.say(second, Status="503")
    assert second.check() is None
    await side.deliver("d", 4, 1)
    assert second.reserved == 0


async def test_a_partition_pulls_from_its_newest_consumer() -> None:
    held = Held()
    held.tell((3, taken_over(7)))
    of = held.partitions.by_number[3]
    assert consumer_of(of) == "c-p3-e7-0"
    held.tell((3, taken_over(7, 1, again=True)))
    assert consumer_of(of) == "c-p3-e7-1"
    held.tell((3, LeaseRevoked()))
    assert consumer_of(of) is None


async def test_a_listing_that_a_busy_server_refuses_has_an_unknown_result(monkeypatch: pytest.MonkeyPatch) -> None:
    async def api(subject: str, body: object = None) -> dict[str, Any]:
        raise ApiError(10023, "insufficient resources", 503)

    connection = Connection(Client())
    monkeypatch.setattr(connection, "api", api)
    monkeypatch.setattr(connection, "_client", SimpleNamespace(is_connected=True, is_closed=False))
    consumers = JetStreamEpochConsumers(connection, "S", "c", incarnation="", filters=lambda _: [])
    with pytest.raises(UnknownResult, match="insufficient resources"):
        await consumers.found(3)


async def test_a_ledger_beyond_the_end_of_the_stream_stops_the_source() -> None:
    """New messages would count as finished, unless the cohort was configured to begin there."""
    held = Held(last=10)
    held.tell((1, taken_over(7, done=Done(10, ()))))
    assert not failed(held)
    held.tell((2, taken_over(7, done=Done(11, ()))))
    assert failed(held)
    held = Held(last=10, first=20)
    held.tell((1, taken_over(7, done=Done(19, ()))))
    assert not failed(held)
    assert held.partitions.highest == 0


async def test_nothing_is_sent_for_a_lost_partition() -> None:
    """No acknowledgement and no keep-alive, after the loss and after the deadline."""
    held = Held()
    held.tell((1, taken_over(7)), (2, taken_over(7)), (3, taken_over(7)))
    partitions = {number: of.partition for number, of in held.partitions.by_number.items()}
    held.tell((1, LeaseLost("why")))
    partitions[2].deadline = monotonic() - 0.001
    sent: list[str] = []
    confirmed: list[str] = []

    async def send(data: bytes) -> None:
        sent.extend(line.split()[1] for line in data.decode().split("\r\n") if line.startswith("PUB"))

    async def publish(subject: str, body: bytes, reply: str = "") -> None:
        sent.append(subject)
        confirmed.append(reply)

    async def flush() -> None:
        """Nothing waits."""

    client: Any = held.side.client
    client._send_command, client._flush_pending, client.publish = send, flush, publish
    client.is_draining, client.stats = False, {"out_msgs": 0, "out_bytes": 0, "reconnects": 0}
    source = held.source
    messages = [Message(partitions[number], 5, None, 1, None, f"ack.{number}") for number in (1, 2, 3)]
    held.partitions.by_number[3].ledger.delivered(5)
    await source.extend(messages)
    assert sent == ["ack.3"]
    await source.settle([Settlement(message.partition, [message]) for message in messages])
    assert sent == ["ack.3", "ack.3"]
    assert 5 not in held.partitions.by_number[3].ledger.snapshot().outstanding
    # The old consumer has no responder; the answer for the current one confirms that it exists.
    assert confirmed == []
    messages[2].token = "$JS.ACK.S.c-p3-e7-0.1.5.1.1.1"
    await source.settle([Settlement(partitions[3], [messages[2]])])
    assert confirmed == [f"{client.new_inbox()}.3.ack"]


async def test_a_redelivery_is_acknowledged_only_before_the_deadline_of_its_partition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, sent = [0.0], list[str]()

    async def send_all(client: Any, tokens: Sequence[str], body: bytes) -> None:
        sent.extend(tokens)
        now[0] += 3.0

    monkeypatch.setattr(cohort_source, "send_all", send_all)
    held = Held(clock=lambda: now[0])
    for number, deadline in enumerate((1.0, 2.0, 5.0)):
        held.tell((number, taken_over(7)), deadline=deadline)
        held.partitions.by_number[number].again = [f"reply {number}"]
    await held.source._acknowledge_again()
    assert sent == ["reply 0", "reply 2"]
    assert held.partitions.by_number[1].again == ["reply 1"]
