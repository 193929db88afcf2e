"""What takes its time on the way out: nothing leaves for a partition whose deadline has passed meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lanes_jetstream.cohort import source as cohort_source
from tests.cohort.held import taken_over
from tests.jetstream.test_cohort_deliveries import Held

pytestmark = pytest.mark.anyio


async def test_what_came_again_is_acknowledged_within_the_deadline_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now, sent = [0.0], list[str]()

    async def send_all(client: Any, tokens: Sequence[str], body: bytes) -> None:
        sent.extend(tokens)
        now[0] += 3.0

    monkeypatch.setattr(cohort_source, "send_all", send_all)
    held = Held(clock=lambda: now[0])
    for number, deadline in enumerate((1.0, 2.0, 5.0)):
        held.tell((number, taken_over(7)), deadline=deadline)
        held.partitions.by_number[number].again = [f"reply {number}"]
    await held.source._acknowledge_again()
    assert sent == ["reply 0", "reply 2"]
    assert held.partitions.by_number[1].again == ["reply 1"]
