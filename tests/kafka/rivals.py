"""A rival that takes a member out of its group: by its id, and without asking it, as any client of the group can.

The admin client of librdkafka has no call for it, so the request is written here: LeaveGroup of the classic protocol,
and a heartbeat of KIP-848 that says so.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

_SECONDS: Final = 10.0
_LEAVE_GROUP: Final = 13, 1
_HEARTBEAT: Final = 68, 1
_LEAVING: Final = -1


def remove_member(url: str, group: str, member: str, *, classic: bool) -> None:
    """Take the member with this id out. ``url``: the address of the group's coordinator. Blocks.

    It hears of it with its next heartbeat. Raises ``RuntimeError`` with the code of the broker that refuses.
    """
    if classic:
        answer = _asked(url, _LEAVE_GROUP, _string(group) + _string(member), flexible=False)
        # Behind how long the client is throttled.
        (code,) = struct.unpack_from(">h", answer, 4)
    else:
        body = _compact(group) + _compact(member) + struct.pack(">i", _LEAVING)
        # Neither instance nor rack; no timeout; neither topics nor pattern nor assignor; no partitions; no tags.
        body += b"\0\0" + struct.pack(">i", -1) + b"\0\0\0\0\0"
        answer = _asked(url, _HEARTBEAT, body, flexible=True)
        (code,) = struct.unpack_from(">h", answer, 5)
    if code:
        raise RuntimeError(f"group {group}: member {member} was not removed: error {code} of the broker at {url}")


def _asked(url: str, api: tuple[int, int], body: bytes, *, flexible: bool) -> bytes:
    """What follows the correlation id of the answer."""
    host, port = url.rsplit(":", 1)
    request = struct.pack(">hhi", *api, 0) + _string("rival") + (b"\0" if flexible else b"") + body
    with socket.create_connection((host, int(port)), _SECONDS) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        with connection.makefile("rb") as stream:
            (length,) = struct.unpack(">i", stream.read(4))
            return stream.read(length)[4:]


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack(">h", len(encoded)) + encoded


def _compact(text: str) -> bytes:
    encoded = text.encode()
    assert len(encoded) < 127, "one byte holds the length"
    return bytes([len(encoded) + 1]) + encoded
