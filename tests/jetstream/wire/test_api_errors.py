"""A refused or unanswered API request: the error names the request, the server, and whether a retry helps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, Final

import nats.errors
import pytest

import lanes
from lanes.cohort.leases import UnknownResult
from lanes_jetstream import Cohort, JetStreamDeadLetters, JetStreamSource, whole_subject
from lanes_jetstream.cohort.lease_store import JetStreamLeaseStore
from lanes_jetstream.cohort.setup import find_cohort
from lanes_jetstream.cohort.view import CohortView, read_namespaces
from lanes_jetstream.dead_letters.box import JetStreamDeadLetterBox
from lanes_jetstream.wire import codes
from lanes_jetstream.wire.answers import ApiError, fields_of
from lanes_jetstream.wire.connection import Connection, NoAnswer, NoJetStream, NotPermitted
from lanes_jetstream.wire.stream import find_or_create
from tests.components import NatsServer
from tests.jetstream.workload import Stream

pytestmark = pytest.mark.anyio


URL: Final = "nats://user:hunter2@broker:4222"


ERRORS: Final = {
    "busy": ApiError(10008, "JetStream system temporarily unavailable", 503),
    "refused": ApiError(10023, "insufficient resources", 400),
    "silent": NoAnswer("nats://broker:4222: no answer to STREAM.INFO.X (TimeoutError)"),
    "off": NoJetStream("nats://broker:4222: JetStream does not answer"),
    "denied": NotPermitted("nats://broker:4222: permissions violation: grant this permission"),
}


TEMPORARY: Final = ("busy", "silent")


def _view(connection: Connection) -> CohortView:
    return CohortView(connection, "orders", "billing")


REQUESTS: Final[dict[str, tuple[Callable[[Connection], Awaitable[object]], str]]] = {
    "letters": (lambda _: JetStreamDeadLetters(URL, "parked").open(), "dead-letter subject 'parked'"),
    "box": (lambda _: JetStreamDeadLetterBox(URL, "parked").open(), "subject 'parked'"),
    "read letters": (lambda _: JetStreamDeadLetterBox(URL, "parked").ids(), "letters in stream ''"),
    "leases": (lambda connection: JetStreamLeaseStore(connection, "lanes_orders").open(), "bucket 'lanes_orders'"),
    "view": (lambda connection: _view(connection).check(), "bucket 'lanes_orders_billing'"),
    "durables": (lambda connection: _view(connection).durables(), "stream 'orders'"),
    "namespaces": (lambda connection: read_namespaces(connection, "orders"), "the buckets of stream 'orders'"),
    "place": (
        lambda connection: find_cohort(connection, "orders", Cohort("c"), key=whole_subject, start="beginning"),
        "stream 'orders'",
    ),
    "durable": (
        lambda _: JetStreamSource(URL, stream="orders", durable="bills", key=None, start_timeout=0).open(),
        "orders",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("asked", REQUESTS)
async def test_an_error_names_the_request_and_whether_a_retry_helps(
    asked: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: Connection, subject: str, request: object = None) -> dict[str, Any]:
        raise ERRORS[error]

    async def nothing(self: Connection) -> None: ...

    monkeypatch.setattr(Connection, "api", fail)
    monkeypatch.setattr(Connection, "open", nothing)
    monkeypatch.setattr(Connection, "check_server", lambda self: None)
    ask, what = REQUESTS[asked]
    with pytest.raises(lanes.SourceError) as failed:
        await ask(Connection(URL))
    said = str(failed.value)
    assert what in said and said.endswith(str(ERRORS[error]))
    assert said.count("nats://broker:4222") == 1 and "hunter2" not in said
    assert failed.value.retryable is (error in TEMPORARY)


@pytest.mark.parametrize("asked", ["STREAM.INFO.KV_b", "INFO", "STREAM.CREATE.KV_b"])
@pytest.mark.parametrize("error", ["silent", "off", "denied"])
async def test_a_missing_bucket_stops_a_member_only_for_a_permanent_fault(
    error: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing JetStream is an error of the setup at the start, and an outage later."""

    async def api(self: Connection, subject: str, request: object = None) -> dict[str, Any]:
        if subject == asked:
            raise ERRORS[error]
        if subject == "STREAM.INFO.KV_b":
            raise ApiError(codes.STREAM_NOT_FOUND, "stream not found", 404)
        return {"api": {"level": 1}}

    async def nobody(subject: str, *_: object, **__: object) -> object:
        raise nats.errors.NoRespondersError

    monkeypatch.setattr(Connection, "api", api)
    client: Any = SimpleNamespace(is_connected=True, last_error=None, request=nobody)
    monkeypatch.setattr(Connection, "client", client)
    with pytest.raises(lanes.SourceError if error == "denied" else UnknownResult, match="bucket 'b'"):
        await JetStreamLeaseStore(Connection(URL), "b").write("l.0", b"", revision=0)


