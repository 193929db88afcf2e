"""Each pass of a takeover makes the checks of the takeover, and counts each missing delivery once."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from nats.aio.msg import Msg

from lanes.core.types import Room
from lanes.errors import SourceError
from lanes_jetstream.durable.consumer import ConsumerState
from lanes_jetstream.durable.takeover import Takeover
from lanes_jetstream.wire.connection import NoAnswer
from lanes_jetstream.wire.pull_requests import Interruption

pytestmark = pytest.mark.anyio

IDLE = ConsumerState(0, 0, 9, 9, False, 0, False)


class Pulls:
    """The pull requests of a consumer on one connection."""

    def __init__(self) -> None:
        self.interruption: Interruption | None = None
        self.reconnects = 0

    async def renew(self) -> None:
        self.interruption = None

    def check(self) -> Interruption | None:
        return self.interruption


class Stage:
    """A takeover whose server answers the last request of a pass only after some passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("lanes_jetstream.durable.takeover.RETRY_DELAY", 0)
        self.pulls = Pulls()
        self.unanswered = 0
        client = SimpleNamespace(is_connected=True, is_closed=False)
        parts: dict[str, Any] = {
            "connection": SimpleNamespace(client=client, flush=self.nothing),
            "durable": SimpleNamespace(
                check_stream=self.nothing, refresh=self.refresh, restore=self.restore, second_puller="a second process"
            ),
            "pulls": self.pulls,
            "resend": self.nothing,
            "check_dropped": lambda *_: None,
        }
        self.takeover = Takeover(name="test", shared=False, **parts)

    async def nothing(self, *_: object) -> None:
        return None

    async def refresh(self) -> ConsumerState:
        return IDLE

    async def restore(self) -> None:
        if self.unanswered:
            self.unanswered -= 1
            raise NoAnswer("no answer")

    async def run(self, kind: Any) -> list[Msg]:
        self.pulls.interruption = Interruption(kind, kind)
        return await self.takeover.run(Room(10, 1000), 9)


@pytest.mark.parametrize("passes", [0, 1, 3])
async def test_one_missing_delivery_is_no_second_process(monkeypatch: pytest.MonkeyPatch, passes: int) -> None:
    stage = Stage(monkeypatch)
    await stage.run("new")
    stage.unanswered = passes
    assert await stage.run("gap") == []


@pytest.mark.parametrize("passes", [0, 1, 3])
async def test_a_second_missing_delivery_on_a_connection_is_a_second_process(
    monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    stage = Stage(monkeypatch)
    await stage.run("new")
    stage.unanswered = passes
    await stage.run("gap")
    with pytest.raises(SourceError, match="a second process"):
        await stage.run("gap")


async def test_a_missing_delivery_of_a_new_connection_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    await stage.run("new")
    await stage.run("gap")
    stage.pulls.reconnects += 1
    assert await stage.run("gap") == []


async def test_a_takeover_with_a_full_room_requests_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room of the first takeover, which had nothing to collect, bounds the requests of the next one."""
    stage, asked = Stage(monkeypatch), list[int]()
    await stage.takeover.run(Room(2, 1000), 9)

    async def request_exactly(count: int) -> None:
        assert count > 0, "an endless loop of requests for no message"
        asked.append(count)

    async def refresh() -> ConsumerState:
        return replace(IDLE, unacknowledged=2)

    arrived = [SimpleNamespace(reply=f"$JS.ACK.S.C.1.{sequence}.{sequence}.0.0") for sequence in (1, 2)]
    vars(stage.pulls).update(request_exactly=request_exactly, wait=stage.nothing, take=lambda: arrived)
    vars(stage.takeover.durable).update(refresh=refresh, requeue_pending=stage.nothing, modifiable=True)
    stage.pulls.interruption = Interruption("connection", "reconnected")
    assert await stage.takeover.run(Room(0, 0), 9) == arrived
    assert asked == [2]


async def test_only_the_first_takeover_speaks_of_an_earlier_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lanes.jetstream")
    stage = Stage(monkeypatch)
    for _ in range(2):
        await stage.takeover.run(Room(10, 10), 0)
    first, second = [line for line in caplog.messages if "early redelivery" in line]
    assert first == "test: the early redelivery is not needed; 0 unacknowledged message(s) of an earlier process"
    assert second == "test: the server answers; the early redelivery is not needed; 0 unacknowledged message(s)"
