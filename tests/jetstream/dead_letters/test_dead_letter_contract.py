"""JetStream dead letters keep the contract of dead letters, on real servers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence

import anyio
import pytest
from nats.aio.client import Client

from lanes.dead_letter import DeadLetter
from lanes.dead_letters.box import DeadLetterBox, StoredDeadLetter
from lanes.source import DeadLetters
from lanes_jetstream import JetStreamDeadLetters
from lanes_jetstream.dead_letters.box import JetStreamDeadLetterBox
from lanes_jetstream.dead_letters.wire import dead_letter_headers
from memsource.contract.dead_letters import (
    DeadLetterAbility,
    DeadLetterCheck,
    DeadLetterHarness,
    Origin,
    Published,
    dead_letter_checks,
)
from tests.components import NatsServer
from tests.jetstream.conftest import connect
from tests.jetstream.workload import Stream
from tests.memsource.contract.outage import killed

pytestmark = pytest.mark.anyio


LIMIT = 20_000


class JetStreamHarness:
    """Two streams. ``server`` is killed in an outage."""

    limit = LIMIT

    def __init__(self, stream: Stream, can: Collection[DeadLetterAbility], server: NatsServer | None = None) -> None:
        self.can = can
        self.origin = Origin(stream.name, 0, f"{stream.name}.a")
        self._stream, self._dead, self._server = stream, f"{stream.name}dead", server

    @contextlib.asynccontextmanager
    async def made(self) -> AsyncIterator[None]:
        """Create the stream of the dead letters, and delete it after the test."""
        jetstream = self._stream.client.jetstream()
        await jetstream.add_stream(name=self._dead, subjects=[f"{self._dead}.x"], duplicate_window=0.1)
        yield
        await jetstream.delete_stream(self._dead)

    def dead_letters(self) -> DeadLetters:
        return JetStreamDeadLetters(self._stream.url, f"{self._dead}.x")

    async def stored(self) -> Sequence[DeadLetter]:
        box = JetStreamDeadLetterBox(self._stream.client, f"{self._dead}.x")
        await box.open()
        found = await box.find(await box.ids())
        return [one.dead_letter for one in found.values() if isinstance(one, StoredDeadLetter)]

    def box(self) -> DeadLetterBox:
        return JetStreamDeadLetterBox(self._stream.url, f"{self._dead}.x")

    async def copy(self, dead_letter: DeadLetter) -> None:
        jetstream = self._stream.client.jetstream()
        with anyio.fail_after(10):
            while (
                await jetstream.publish(f"{self._dead}.x", dead_letter.value, headers=dead_letter_headers(dead_letter))
            ).duplicate:
                await anyio.sleep(0.01)

    async def lose(self, dead_letter_id: str) -> None:
        jetstream = self._stream.client.jetstream()
        state = (await jetstream.stream_info(self._dead)).state
        for sequence in range(state.first_seq, state.last_seq + 1):
            message = await jetstream.get_msg(self._dead, sequence)
            if (message.headers or {}).get("Nats-Msg-Id") == dead_letter_id:
                await jetstream.delete_msg(self._dead, sequence)
                return

    async def stranger(self) -> None:
        await self._stream.client.jetstream().publish(f"{self._dead}.x", b"anything")

    async def published(self) -> Sequence[Published]:
        jetstream = self._stream.client.jetstream()
        last = (await jetstream.stream_info(self._stream.name)).state.last_seq
        found = [await jetstream.get_msg(self._stream.name, sequence) for sequence in range(1, last + 1)]
        return [
            Published(one.data or b"", [(name, text.encode()) for name, text in (one.headers or {}).items()])
            for one in found
        ]

    def acted_on(self, name: str) -> bool:
        return name.lower().startswith("nats-")

    def forged(self) -> Sequence[Origin]:
        name = self._stream.name
        subjects = [f"{name}gone.a", f"{name}.*", f"{name}.>", ">", f"{name}.a b", f"{name}.a\tb", f"{name}..a", "é é"]
        subjects += [f"$JS.API.STREAM.PURGE.{name}", "$SYS.REQ.SERVER.PING", "$KV.bucket.key", "$O.bucket.M.name"]
        return [Origin(name, 0, subject) for subject in subjects]

    def nowhere(self) -> tuple[DeadLetters, DeadLetterBox]:
        subject = f"{self._dead}nowhere.x"
        return JetStreamDeadLetters(self._stream.url, subject), JetStreamDeadLetterBox(self._stream.url, subject)

    def own(self) -> Origin:
        return Origin(self._dead, 0, f"{self._dead}.x")

    def outage(self) -> contextlib.AbstractAsyncContextManager[None]:
        return killed(self._server)

    async def hang_up(self, dead_letters: DeadLetters) -> None:
        assert isinstance(dead_letters, JetStreamDeadLetters)
        # As after a message above the server's limit.
        await dead_letters._connection.client.close()


ON_THE_SHARED_SERVER: tuple[DeadLetterAbility, ...] = ("box", "place")


ON_A_PRIVATE_SERVER: tuple[DeadLetterAbility, ...] = ("box", "limit", "outage")


@pytest.mark.parametrize("check", dead_letter_checks(ON_THE_SHARED_SERVER), ids=lambda check: check.__name__)
async def test_the_contract_holds_on_a_server(check: DeadLetterCheck, stream: Stream) -> None:
    harness = JetStreamHarness(stream, ON_THE_SHARED_SERVER)
    kept: DeadLetterHarness = harness
    async with harness.made():
        await check(kept)


@pytest.mark.parametrize(
    "check",
    [
        check
        for check in dead_letter_checks(ON_A_PRIVATE_SERVER)
        if check not in dead_letter_checks(ON_THE_SHARED_SERVER)
    ],
    ids=lambda check: check.__name__,
)
async def test_the_contract_holds_on_a_server_with_a_limit_that_is_killed(
    check: DeadLetterCheck, fresh_nats: Callable[..., NatsServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 3.0)
    server = fresh_nats(config=f"max_payload: {LIMIT}")
    client: Client = await connect(server.url)
    stream = Stream(server.url, client, "BIG")
    await stream.create()
    harness = JetStreamHarness(stream, ON_A_PRIVATE_SERVER, server)
    async with harness.made():
        await check(harness)
    await client.close()
