"""Pull requests stay within the room, and their counts, signs of life and statuses are exact; no server runs."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, Final

import pytest
from nats.aio.msg import Msg

from lanes import SourceError
from lanes.core.types import Room
from lanes_jetstream.wire.pull_requests import PullRequests

pytestmark = pytest.mark.anyio

INBOX: Final = "_INBOX.x"

SECOND: Final = 1_000_000_000


class Wire:
    """A client that records the requests and their reply subjects."""

    def __init__(self) -> None:
        self.stats = {"reconnects": 0}
        self.is_connected = True
        self.asked: list[dict[str, int]] = []
        self.replies: list[str] = []

    async def publish(self, subject: str, body: bytes, reply: str = "") -> None:
        assert subject == "NEXT"
        self.asked.append(json.loads(body))
        self.replies.append(reply)

    @property
    def batches(self) -> list[int]:
        return [each["batch"] for each in self.asked]


class Clock:
    """A clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("lanes_jetstream.wire.pull_requests.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def made(**arguments: Any) -> tuple[PullRequests, Wire]:
    wire: Any = Wire()
    requests = PullRequests(wire, "NEXT", "source", wake=asyncio.Event(), **arguments)
    requests.restart(INBOX)
    return requests, wire


def arrive(requests: PullRequests, count: int = 1) -> None:
    for _ in range(count):
        requests.on_message(Msg(None, "S.1", "", b""))  # type: ignore[arg-type]


def say(requests: PullRequests, status: str, text: str = "", pending: str | None = None) -> None:
    headers = {"Status": status, "Description": text}
    if pending is not None:
        headers["Nats-Pending-Messages"] = pending
    requests.on_status(Msg(None, f"{INBOX}.1", "", b"", headers))  # type: ignore[arg-type]


# --- the room


async def test_the_free_half_of_the_room_is_requested() -> None:
    requests, wire = made()
    room = Room(10, 10_000)
    await requests.pull(room)
    assert wire.asked == [{"batch": 10, "expires": 30 * SECOND, "idle_heartbeat": 2 * SECOND, "max_bytes": 10_000}]
    arrive(requests, 5)
    await requests.pull(room)
    assert wire.batches == [10], "the arrived messages are in the room until they are taken"
    requests.take(4)
    await requests.pull(room)
    assert wire.batches == [10], "less than half of the room is free"
    requests.take()
    await requests.pull(room)
    assert wire.batches == [10, 5]
    assert wire.asked[1]["max_bytes"] == 10_000 - 5 * 256, "open requests need a part of the bytes"
    assert wire.replies == [f"{INBOX}.1", f"{INBOX}.2"]
    assert (requests.outstanding, requests.reserved, requests.open_requests) == (10, 10, 2)
    await requests.pull(Room(3, 10_000))
    assert len(wire.asked) == 2, "the room has shrunk"


@pytest.mark.parametrize(
    ("room", "batch", "most"),
    [
        (Room(100, 1000), 3, 1000),
        (Room(100, 10), 1, 10),
        (Room(2, 0), 1, 1),
        (Room(0, 1000), None, None),
        (Room(1, 100_000), 1, 100_000),
    ],
)
async def test_the_average_size_bounds_a_request(room: Room, batch: int | None, most: int | None) -> None:
    requests, wire = made()
    await requests.pull(room)
    assert [(each["batch"], each["max_bytes"]) for each in wire.asked] == ([] if batch is None else [(batch, most)])


async def test_no_message_is_requested_while_the_room_is_full() -> None:
    requests, wire = made()
    for _ in range(2):
        await requests.pull(Room(1, 10_000))
    arrive(requests)
    await requests.pull(Room(1, 10_000))
    assert wire.batches == [1]


async def test_the_average_size_follows_the_messages() -> None:
    requests, wire = made()
    requests.learn_sizes(1, 1256)
    await requests.pull(Room(100, 3061))
    assert wire.batches == [10], "a message moves the average by a twentieth: 306 bytes"
    requests.restart(INBOX)
    requests.learn_sizes(1000, 50_000)
    await requests.pull(Room(100, 1001))
    assert wire.batches == [10, 20], "after many messages of 50 bytes"


async def test_a_message_that_exceeds_the_bytes_is_requested_alone() -> None:
    requests, wire = made()
    room = Room(10, 10_000)
    await requests.pull(room)
    say(requests, "409", "Message Size Exceeds MaxBytes", pending="4")
    await requests.pull(room)
    assert wire.batches == [10], "another request is still open"
    say(requests, "408", "Request Timeout", pending="6")
    for none in (Room(0, 10_000), Room(10, 0)):
        await requests.pull(none)
        assert wire.batches == [10]
    await requests.pull(Room(1, 1))
    assert wire.asked[1:] == [{"batch": 1, "expires": 30 * SECOND, "idle_heartbeat": 2 * SECOND}]
    arrive(requests)
    requests.take()
    await requests.pull(room)
    assert wire.asked[2]["max_bytes"] == 10_000, "the messages after it are bounded again"


@pytest.mark.parametrize(("expires", "beats"), [(4.0, False), (4.5, True)])
async def test_a_brief_request_has_no_heartbeats(expires: float, beats: bool) -> None:
    """The server refuses heartbeats for a request that expires within two heartbeats."""
    requests, wire = made(expires=expires)
    await requests.request_exactly(7)
    assert (wire.batches, wire.asked[0]["expires"]) == ([7], int(expires * SECOND))
    assert ("idle_heartbeat" in wire.asked[0]) == beats
    assert "max_bytes" not in wire.asked[0]


# --- counts


async def test_each_status_and_message_changes_the_counts_of_open_requests() -> None:
    requests, _ = made()
    await requests.request_exactly(4)
    await requests.request_exactly(6)
    assert (requests.outstanding, requests.open_requests) == (10, 2)
    arrive(requests, 3)
    assert (requests.outstanding, requests.reserved, requests.open_requests) == (7, 10, 2)
    say(requests, "408", "Request Timeout", pending="1")
    assert (requests.outstanding, requests.open_requests) == (6, 1)
    say(requests, "408", "Request Timeout", pending="nonsense")
    assert (requests.outstanding, requests.open_requests) == (6, 0)
    say(requests, "408", "Request Timeout", pending="9")
    assert (requests.outstanding, requests.open_requests) == (0, 0)
    await requests.request_exactly(1)
    assert (requests.outstanding, requests.open_requests) == (1, 1)


async def test_a_request_whose_messages_have_all_arrived_is_not_open() -> None:
    requests, _ = made()
    await requests.request_exactly(1)
    arrive(requests)
    assert requests.open_requests == 0
    await requests.request_exactly(1)
    assert requests.open_requests == 1


async def test_a_restart_forgets_earlier_requests() -> None:
    requests, wire = made()
    await requests.request_exactly(2)
    await requests.request_exactly(2)
    arrive(requests)
    say(requests, "409", "Message Size Exceeds MaxBytes")
    say(requests, "100")
    wire.stats["reconnects"] = 4
    assert requests.check() == ("connection", "reconnected")
    requests.restart("_INBOX.y")
    assert (requests.inbox, requests.arrived, requests.reserved, requests.caught_up) == ("_INBOX.y", [], 0, False)
    assert (requests.reconnects, requests.interruption, requests.check()) == (4, None, None)
    await requests.pull(Room(10, 10_000))
    assert (wire.replies[-1], requests.open_requests) == ("_INBOX.y.3", 1)
    assert (wire.batches[-1], wire.asked[-1]["max_bytes"]) == (10, 10_000)


async def test_requests_that_were_never_started_report_this_as_an_interruption() -> None:
    wire: Any = Wire()
    requests = PullRequests(wire, "NEXT", "source", wake=asyncio.Event())
    assert (requests.inbox, requests.reserved, requests.open_requests) == ("", 0, 0)
    assert (requests.heard_at, requests.failure, requests.deleted) == (-math.inf, None, False)
    assert str(requests.check()) == "not started"
    assert requests.interruption == ("new", "not started")


async def test_messages_are_taken_in_order_and_wake_the_source_once() -> None:
    requests, _ = made()
    say(requests, "100")
    assert requests.caught_up
    requests._wake.clear()
    messages: list[Any] = [Msg(None, f"S.{number}", "", b"") for number in range(4)]  # type: ignore[arg-type]
    requests.on_message(messages[0])
    assert (requests._wake.is_set(), requests.caught_up) == (True, False)
    requests._wake.clear()
    for message in messages[1:]:
        requests.on_message(message)
    assert not requests._wake.is_set()
    assert (requests.take(1), requests.take(2), requests.take(9)) == (messages[:1], messages[1:3], messages[3:])
    assert (requests.take(), requests.take(0)) == ([], [])
    for message in messages:
        requests.on_message(message)
    assert (requests.take(0), requests.take(4)) == ([], messages)


# --- statuses


async def test_each_status_wakes_the_source() -> None:
    requests, _ = made()
    for status in ("100", "408", "503"):
        requests._wake.clear()
        say(requests, status)
        assert requests._wake.is_set()


@pytest.mark.parametrize(
    ("status", "text", "remedy"),
    [
        ("409", "Consumer Deleted", "the consumer was deleted; prevent the deletion, or start again"),
        ("409", "Consumer is push based", "use a separate pull consumer for lanes"),
        ("409", "Exceeded MaxRequestBatch of 1", "raise or remove the consumer's max_batch"),
        ("409", "Exceeded MaxRequestExpires of 1s", "raise the consumer's max_expires to 30 s or more, or remove it"),
        ("409", "Exceeded MaxRequestMaxBytes of 1", "raise or remove the consumer's max_bytes"),
        ("400", "Bad Request", "check the server's log"),
    ],
)
async def test_a_refused_request_names_its_remedy(status: str, text: str, remedy: str) -> None:
    requests, _ = made()
    say(requests, status, text)
    with pytest.raises(SourceError) as refused:
        requests.take()
    assert str(refused.value).startswith(f"source: pull refused ({status} {text}): {remedy}")
    assert requests.check() is None


async def test_an_ended_request_has_a_reason_that_a_later_reason_replaces() -> None:
    requests, _ = made()
    say(requests, "409", "Server Shutdown")
    assert requests.check() == ("ended", "409 Server Shutdown")
    say(requests, "409", "Exceeded MaxWaiting")
    assert requests.check() == ("crowded", "409 Exceeded MaxWaiting")
    say(requests, "503")
    assert requests.check() == ("unanswered", "no responders")
    requests.interrupt("gap", "delivery 2 missing")
    assert requests.check() == ("gap", "delivery 2 missing")


async def test_a_status_without_headers_ends_a_request_alone() -> None:
    requests, _ = made()
    await requests.request_exactly(2)
    requests.on_status(Msg(None, f"{INBOX}.1", "", b""))  # type: ignore[arg-type]
    assert (requests.check(), requests.failure, requests.outstanding, requests.open_requests) == (None, None, 2, 0)


# --- signs of life


async def test_the_silence_of_a_server_counts_from_the_request_or_its_last_sign(clock: Clock) -> None:
    requests, _ = made()

    def pass_time(seconds: float) -> str | None:
        for _ in range(int(seconds * 2)):
            clock.now += 0.5
            if (broken := requests.check()) is not None:
                return str(broken)
        return None

    assert pass_time(60) is None, "without a request, no heartbeat is due"
    await requests.request_exactly(3)
    assert pass_time(6.0) is None
    arrive(requests)
    assert pass_time(6.5) is None
    assert requests.heard_at == clock.now - 6.0
    say(requests, "100")
    assert pass_time(6.5) is None
    assert pass_time(0.5) == "no heartbeat from the server"
    assert (requests.interruption or ("",))[0] == "silence"


async def test_a_second_request_does_not_end_the_silence_of_a_server(clock: Clock) -> None:
    requests, _ = made()
    await requests.request_exactly(3)
    requests.check()
    signs = []
    for _ in range(13):
        clock.now += 0.5
        await requests.request_exactly(1)
        signs.append(requests.check() is None)
    assert signs == [True] * 12 + [False]


async def test_heartbeats_may_be_unread_after_a_pause_of_the_loop(clock: Clock) -> None:
    requests, _ = made()
    await requests.request_exactly(3)
    requests.check()
    clock.now += 60.0
    assert requests.check() is None
    for _ in range(6):
        clock.now += 1.0
        assert requests.check() is None
    assert requests.heard_at == -math.inf, "a pause is no sign of the server"
    clock.now += 1.0
    assert str(requests.check()) == "no heartbeat from the server"


async def test_a_lost_connection_is_reported_before_silence(clock: Clock) -> None:
    requests, wire = made()
    wire.is_connected = False
    assert requests.check() == ("connection", "disconnected")
    wire.is_connected = True
    assert requests.check() == ("connection", "disconnected"), "its requests are gone"
    requests.restart(INBOX)
    assert requests.check() is None
