"""Fixtures of the tests of the port."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from lanes import Consumer
from lanes.web import Web
from lanes.web.port import Port
from tests.fakes.fixtures import none_left, sdk
from tests.fakes.support import TIMEOUT

__all__ = ["none_left", "sdk"]


class Answer(NamedTuple):
    """An answer of a port."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def value(self) -> Any:
        """The JSON value of the body."""
        return json.loads(self.body)


def ask(port: Port, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Answer:
    """Send a request, and wait for the answer."""
    connection = http.client.HTTPConnection(port.address.host, port.address.port, timeout=TIMEOUT)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return Answer(answer.status, {name.lower(): text for name, text in answer.getheaders()}, answer.read())
    finally:
        connection.close()


class Ports:
    """The ports of a test."""

    def __init__(self) -> None:
        self._opened: list[Port] = []

    def open(self, consumer: Consumer, **settings: Any) -> Port:
        """Open a port on loopback."""
        port = Port(consumer, Web(**{"address": "127.0.0.1:0", **settings}))
        port.open()
        self._opened.append(port)
        return port

    def close(self) -> None:
        for port in self._opened:
            port.close()


@pytest.fixture
def ports(sdk: object) -> Iterator[Ports]:
    """Opens ports, and closes them at the end of the test. The program has a MeterProvider of its own."""
    made = Ports()
    yield made
    made.close()
