"""A stage for one part of the adapter: real nats clients on a simulated server, in virtual time.

A scene chooses the fate of single requests, or scripts their answers.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, Final

import nats
from nats.aio.client import Client

from memsource.sim.loop.choosers import Fifo
from memsource.sim.loop.virtual import run
from tests.simulated.jetstream.network import HOST, Network
from tests.simulated.jetstream.seams import seams
from tests.simulated.jetstream.server.api import PREFIX, Fields
from tests.simulated.jetstream.server.protocol import Publish
from tests.simulated.jetstream.server.server import DELIVER, Fate, NatsServer, Session

__all__ = ["LATENCY", "URL", "Stage", "played", "refusal"]

URL: Final = f"nats://{HOST}:4222"

LATENCY: Final = 0.001
"""Seconds that bytes take in one direction."""


def refusal(code: int, err_code: int = 1, text: str = "refused") -> Fields:
    """The answer of the API to a request that it refuses."""
    return {"error": {"code": code, "err_code": err_code, "description": text}}


class Stage:
    """The stage of a scene.

    Attributes:
        server: The simulated server.
        network: Its network.
        client: A connected client.
        sent: All messages of clients that have reached the server.
        errors: Errors that the clients report, such as the error of a callback.
    """

    client: Client

    def __init__(self, version: str) -> None:
        self.server = NatsServer(self._fate, version=version)
        self.network = Network(self.server, Random(0), (LATENCY,))
        self.sent: list[Publish] = []
        self.errors: list[Exception] = []
        self._answers: list[tuple[str, Fields | Callable[[Fields], Fields]]] = []
        self._fates: list[tuple[str, Fate]] = []
        self._answer = self.server.api.answer
        self.server.api.answer = self._scripted  # type: ignore[method-assign]

    async def connect(self, **options: Any) -> Client:
        """Connect one more client."""

        async def note(error: Exception) -> None:
            self.errors.append(error)

        options = {"error_cb": note, "max_reconnect_attempts": -1, "reconnect_time_wait": 0.25, **options}
        return await nats.connect(URL, **options)

    async def stream(self, name: str, **config: object) -> Fields:
        """Create a stream ``<name>.>``."""
        return await self.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"], **config})

    async def api(self, request: str, fields: object = None) -> Fields:
        """Send a request of the API by an operator."""
        body = b"" if fields is None else json.dumps(fields).encode()
        answer: Fields = json.loads((await self.client.request(f"{PREFIX}{request}", body, timeout=30)).data)
        assert "error" not in answer, answer
        return answer

    async def publish(self, *subjects: str) -> None:
        """Publish a message to each subject, and wait until the stream stores the message."""
        for subject in subjects:
            await self.client.request(subject, b"x", timeout=30)

    # --- faults

    def answer(self, request: str, *answers: Fields | Callable[[Fields], Fields]) -> None:
        """Script the answers to the next requests whose names have this prefix.

        A function changes the answer of the server.
        """
        self._answers += [(request, each) for each in answers]

    def meet(self, subject: str, *fates: Fate) -> None:
        """Give these fates to the next client messages whose subjects have this prefix."""
        self._fates += [(subject, each) for each in fates]

    def deny(self, subject: str) -> None:
        """Deny these subjects to all present connections."""
        for session in self.server.sessions:
            session.denied.append(subject)

    def fields(self, request: str) -> list[Fields]:
        """The fields of the requests whose names have this prefix."""
        found = [each for each in self.sent if each.subject.startswith(f"{PREFIX}{request}")]
        return [json.loads(each.payload) if each.payload else {} for each in found]

    def subjects(self, beginning: str) -> list[str]:
        """The subjects of client messages that have this prefix."""
        return [each.subject for each in self.sent if each.subject.startswith(beginning)]

    def _fate(self, session: Session, command: Publish) -> Fate:
        self.sent.append(command)
        for number, (subject, fate) in enumerate(self._fates):
            if command.subject.startswith(subject):
                del self._fates[number]
                return fate
        return DELIVER

    def _scripted(self, request: str, payload: bytes, now: float) -> Fields:
        for number, (beginning, scripted) in enumerate(self._answers):
            if request.startswith(beginning):
                del self._answers[number]
                return scripted(self._answer(request, payload, now)) if callable(scripted) else scripted
        return self._answer(request, payload, now)


def played(scene: Callable[[Stage], Awaitable[None]], *, version: str = "2.12.1") -> None:
    """Play a scene on a new server of this version."""

    async def main() -> None:
        stage = Stage(version)
        stage.client = await stage.connect()
        try:
            await scene(stage)
        finally:
            await stage.client.close()
            stage.network.end()

    with seams():
        run(main, chooser=Fifo())
