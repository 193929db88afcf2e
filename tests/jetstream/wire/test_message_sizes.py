"""The size of a message counts bytes, and not characters, of its subject and headers."""

from __future__ import annotations

import pytest
from nats.aio.msg import Msg

from lanes.core.types import Partition, PartitionId
from lanes_jetstream.wire.messages import READER, message_of


@pytest.mark.parametrize(
    ("subject", "headers", "size"),
    [
        ("orders", None, 2 + 6),
        ("orders", {"Color": "red"}, 2 + 6 + 8),
        ("orders", {"Größe": "5 €"}, 2 + 6 + 7 + 5),
        ("commandes.été", None, 2 + 15),
    ],
)
def test_the_size_of_a_message_is_in_bytes(subject: str, headers: dict[str, str] | None, size: int) -> None:
    raw = Msg(_client=None, subject=subject, reply="r", data=b"ab", headers=headers)  # type: ignore[arg-type]
    message = message_of(Partition(PartitionId("ORDERS", 0), READER), raw, 1, None)
    assert (
        message.size
        == size
        == len(raw.data)
        + len(raw.subject.encode())
        + sum(len(name.encode()) + len(value) for name, value in READER.headers(raw))
    )
