"""The reply subject of a delivery: both forms of JetStream are read, and any other subject is refused."""

from __future__ import annotations

from typing import Any

import pytest
from nats.aio.msg import Msg

from lanes_jetstream.wire.messages import READER, sequences
from tests.jetstream.cohort.stubs import StubInbox, owned_partition, positions

pytestmark = pytest.mark.anyio


def test_both_forms_of_a_reply_subject_have_the_sequences() -> None:
    assert sequences("$JS.ACK.S.c.1.42.43.1795230450408747835.0") == (42, 43)
    assert sequences("$JS.ACK._.hash.S.c.1.42.43.1795230450408747835.0") == (42, 43)
    assert sequences("$JS.ACK.domain.hash.S.c.1.42.43.1795230450408747835.0.token") == (42, 43)


@pytest.mark.parametrize(
    ("reply", "published"),
    [
        ("$JS.ACK.S.c.1.42.43.1795230450500000000.0", 1795230450.5),
        ("$JS.ACK._.hash.S.c.1.42.43.1795230450500000000.0", 1795230450.5),
        ("$JS.ACK.domain.hash.S.c.1.42.43.1795230450500000000.0.token", 1795230450.5),
        ("$JS.ACK.S.c.1.42.43.now.0", None),
        ("", None),
    ],
)
def test_a_dead_letter_has_the_time_at_which_its_message_was_published(reply: str, published: float | None) -> None:
    client: Any = None
    assert READER.details(Msg(client, "0.k", reply, b"")).timestamp == published


async def test_a_member_reads_both_forms_of_a_reply_subject_and_ignores_others() -> None:
    side = StubInbox()
    of = owned_partition(side.pulls[0])
    await side.deliver("c", 4, 1)
    await side.deliver("c", 0, 0, reply="$JS.ACK.hub.ACCHASH.S.c.1.5.2.1700000000.7")
    await side.deliver("c", 0, 0, reply="$JS.ACK.hub.ACCHASH.S.c.1.6.3.1700000000.6.random")
    for hostile in ("", "c", "a.b.c.c", "$JS.ACK.S.other.1.9.9.1.1", "$JS.ACK.S.c", "." * 30):
        side.inbox._receive(Msg(side.client, "0.k", hostile, b""))  # type: ignore[arg-type]
    assert positions(of) == [4, 5, 6]
