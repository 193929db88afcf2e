"""What takes its time on the way out: nothing leaves for a partition whose deadline has passed meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lanes_jetstream import Cohort, cohort_source, subject_token
from lanes_jetstream.cohort_source import CohortSource
from lanes_jetstream.connection import Connection

pytestmark = pytest.mark.anyio


async def test_what_came_again_is_acknowledged_within_the_deadline_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now, sent = [0.0], list[str]()

    async def send_all(client: Any, tokens: Sequence[str], body: bytes) -> None:
        sent.extend(tokens)
        now[0] += 3.0

    monkeypatch.setattr(cohort_source, "send_all", send_all)
    monkeypatch.setattr(cohort_source, "monotonic", lambda: now[0])
    connection = Connection("nats://127.0.0.1:1")
    monkeypatch.setattr(connection, "_client", SimpleNamespace(is_connected=True))
    source = CohortSource(
        connection,
        "S",
        Cohort("orders", member="a"),
        key=subject_token(0),
        start="beginning",
        ack_wait=30.0,
        max_ack_pending=1,
    )
    tenancies: Any = {
        number: SimpleNamespace(again=[f"reply {number}"], partition=SimpleNamespace(deadline=deadline))
        for number, deadline in enumerate((1.0, 2.0, 5.0))
    }
    monkeypatch.setattr(source, "_holdings", SimpleNamespace(tenancies=tenancies), raising=False)
    await source._acknowledge_again()
    assert sent == ["reply 0", "reply 2"]
    assert tenancies[1].again == ["reply 1"]
