"""The durables of a cohort keep their contract on a simulated server that refuses or loses requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final, Literal, get_args

import nats.errors
import pytest
from nats.aio.client import Client

from lanes import ConfigError, SourceError
from lanes.clock import monotonic
from lanes.cohort.leases import ConsumerExists, EpochConsumer, EpochConsumers, UnknownResult
from lanes_jetstream.cohort.epoch_consumers import EpochName, JetStreamEpochConsumers, floor_of
from lanes_jetstream.wire.connection import Connection
from memsource.contract.epochs import EPOCH_CHECKS, EpochCheck
from memsource.jetstream.epoch_consumers import EPOCH_MS, Durable, Retention
from tests.simulated.jetstream.server.server import Fate
from tests.simulated.jetstream.stage import LATENCY, Stage, played, refusal

STREAM: Final = "S"
CREATE: Final = f"CONSUMER.CREATE.{STREAM}"
INFO: Final = f"CONSUMER.INFO.{STREAM}"
NAMES: Final = f"CONSUMER.NAMES.{STREAM}"


def durables_of(
    stage: Stage, client: Client | None = None, incarnation: str = "", **arguments: Any
) -> JetStreamEpochConsumers:
    found = stage.server.api.streams.get(STREAM)
    incarnation = incarnation or ("" if found is None else stage.server.api.stamp(found.created))
    arguments = {"filters": lambda partition: [f"{STREAM}.{partition}.>"], **arguments}
    return JetStreamEpochConsumers(
        Connection(client or stage.client), STREAM, "c", incarnation=incarnation, **arguments
    )


async def made(stage: Stage, retention: str = "limits", **arguments: Any) -> JetStreamEpochConsumers:
    await stage.stream(STREAM, retention=retention)
    return durables_of(stage, **arguments)


async def foreign(stage: Stage, name: str, **config: object) -> None:
    fields = {"name": name, "durable_name": name, "ack_policy": "explicit", **config}
    await stage.api(f"{CREATE}.{name}", {"stream_name": STREAM, "config": fields, "action": "create"})


class Harness:
    """A stream, and members with separate connections."""

    def __init__(self, stage: Stage, retention: Retention, clients: list[Client]) -> None:
        self.retention: Retention = retention
        self._stage = stage
        self._clients = clients
        self._replies: dict[tuple[Durable, int], str] = {}

    def consumers(self, lease: int = 0) -> EpochConsumers:
        return durables_of(self._stage, self._clients.pop(), lease=lease)

    async def publish(self, *partitions: int) -> list[int]:
        await self._stage.publish(*(f"{STREAM}.{partition}.key" for partition in partitions))
        last = self._stage.server.api.streams[STREAM].log.end
        return list(range(last - len(partitions), last))

    async def pull(self, durable: Durable, count: int) -> list[int] | None:
        name = EpochName(durable.partition, durable.epoch, durable.sub).durable("c")
        inbox, came = self._stage.client.new_inbox(), list[int]()
        subscription = await self._stage.client.subscribe(inbox)
        request = json.dumps({"batch": count, "expires": 1_000_000_000}).encode()
        await self._stage.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{name}", request, reply=inbox)
        while len(came) < count:
            message = await subscription.next_msg(timeout=5)
            status = (message.headers or {}).get("Status")
            if status is not None:
                return None if status == "503" else came
            came.append(int(message.reply.split(".")[5]))
            self._replies[durable, came[-1]] = message.reply
        return came

    async def ack(self, durable: Durable, sequence: int) -> bool:
        try:
            await self._stage.client.request(self._replies[durable, sequence], b"+ACK", timeout=5)
        except nats.errors.NoRespondersError:
            return False
        return True

    def fail(self, consumers: EpochConsumers, what: Literal["request", "reply"]) -> None:
        fate = Fate("drop_request" if what == "request" else "drop_reply")
        for call in ("CREATE", "DELETE"):
            self._stage.meet(f"$JS.API.CONSUMER.{call}", fate)


@pytest.mark.parametrize("retention", get_args(Retention))
@pytest.mark.parametrize("check", EPOCH_CHECKS, ids=lambda check: check.__name__)
def test_the_durables_of_a_simulated_server_keep_the_contract(check: EpochCheck, retention: Retention) -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream(STREAM, retention=retention)
        clients = [await stage.connect() for _ in range(3)]
        await check(Harness(stage, retention, list(clients)))
        for client in clients:
            await client.close()

    played(scene)


# --- creation


def test_a_durable_has_the_settings_of_its_cohort() -> None:
    async def scene(stage: Stage) -> None:
        durables = await made(stage, lease=7.0, ack_wait=2.5, max_ack_pending=9)
        await durables.create(3, 7, 2, nonce="n", start=5)
        common = {
            "description": "a cohort partition of lanes",
            "ack_policy": "explicit",
            "ack_wait": 2_500_000_000,
            "max_deliver": -1,
            "max_ack_pending": 9,
            "replay_policy": "instant",
        }
        (request,) = stage.fields(CREATE)
        assert request == {
            "stream_name": STREAM,
            "action": "create",
            "config": {
                "name": "c-p3-e7-2",
                "durable_name": "c-p3-e7-2",
                **common,
                "metadata": {"lanes-nonce": "n", "lanes-lease": "7"},
                "filter_subject": "S.3.>",
                "deliver_policy": "by_start_sequence",
                "opt_start_seq": 5,
            },
        }
        many = durables_of(stage, filters=lambda partition: (f"S.{partition}.a", f"S.{partition}.b"))
        await many.create(4, 8, 0, nonce="", start=None)
        await many.create(5, 8, 0, nonce="", start=0)
        whole, first = (each["config"] for each in stage.fields(CREATE)[1:])
        assert whole["filter_subjects"] == ["S.4.a", "S.4.b"]
        assert "filter_subject" not in whole
        assert (whole["ack_wait"], whole["max_ack_pending"]) == (300_000_000_000, 10_000)
        assert (whole["deliver_policy"], first["opt_start_seq"]) == ("all", 1)

    played(scene)


def test_a_durable_that_exists_is_refused_with_its_nonce() -> None:
    async def scene(stage: Stage) -> None:
        durables = await made(stage)
        await durables.create(1, 5, 0, nonce="mine", start=1)
        with pytest.raises(ConsumerExists, match=r"^consumer S/c-p1-e5 exists$") as exists:
            await durables.create(1, 5, 0, nonce="other", start=1)
        assert exists.value.nonce == "mine"
        # The durable may be deleted before its description is read, or have been created by another program.
        stage.answer(CREATE, refusal(400, 10_013))
        with pytest.raises(ConsumerExists) as exists:
            await durables.create(9, 5, 0, nonce="other", start=1)
        assert exists.value.nonce is None
        await foreign(stage, "c-p2-e5", metadata={"lanes-nonce": 3})
        with pytest.raises(ConsumerExists) as exists:
            await durables.create(2, 5, 0, nonce="other", start=1)
        assert exists.value.nonce is None

    played(scene)


def test_a_foreign_consumer_of_a_work_queue_is_named() -> None:
    async def scene(stage: Stage) -> None:
        durables = await made(stage, "workqueue")
        for number in range(7):
            await foreign(stage, f"other{number}", filter_subject=f"S.1.{number}")
        await durables.mark()
        await durables.create(2, 1, 0, nonce="", start=None)
        with pytest.raises(ConsumerExists) as exists:
            await durables.create(1, 1, 0, nonce="", start=None)
        named = "'other0', 'other1', 'other2', 'other3', 'other4'"
        assert str(exists.value) == (
            "consumer S/c-p1-e1: filtered consumer not unique on workqueue stream (10100); foreign consumers are "
            f"{named}"
        )
        assert exists.value.nonce is None
        stage.answer(CREATE, refusal(400, 10_099, "not unique"))
        stage.answer(NAMES, refusal(503))
        with pytest.raises(ConsumerExists, match="foreign consumers are 'other0'"):
            await durables.create(1, 1, 0, nonce="", start=None)

    played(scene)


def test_an_overlap_with_an_own_durable_names_no_foreign_consumer() -> None:
    async def scene(stage: Stage) -> None:
        durables = await made(stage, "workqueue")
        await durables.create(1, 1, 0, nonce="", start=None)
        with pytest.raises(ConsumerExists) as exists:
            await durables.create(1, 2, 0, nonce="", start=None)
        assert str(exists.value).endswith("filtered consumer not unique on workqueue stream (10100)")

    played(scene)


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (
            refusal(400, 10_026, "maximum consumers"),
            SourceError,
            r"^consumer S/c-p1-e1: maximum.*; raise max_consumers",
        ),
        (refusal(400, 10_005, "no"), SourceError, r"^consumer S/c-p1-e1 at the given connection: no \(10005\)$"),
        (refusal(503, 10_023, "busy"), UnknownResult, r"^stream 'S': busy \(10023\)$"),
        (
            refusal(404, 10_059),
            SourceError,
            r"^stream 'S' was deleted while .* 'c' used it.*delete the bucket 'lanes_S_c'",
        ),
    ],
)
def test_a_refused_creation_names_its_remedy(answer: dict[str, Any], kind: type[Exception], said: str) -> None:
    async def scene(stage: Stage) -> None:
        durables = await made(stage)
        stage.answer(CREATE, answer)
        with pytest.raises(kind, match=said):
            await durables.create(1, 1, 0, nonce="", start=1)

    played(scene)


@pytest.mark.parametrize("call", ["create", "found", "delete", "marked", "names"])
def test_a_request_is_sent_only_over_an_intact_connection(call: str) -> None:
    """A client that reconnects would keep the request, and send it after the timeout."""

    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        await stage.stream(STREAM)
        durables = durables_of(stage, client)
        calls: dict[str, Any] = {
            "create": lambda: durables.create(1, 1, 0, nonce="", start=1),
            "found": lambda: durables.found(1),
            "delete": lambda: durables.delete(1, 1, 0),
            "marked": durables.marked,
            "names": durables.names,
        }
        await calls[call]()
        stage.server.stop()
        await asyncio.sleep(0.1)
        began = monotonic()
        with pytest.raises(UnknownResult, match=r"^stream 'S': the given connection: not connected$"):
            await calls[call]()
        assert monotonic() == began
        stage.server.start(began)
        await asyncio.sleep(1.0)
        stage.deny("$JS.API.>")
        with pytest.raises(SourceError, match=r"^stream 'S': the given connection: permissions .*, and start again$"):
            await calls[call]()
        await client.close()
        with pytest.raises(SourceError, match="closed permanently"):
            await calls[call]()

    played(scene)


# --- the mark


def test_a_mark_keeps_the_longest_lease_of_all_members() -> None:
    async def scene(stage: Stage) -> None:
        short, long = await made(stage, "workqueue", lease=5.0), durables_of(stage, lease=30.0)
        assert await short.marked() is None
        await short.mark()
        assert stage.fields(CREATE)[0] == {
            "stream_name": STREAM,
            "action": "create",
            "config": {
                "name": "c-cohort",
                "durable_name": "c-cohort",
                "description": "a cohort of lanes uses this stream",
                "ack_policy": "explicit",
                "metadata": {"lanes-nonce": "", "lanes-lease": "5"},
                "filter_subject": "_lanes.cohort.mark-c",
            },
        }
        assert await short.marked() == 5
        await long.mark()
        assert await short.marked() == 30
        await short.mark()
        assert await long.marked() == 30
        assert [each["action"] for each in stage.fields(CREATE)] == ["create", "create", "update", "create"]
        await long.mark()
        assert len(stage.fields(CREATE)) == 5, "an equal lease needs no update"
        assert await short.names() == []

    played(scene)


def test_a_mark_that_disappears_during_its_update_is_not_created_again() -> None:
    async def scene(stage: Stage) -> None:
        durables = await made(stage, lease=5.0)
        stage.answer(CREATE, refusal(400, 10_148))
        stage.answer(INFO, {"config": {"metadata": {"lanes-nonce": ""}}}, refusal(404, 10_014))
        await durables.mark()
        assert len(stage.fields(CREATE)) == 1

    played(scene)


def test_a_foreign_consumer_in_the_way_of_the_mark_is_refused() -> None:
    async def scene(stage: Stage) -> None:
        durables = await made(stage, "workqueue")
        await foreign(stage, "all")
        with pytest.raises(SourceError, match=r"S/c-cohort: .* are 'all'; delete the foreign consumers$"):
            await durables.mark()

    played(scene)


# --- what is found


def test_a_found_durable_has_its_nonce_floor_lease_and_time() -> None:
    async def scene(stage: Stage) -> None:
        durables = await made(stage, lease=7)
        await asyncio.sleep(50)
        await stage.publish("S.1.a", "S.1.b", "S.1.c")
        await durables.create(1, 2, 1, nonce="b", start=3)
        await durables.create(1, 2, 0, nonce="a", start=1)
        await durables.create(2, 1, 0, nonce="x", start=1)
        found, clock = await durables.found(1)
        assert found == [EpochConsumer(1, 2, 0, "a", 0, 7), EpochConsumer(1, 2, 1, "b", 2, 7)]
        now = EPOCH_MS + asyncio.get_running_loop().time() * 1000
        assert now - 10 < clock <= now
        later, after = await durables.found(9)
        assert (later, after > clock) == ([], True), "the clock is that of the server"
        await foreign(stage, "c-p5-e1", metadata={"lanes-lease": "1234567890"})
        assert (await durables.found(5))[0] == [EpochConsumer(5, 1, 0, "", 0, 0)]

    played(scene)


@pytest.mark.parametrize(
    ("info", "floor"),
    [
        ({}, 0),
        ({"ack_floor": None, "config": None}, 0),
        ({"ack_floor": {"stream_seq": 7}}, 7),
        ({"ack_floor": {}, "config": {"opt_start_seq": 5}}, 4),
        ({"ack_floor": {"stream_seq": 3}, "config": {"opt_start_seq": 5}}, 4),
        ({"ack_floor": {"stream_seq": 9}, "config": {"opt_start_seq": 5}}, 9),
        ({"ack_floor": {"stream_seq": 0}, "config": {"opt_start_seq": None}}, 0),
    ],
)
def test_a_floor_is_at_least_the_message_before_the_start(info: dict[str, Any], floor: int) -> None:
    assert floor_of(info) == floor


def test_a_durable_that_is_gone_is_looked_for_in_the_next_listing() -> None:
    async def scene(stage: Stage) -> None:
        durables = await made(stage)
        await durables.create(1, 1, 0, nonce="n", start=1)
        await durables.create(1, 2, 0, nonce="n", start=1)
        stage.answer(INFO, refusal(404, 10_014))
        assert [each.epoch for each in (await durables.found(1))[0]] == [1, 2]
        assert len(stage.fields(NAMES)) == 2
        stage.answer(INFO, *[refusal(404, 10_014)] * 3)
        with pytest.raises(
            UnknownResult, match=r"^stream 'S': its consumers changed during each of 3 listings; retrying$"
        ):
            await durables.found(1)
        assert len(stage.fields(NAMES)) == 5

    played(scene)


def test_a_floor_above_the_listing_is_trusted_after_a_second_listing() -> None:
    """The message is newer than the first listing.

    If the message is also newer than the next listing, the stream lost messages.
    """

    async def scene(stage: Stage) -> None:
        durables = await made(stage)
        await durables.create(1, 1, 0, nonce="n", start=1)

        def above(answer: dict[str, Any]) -> dict[str, Any]:
            return {**answer, "ack_floor": {"stream_seq": 4}}

        stage.answer(INFO, above, above)
        assert [each.floor for each in (await durables.found(1))[0]] == [4]
        assert len(stage.fields(NAMES)) == 2
        await stage.publish(*["S.1.a"] * 4)
        stage.answer(INFO, above)
        assert [each.floor for each in (await durables.found(1))[0]] == [4]
        assert len(stage.fields(NAMES)) == 3

    played(scene)


def test_a_replaced_or_shortened_stream_stops_the_member() -> None:
    async def scene(stage: Stage) -> None:
        highest = [0]
        await stage.stream(STREAM)
        durables = durables_of(stage, highest=lambda: highest[0])
        await stage.publish("S.1.a", "S.1.a")
        highest[0] = 2
        assert await durables.names() == []
        durables.check_end(2)
        highest[0] = 3
        said = (
            r"^stream 'S' ends at sequence 2 but was read up to 3.*delete the bucket 'lanes_S_c' and the consumers c-p…"
        )
        with pytest.raises(SourceError, match=said):
            await durables.names()
        with pytest.raises(SourceError, match=said):
            durables.check_end(3)
        other = durables_of(stage, incarnation="another time")
        with pytest.raises(
            ConfigError, match=r"^stream 'S' was deleted and created again.*delete the bucket 'lanes_S_c'"
        ):
            await other.found(1)

    played(scene)


def test_the_configuration_of_the_stream_is_checked_with_each_listing() -> None:
    async def scene(stage: Stage) -> None:
        seen: list[Any] = []
        await stage.stream(STREAM)
        durables = durables_of(stage, check=seen.append)
        await durables.names()
        assert [each["name"] for each in seen] == [STREAM]
        stage.answer(f"STREAM.INFO.{STREAM}", lambda answer: {"created": answer["created"], "ts": answer["ts"]})
        await durables.names()
        assert (seen[1], durables._last) == ({}, 0)

    played(scene)


def test_a_refused_listing_names_the_stream() -> None:
    async def scene(stage: Stage) -> None:
        durables = await made(stage)
        for request in (f"STREAM.INFO.{STREAM}", NAMES):
            stage.answer(request, refusal(400, 7, "no"))
            with pytest.raises(SourceError, match=r"^stream 'S' at the given connection: no \(7\)$"):
                await durables.names()
            stage.answer(request, refusal(503, 7, "busy"))
            with pytest.raises(UnknownResult, match=r"^stream 'S': busy"):
                await durables.names()
        stage.answer(f"CONSUMER.DELETE.{STREAM}", refusal(400, 7, "no"))
        with pytest.raises(SourceError, match=r"^consumer S/c-p1-e1 at the given connection: no \(7\)$"):
            await durables.delete(1, 1, 0)

    played(scene)


def test_a_listing_serves_all_calls_that_were_made_before_it_began() -> None:
    async def scene(stage: Stage) -> None:
        durables = await made(stage)
        stage.meet(f"$JS.API.STREAM.INFO.{STREAM}", Fate("delay", 1.0))
        first = [asyncio.create_task(durables.names()) for _ in range(3)]
        await asyncio.sleep(0.5)
        second = [asyncio.create_task(durables.names()) for _ in range(3)]
        await asyncio.sleep(0)
        second[0].cancel()
        await asyncio.sleep(0)
        # The second listing begins after the first one, and sees what was created meanwhile.
        await durables.create(1, 1, 0, nonce="", start=1)
        assert await first[0] == await first[2]
        assert await second[1] == await second[2] == [(1, 1, 0)]
        assert second[0].cancelled()
        assert len(stage.fields(NAMES)) == 2

    played(scene)


def test_a_failed_listing_that_no_call_waits_for_is_no_error_of_the_loop() -> None:
    async def scene(stage: Stage) -> None:
        reported: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        durables = await made(stage)
        stage.answer(f"STREAM.INFO.{STREAM}", refusal(503))
        waiting = asyncio.create_task(durables.names())
        await asyncio.sleep(LATENCY / 2)
        waiting.cancel()
        await asyncio.sleep(1.0)
        assert await durables.names() == []
        assert reported == []

    played(scene)


def test_a_listing_has_the_durables_of_all_pages_once_and_in_order() -> None:
    async def scene(stage: Stage) -> None:
        durables = await made(stage)
        for page in (["c-p2-e1", "c-p1-e9"], ["x", "c-p1-e2", "c-p2-e1"]):
            stage.answer(NAMES, {"total": 5, "consumers": page})
        assert await durables.names() == [(1, 2, 0), (1, 9, 0), (2, 1, 0)]
        assert [fields["offset"] for fields in stage.fields(NAMES)] == [0, 2]

    played(scene)
