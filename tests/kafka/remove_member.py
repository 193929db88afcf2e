"""Removes a member from its group by its id, as any client of the group can.

The admin client of librdkafka has no call for it, so the requests are written here. They are LeaveGroup of the classic
protocol, and a heartbeat of KIP-848 that leaves.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

_SECONDS: Final = 30.0
_LEAVE_GROUP: Final = 13, 1
_HEARTBEAT: Final = 68, 1
_LEAVING: Final = -1


def remove_member(url: str, group: str, member: str, *, classic: bool) -> None:
    """Remove the member with this id. ``url``: the address of the group's coordinator. Blocks.

    The member learns of it by its next heartbeat. Raises ``RuntimeError`` with the error code of the broker.
    """
    if classic:
        answer = _asked(url, _LEAVE_GROUP, _string(group) + _string(member), flexible=False)
        # The code follows the throttle time.
        (code,) = struct.unpack_from(">h", answer, 4)
    else:
        body = _compact(group) + _compact(member) + struct.pack(">i", _LEAVING)
        # No instance, rack, timeout, topics, pattern, assignor, partitions and tags.
        body += b"\0\0" + struct.pack(">i", -1) + b"\0\0\0\0\0"
        answer = _asked(url, _HEARTBEAT, body, flexible=True)
        (code,) = struct.unpack_from(">h", answer, 5)
    if code:
        raise RuntimeError(f"group {group}: member {member} was not removed: error {code} of the broker at {url}")


def _asked(url: str, api: tuple[int, int], body: bytes, *, flexible: bool) -> bytes:
    """The answer, after its correlation id."""
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
