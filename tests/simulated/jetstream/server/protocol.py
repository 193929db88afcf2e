"""The text protocol of NATS: the commands of a client, and the lines that a server sends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final, Literal, NamedTuple

_LINE: Final = b"\r\n"
_VERSION: Final = "NATS/1.0"


class Publish(NamedTuple):
    """The command PUB or HPUB. ``reply`` is empty if the client expects no answer."""

    subject: str
    reply: str
    headers: Mapping[str, str]
    payload: bytes


class Subscribe(NamedTuple):
    """The command SUB: subscribes to a pattern of subjects. The server delivers with the subscription id ``sid``."""

    pattern: str
    sid: int


class Unsubscribe(NamedTuple):
    """The command UNSUB.

    ``limit`` is the number of messages after which the subscription ends; 0 = the subscription ends now.
    """

    sid: int
    limit: int


class Other(NamedTuple):
    """A command without a payload, such as CONNECT, PING and PONG."""

    name: str


Command = Publish | Subscribe | Unsubscribe | Other


class Parser:
    """Splits the bytes of a client into commands. The bytes of a command may arrive in several parts."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Command]:
        """Iterate over the commands that these bytes complete.

        Args:
            data: The next bytes.

        Yields:
            The commands, in order.

        Raises:
            ValueError: A command is unknown.
        """
        data, at = self._rest + data, 0
        try:
            while (end := data.find(_LINE, at)) >= 0:
                name, *words = data[at:end].decode().split(" ")
                after = end + len(_LINE)
                if name in ("PUB", "HPUB"):
                    size = int(words[-1])
                    if len(data) < after + size + len(_LINE):
                        return
                    at = after + size + len(_LINE)
                    yield _publish(name, words, data[after : after + size])
                    continue
                at = after
                if name == "SUB":
                    yield Subscribe(words[0], int(words[-1]))
                elif name == "UNSUB":
                    yield Unsubscribe(int(words[0]), int(words[1]) if any(words[1:]) else 0)
                elif name in ("CONNECT", "PING", "PONG"):
                    yield Other(name)
                else:
                    raise ValueError(
                        f"command {name!r:.20}: unknown to this server; send a command of the NATS protocol"
                    )
        finally:
            self._rest = data[at:]


def _publish(name: str, words: list[str], body: bytes) -> Publish:
    if name == "PUB":
        # A client writes two blanks if it passes no reply subject.
        named = [word for word in words[:-1] if word]
        return Publish(named[0], named[1] if len(named) > 1 else "", {}, body)
    named = [word for word in words[:-2] if word]
    size = int(words[-2])
    lines = body[:size].decode().split("\r\n")[1:]
    headers = {name: value.strip() for name, mark, value in (line.partition(":") for line in lines) if mark}
    return Publish(named[0], named[1] if len(named) > 1 else "", headers, body[size:])


def info(version: str, client: int) -> bytes:
    """Make the first line of a server.

    Args:
        version: Version of the server, such as ``"2.12.0"``.
        client: Number of the connection.

    Returns:
        The line INFO.
    """
    fields = {
        "server_id": "SIMULATED",
        "version": version,
        "headers": True,
        "max_payload": 1 << 20,
        "client_id": client,
        "jetstream": True,
    }
    return b"INFO " + json.dumps(fields).encode() + _LINE


def message(subject: str, sid: int, reply: str, payload: bytes, headers: bytes = b"") -> bytes:
    """Make the bytes of a message to a subscription.

    Args:
        subject: Subject of the message.
        sid: Number of the subscription.
        reply: Reply subject; empty = none.
        payload: The payload.
        headers: The block of headers of ``header_block`` or ``status_block``; empty = no headers.

    Returns:
        The command MSG or HMSG with its payload.
    """
    place = f"{subject} {sid} {reply}" if reply else f"{subject} {sid}"
    if not headers:
        return f"MSG {place} {len(payload)}".encode() + _LINE + payload + _LINE
    size = len(headers)
    return f"HMSG {place} {size} {size + len(payload)}".encode() + _LINE + headers + payload + _LINE


def status_block(status: int, text: str = "", **fields: int) -> bytes:
    """Make the block of headers of a status.

    Args:
        status: Number of the status, such as 408.
        text: Description; empty = none.
        **fields: Further headers. An underscore in a name stands for a hyphen.

    Returns:
        The block.
    """
    first = f"{_VERSION} {status} {text}".rstrip()
    lines = [first, *(f"{name.replace('_', '-')}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def denial(subject: str) -> bytes:
    """Make the line that tells a client that it may not publish to a subject."""
    return f"-ERR 'Permissions Violation for Publish to \"{subject}\"'\r\n".encode()


def matches(pattern: str, subject: str) -> bool:
    """Return whether a pattern with wildcards matches a subject."""
    start, rest = _parts(pattern)
    if not subject.startswith(start):
        return False
    if rest == "":
        return subject == start
    if rest == ">":
        return len(subject) > len(start)
    if rest == "*":
        return len(subject) > len(start) and "." not in subject[len(start) :]
    wanted, found = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(found) <= len(wanted):
            return False
        found = found[: len(wanted)]
    return len(wanted) == len(found) and all(one in ("*", other) for one, other in zip(wanted, found, strict=True))


@lru_cache(maxsize=4096)
def _parts(pattern: str) -> tuple[str, Literal["", ">", "*", "more"]]:
    """Split a pattern before its first wildcard. The second part is "more" for a wildcard before the end."""
    words = pattern.split(".")
    at = next((place for place, word in enumerate(words) if word in ("*", ">")), None)
    if at is None:
        return pattern, ""
    start = "".join(f"{word}." for word in words[:at])
    if at < len(words) - 1:
        return start, "more"
    return start, ">" if words[at] == ">" else "*"
