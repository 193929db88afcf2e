"""Pull requests without a server: each status and each loss of the connection has its kind of interruption."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from nats.aio.msg import Msg

from lanes_jetstream.wire.pull_requests import HEARTBEAT, PullRequests
from tests.jetstream.cohort.stubs import StubClient


def started() -> tuple[PullRequests, Any]:
    client: Any = StubClient()
    requests = PullRequests(client, "$JS.API.CONSUMER.MSG.NEXT.S.c", "test", wake=asyncio.Event())
    requests.restart("_INBOX.x")
    return requests, client


def say(requests: PullRequests, status: str, text: str = "", **headers: str) -> None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    said: Any = Msg(None, "_INBOX.x.1", "", b"", {"Status": status, "Description": text, **named})  # type: ignore[arg-type]
    requests.on_status(said)


def kind(requests: PullRequests) -> str | None:
    broken = requests.check()
    return None if broken is None else broken.kind


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        ("503", "", "unanswered"),
        ("409", "Exceeded MaxWaiting", "crowded"),
        ("409", "Leadership Change", "ended"),
        ("409", "Server Shutdown", "ended"),
        ("409", "Batch Completed", None),
        ("409", "Message Size Exceeds MaxBytes", None),
        ("408", "Request Timeout", None),
        ("404", "No Messages", None),
        ("100", "Idle Heartbeat", None),
    ],
)
def test_a_status_has_a_kind_of_interruption(status: str, text: str, expected: str | None) -> None:
    requests, _ = started()
    say(requests, status, text)
    assert (kind(requests), requests.failure, requests.deleted) == (expected, None, False)
    assert requests.caught_up == (status == "100")


@pytest.mark.parametrize(
    ("status", "text", "deleted"),
    [
        ("409", "Consumer Deleted", True),
        ("409", "Consumer is push based", False),
        ("409", "Exceeded MaxRequestBatch of 10", False),
        ("409", "Exceeded MaxRequestExpires of 1s", False),
        ("409", "Exceeded MaxRequestMaxBytes of 10", False),
        ("400", "Bad Request", False),
    ],
)
def test_a_fatal_status_ends_the_requests_for_good(status: str, text: str, deleted: bool) -> None:
    requests, _ = started()
    say(requests, status, text)
    assert (kind(requests), requests.deleted) == (None, deleted)
    assert text in str(requests.failure)
    with pytest.raises(Exception, match="pull refused") as raised:
        requests.take()
    assert raised.value is requests.failure


def test_a_lost_connection_has_a_kind_of_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = StubClient()
    assert kind(PullRequests(client, "", "test", wake=asyncio.Event())) == "new"
    requests, client = started()
    client.is_connected = False
    assert kind(requests) == "connection"
    requests, client = started()
    client.stats["reconnects"] = 1
    assert kind(requests) == "connection"
    requests, client = started()
    now = 100.0
    monkeypatch.setattr("lanes_jetstream.wire.pull_requests.monotonic", lambda: now)
    asyncio.run(requests.request_exactly(1))
    while now < 100.0 + 4 * HEARTBEAT:
        assert kind(requests) is None or now > 100.0 + 3 * HEARTBEAT
        now += HEARTBEAT / 4
    assert kind(requests) == "silence"


def test_a_message_that_waits_to_be_read_is_a_sign_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, _ = started()
    now = 100.0
    monkeypatch.setattr("lanes_jetstream.wire.pull_requests.monotonic", lambda: now)
    asyncio.run(requests.request_exactly(100))
    # As for a paused partition, the source reads no message. The server sends messages, so no heartbeats are needed.
    while now < 100.0 + 6 * HEARTBEAT:
        requests.on_message(Msg(None, "S.1", "", b""))  # type: ignore[arg-type]
        assert kind(requests) is None
        now += HEARTBEAT / 4


def test_an_ended_request_releases_the_messages_it_did_not_bring() -> None:
    requests, _ = started()
    asyncio.run(requests.request_exactly(10))
    assert (requests.outstanding, requests.open_requests) == (10, 1)
    requests.on_message(Msg(None, "S.1", "", b""))  # type: ignore[arg-type]
    assert (requests.outstanding, requests.reserved) == (9, 10)
    say(requests, "408", "Request Timeout", Nats_Pending_Messages="9", Nats_Pending_Bytes="0")
    assert (requests.outstanding, requests.reserved, requests.open_requests) == (0, 1, 0)
