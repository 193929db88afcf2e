"""What a member of a cohort makes of deliveries, statuses and events, one by one and without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

import lanes
from lanes.clock import Clock, monotonic
from lanes.cohort.leases import UnknownResult
from lanes.core.cohort.actions import LeaseLost, LeaseRevoked
from lanes.core.cohort.ledger import Done
from lanes.core.types import Message, Partition, PartitionId, Settlement
from lanes_jetstream import Cohort, subject_token
from lanes_jetstream.cohort.epoch_consumers import JetStreamEpochConsumers
from lanes_jetstream.cohort.owned_partition import PulledPartition
from lanes_jetstream.cohort.partitioning import KeyWatch
from lanes_jetstream.cohort.pulls import ConsumerPulls
from lanes_jetstream.cohort.source import CohortSource
from lanes_jetstream.wire.connection import ApiError, Connection
from lanes_jetstream.wire.messages import READER
from tests.cohort.held import Held as StubHeld
from tests.cohort.held import taken_over
from tests.jetstream.stub_pulls import Side

pytestmark = pytest.mark.anyio


def owned(pulls: ConsumerPulls, done: Done = Done(0, ())) -> PulledPartition:  # noqa: B008
    made = PulledPartition(3, Partition(PartitionId("S", 3), READER, "now"), done)
    made.follow(pulls)
    return made


def positions(found: PulledPartition, **arguments: Any) -> list[int]:
    delivered = found.take(arguments.get("key"), arguments.get("watch"))
    return [] if delivered is None else [message.position for message in delivered.run]


# --- deliveries


async def test_what_comes_is_taken_in_order() -> None:
    side = Side()
    of = owned(side.pulls[0])
    for delivery, sequence in enumerate((4, 9, 11), start=1):
        await side.deliver("c", sequence, delivery)
    assert side.inbox.wake.is_set()
    delivered = of.take(subject_token(1), None)
    assert delivered is not None
    assert [(m.position, m.key) for m in delivered.run] == [(4, b"k"), (9, b"k"), (11, b"k")]
    assert (of.again, of.ledger.highest, of.lag) == ([], 11, 3 + 5)
    assert of.pulls is not None
    assert of.pulls.check() is None


async def test_everything_behind_a_missing_delivery_is_dropped() -> None:
    side = Side()
    of = owned(side.pulls[0])
    await side.deliver("c", 4, 1)
    await side.deliver("c", 9, 3)
    await side.deliver("c", 11, 4)
    assert positions(of) == [4]
    assert side.pulls[0].check() == ("gap", "delivery 2 missing, got 3")
    assert of.ledger.snapshot() == Done(4, (4,))


async def test_a_last_delivery_that_never_came_is_missed() -> None:
    """Nothing follows that would show it: the server says how far it is while it is idle."""
    side = Side()
    (pulls,) = side.pulls
    of = owned(pulls)
    await side.deliver("c", 4, 1)
    await side.say(pulls, Status="100", Description="Idle Heartbeat", Nats_Last_Consumer="1")
    assert positions(of) == [4]
    assert pulls.check() is None
    await side.say(pulls, Status="100", Description="Idle Heartbeat", Nats_Last_Consumer="2")
    assert positions(of) == []
    assert pulls.check() == ("gap", "delivery 2 missing")


async def test_what_is_done_is_acknowledged_again_and_what_is_outstanding_comes_in() -> None:
    """By the ledger of earlier owners; and of this one, when the next consumer brings it again."""
    side = Side(["c", "d"])
    of = owned(side.pulls[0], Done(9, (7,)))
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
    # Held here: its token is to be swapped, so it is passed on.
    assert [message.position for message in delivered.run] == [10, 11]
    assert [reply.split(".")[3:6] for reply in of.again] == [["d", "1", "7"]]


async def test_another_consumer_says_anew_what_is_left() -> None:
    side = Side(["c", "d"])
    of = owned(side.pulls[0])
    await side.deliver("c", 4, 1)
    await side.deliver("c", 5, 2)
    assert positions(of) == [4, 5]
    assert of.lag == 2 + 5
    of.follow(side.pulls[1])
    assert [of.lag] == [None]
    await side.deliver("d", 4, 1, reply="$JS.ACK.S.d.1.4.1.1700000000.3")
    assert positions(of) == [4]
    assert (of.lag, of.backlog.missed) == (2 + 3, 0)


async def test_a_key_that_cannot_be_read_is_a_broken_message() -> None:
    side = Side()
    of = owned(side.pulls[0])
    await side.deliver("c", 4, 1)
    delivered = of.take(subject_token(7), None)
    assert delivered is not None
    assert isinstance(delivered.run[0].broken, lanes.errors.MessageError)


async def test_a_key_that_was_seen_elsewhere_stops() -> None:
    side, watch = Side(), KeyWatch()
    watch.see(b"k", 4)
    of = owned(side.pulls[0])
    await side.deliver("c", 4, 1)
    with pytest.raises(lanes.SourceError, match=r"3 and 4|4 and 3"):
        of.take(subject_token(1), watch)


async def test_both_forms_of_the_reply_and_none_of_others() -> None:
    side = Side()
    of = owned(side.pulls[0])
    await side.deliver("c", 4, 1)
    await side.deliver("c", 0, 0, reply="$JS.ACK.hub.ACCHASH.S.c.1.5.2.1700000000.7")
    await side.deliver("c", 0, 0, reply="$JS.ACK.hub.ACCHASH.S.c.1.6.3.1700000000.6.random")
    for hostile in ("", "c", "a.b.c.c", "$JS.ACK.S.other.1.9.9.1.1", "$JS.ACK.S.c", "." * 30):
        await side.inbox._receive(Msg(side.client, "0.k", hostile, b""))  # type: ignore[arg-type]
    assert positions(of) == [4, 5, 6]


def kind(pulls: ConsumerPulls) -> str | None:
    broken = pulls.check()
    return None if broken is None else broken.kind


async def test_statuses_of_a_consumer() -> None:
    side = Side(["c", "d"])
    first, second = side.pulls
    await side.say(first, Status="503")
    assert (kind(first), kind(second)) == ("unanswered", None)
    await side.say(second, Status="409", Description="Consumer Deleted")
    assert second.failure is not None
    assert second.deleted
    side = Side(["c", "d"])
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


# --- events


class Held(StubHeld[PulledPartition]):
    """What a source holds whose membership says what the test wants. ``last``: where the stream ends."""

    def __init__(self, *, last: int = 1_000, first: int = 0, clock: Clock = monotonic) -> None:
        self.side = Side([])
        connection = Connection(Client())
        connection._prefix = "$JS.API"
        connection._client = self.side.client  # type: ignore[assignment]
        self.source = CohortSource(
            connection, "S", Cohort("c", member="a"), key=None, start="beginning", ack_wait=30, max_ack_pending=9
        )
        self.source._inbox = self.side.inbox
        consumers = JetStreamEpochConsumers(connection, "S", "c", incarnation="now", filters=lambda _: [])
        consumers._last = last
        consumers.name = "c-p{}-e{}-{}".format  # type: ignore[method-assign]
        self.source._consumers = consumers
        super().__init__(PulledPartition, self.source._follow, first=first, clock=clock)
        self.source._partitions = self.partitions

    def wake(self) -> None:
        self.side.inbox.wake.set()


def consumer_of(found: PulledPartition) -> str | None:
    return None if found.pulls is None else found.pulls.consumer


def failed(held: Held) -> bool:
    return held.partitions.failure is not None


async def test_the_pulls_of_a_partition_are_those_of_its_last_consumer() -> None:
    held = Held()
    held.tell((3, taken_over(7)))
    of = held.partitions.by_number[3]
    assert consumer_of(of) == "c-p3-e7-0"
    held.tell((3, taken_over(7, 1, again=True)))
    assert consumer_of(of) == "c-p3-e7-1"
    held.tell((3, LeaseRevoked()))
    assert consumer_of(of) is None


async def test_a_server_that_is_short_of_resources_leaves_a_listing_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def api(subject: str, body: object = None) -> dict[str, Any]:
        raise ApiError(10023, "insufficient resources", 503)

    connection = Connection(Client())
    monkeypatch.setattr(connection, "api", api)
    monkeypatch.setattr(connection, "_client", SimpleNamespace(is_connected=True, is_closed=False))
    consumers = JetStreamEpochConsumers(connection, "S", "c", incarnation="", filters=lambda _: [])
    with pytest.raises(UnknownResult, match="insufficient resources"):
        await consumers.found(3)


async def test_a_ledger_beyond_the_end_of_the_stream() -> None:
    """New messages would pass for finished ones; unless the cohort was told to begin there."""
    held = Held(last=10)
    held.tell((1, taken_over(7, done=Done(10, ()))))
    assert not failed(held)
    held.tell((2, taken_over(7, done=Done(11, ()))))
    assert failed(held)
    held = Held(last=10, first=20)
    held.tell((1, taken_over(7, done=Done(19, ()))))
    assert not failed(held)
    assert held.partitions.highest == 0


async def test_nothing_is_sent_of_what_is_owned_no_more() -> None:
    """Neither acknowledged nor kept alive: once it is lost, and once its deadline has passed."""
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
    # Nobody answers for the consumer before; of the one that is pulled it says that it is there.
    assert confirmed == []
    messages[2].token = "$JS.ACK.S.c-p3-e7-0.1.5.1.1.1"
    await source.settle([Settlement(partitions[3], [messages[2]])])
    assert confirmed == [f"{client.new_inbox()}.3.ack"]
