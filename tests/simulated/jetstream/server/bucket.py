"""The stream of a KV bucket: ``memsource.jetstream.lease_store.Bucket`` with the requests of its clients."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any, Final

from lanes.cohort.leases import Conflict
from memsource.jetstream.lease_store import Bucket
from tests.simulated.jetstream.server.stream import Refused

_TTL: Final = re.compile(r"(\d+)s")

_MARKER: Final = b"NATS/1.0\r\nNats-Marker-Reason: MaxAge\r\n\r\n"


class BucketStream:
    """The stream of a bucket.

    Args:
        config: Configuration, as the client sent it.
        created: Time of the creation, in seconds.
        seed: Seed of the delays of expiries.

    Attributes:
        name: Name of the stream.
        config: The configuration.
        created: Time of the creation.
        data: The keys and their values.
        prefix: Prefix of each key in a subject.
    """

    def __init__(self, config: dict[str, Any], created: float, seed: int) -> None:
        self.name = str(config["name"])
        self.config = config
        self.created = created
        self.data = Bucket(first=int(config.get("first_seq") or 1) - 1, seed=seed, markers=True)
        self.prefix = f"$KV.{self.name.removeprefix('KV_')}."

    def state(self, now: float, pattern: str | None) -> dict[str, Any]:
        """Return the fields of the stream's state.

        Args:
            now: The time, in seconds.
            pattern: Pattern of the subjects to list; None = no list.

        Returns:
            The fields.
        """
        found = self.data.entries("", now)
        fields: dict[str, Any] = {"messages": len(found), "bytes": 0, "first_seq": 1, "last_seq": 1}
        if pattern is not None:
            prefix = pattern.removesuffix(">").removeprefix(self.prefix)
            fields["subjects"] = {self.prefix + key: 1 for key in found if key.startswith(prefix)}
        return fields

    def get(self, subject: str, now: float) -> dict[str, Any]:
        """Return the newest message of a subject. Raises ``Refused`` without a message."""
        entry = self.data.read(subject.removeprefix(self.prefix), now)
        if not entry.revision:
            raise Refused(404, 10037, "no message found")
        message: dict[str, Any] = {"subject": subject, "seq": entry.revision}
        if entry.value is None:
            message["hdrs"] = base64.b64encode(_MARKER).decode()
        else:
            message["data"] = base64.b64encode(entry.value).decode()
        return message

    def put(self, subject: str, headers: Mapping[str, str], value: bytes, now: float) -> int:
        """Store a value, and return its revision. Raises ``Refused`` for an unexpected revision."""
        ttl = _TTL.fullmatch(headers.get("Nats-TTL", ""))
        expected = headers.get("Nats-Expected-Last-Subject-Sequence")
        other = headers.get("Nats-Expected-Last-Subject-Sequence-Subject")
        if expected is None:
            raise ValueError(f"{subject}: the write expects no revision; set the header of the expected revision")
        fence = None if other is None else (other.removeprefix(self.prefix), int(expected))
        try:
            return self.data.write(
                subject.removeprefix(self.prefix),
                value,
                now,
                revision=int(expected) if fence is None else None,
                ttl=None if ttl is None else int(ttl[1]),
                fence=fence,
            )
        except Conflict as conflict:
            raise Refused(400, 10071, f"wrong last sequence: {conflict}") from None