async def test_a_missing_leader_is_waited_for_during_the_check_for_other_pullers(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check for another puller retries like the requests before it."""
    await stream.add_consumer()
    refused: list[str] = []
    api = Connection.api

    async def busy_once(self: Connection, subject: str, request: Any = None) -> dict[str, Any]:
        # The second request for the consumer is that check.
        if subject.startswith("CONSUMER.INFO") and len(refused) < 2:
            refused.append(subject)
            if len(refused) == 2:
                raise ERRORS["busy"]
        return await api(self, subject, request)

    monkeypatch.setattr(Connection, "api", busy_once)
    source = stream.source()
    await source.open()
    await source.aclose()
    assert len(refused) == 2


@pytest.mark.parametrize("data", [b"", b"[]", b"1", b"\xff{}"])
async def test_an_answer_that_is_no_json_object_is_reported_with_its_request(data: bytes) -> None:
    answer: Any = SimpleNamespace(data=data)
    with pytest.raises(
        lanes.SourceError, match=r"^bucket 'b': read of 'k': the answer is no JSON object; check that the server"
    ):
        fields_of(answer, "bucket 'b': read of 'k'")


async def test_a_missing_answer_names_the_possible_causes(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.connection.API_TIMEOUT", 0.05)
    connection = Connection(nats_server.url)
    await connection.open()
    try:
        connection._prefix = "$JS.nobody.API"
        subscription = await connection.client.subscribe("$JS.nobody.API.>")
        with pytest.raises(
            NoAnswer, match=r"no answer to STREAM\.INFO\.S .*has a leader.* to \$JS\.nobody\.API\.STREAM"
        ):
            await connection.api("STREAM.INFO.S")
        await subscription.unsubscribe()
    finally:
        await connection.close()


@pytest.mark.parametrize("error", TEMPORARY)
@pytest.mark.parametrize("refused", ["STREAM.INFO.S", "STREAM.CREATE.S"])
async def test_a_start_waits_for_the_leader_of_a_stream_that_another_process_creates(
    error: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cluster the new stream has no leader for a moment, before and after its name is taken."""
    answers = {
        "STREAM.INFO.S": iter([ApiError(codes.STREAM_NOT_FOUND, "stream not found", 404), {"created": "then"}]),
        "STREAM.CREATE.S": iter([ApiError(codes.STREAM_NAME_TAKEN, "stream name already in use", 400)]),
    }
    asked: list[str] = []

    async def api(self: Connection, subject: str, request: object = None) -> Any:
        asked.append(subject)
        if subject == refused and asked.count(subject) % 2:
            raise ERRORS[error]
        answer = next(answers[subject])
        if isinstance(answer, ApiError):
            raise answer
        return answer

    monkeypatch.setattr(Connection, "api", api)
    found = await find_or_create(Connection(URL), "S", {}, what="stream 'S'", remedy="correct it", patience=60.0)
    assert found == ({"created": "then"}, False)
    assert refused in asked


@pytest.mark.parametrize("error", ["busy", "silent", "off", "denied"])
@pytest.mark.parametrize("refused", ["STREAM.INFO.S", "STREAM.CREATE.S"])
async def test_a_stream_without_a_leader_is_waited_for_only_at_a_start(
    error: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a run the members retry themselves, and a permanent fault ends a start at once."""
    asked: list[str] = []

    async def api(self: Connection, subject: str, request: object = None) -> Any:
        asked.append(subject)
        raise ERRORS[error] if subject == refused else ApiError(codes.STREAM_NOT_FOUND, "stream not found", 404)

    monkeypatch.setattr(Connection, "api", api)
    patience = 0.0 if error in TEMPORARY else 60.0
    with pytest.raises(type(ERRORS[error])) as failed:
        await find_or_create(Connection(URL), "S", {}, what="stream 'S'", remedy="correct it", patience=patience)
    assert failed.value is ERRORS[error]
    assert asked.count(refused) <= 2


@pytest.mark.parametrize("contradictions", [1, 3, None])
async def test_a_stream_whose_name_is_taken_is_read_until_the_server_finds_it(
    contradictions: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster may refuse a name as taken before it finds the stream of that name."""
    monkeypatch.setattr("lanes_jetstream.wire.stream.API_TIMEOUT", 0.3)
    left = iter(range(1_000 if contradictions is None else contradictions))

    async def api(self: Connection, subject: str, request: object = None) -> dict[str, Any]:
        if subject == "STREAM.CREATE.S":
            raise ApiError(codes.STREAM_NAME_TAKEN, "stream name already in use", 400)
        if next(left, None) is not None:
            raise ApiError(codes.STREAM_NOT_FOUND, "stream not found", 404)
        return {"created": "then"}

    monkeypatch.setattr(Connection, "api", api)
    found = find_or_create(Connection(URL), "S", {}, what="stream 'S'", remedy="correct it")
    if contradictions is None:
        with pytest.raises(
            NoAnswer, match=r"broker:4222: .* the stream 'S', although its name is taken; check that the serv"
        ):
            await found
    else:
        assert await found == ({"created": "then"}, False)
