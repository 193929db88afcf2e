"""One message through an idle consumer passes few tasks. `docs/journey.md` has the counts."""

from __future__ import annotations

import pytest

import lanes
from lanes_jetstream.wire.pull_requests import PullRequests
from tests.fakes.hand_offs import HandOffs
from tests.jetstream.workload import Stream, running

pytestmark = pytest.mark.anyio


async def test_one_message_wakes_one_worker_and_makes_no_pull_request(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[int] = []
    ask = PullRequests._ask

    async def asked(pulls: PullRequests, batch: int, max_bytes: int | None) -> None:
        requests.append(batch)
        await ask(pulls, batch, max_bytes)

    monkeypatch.setattr(PullRequests, "_ask", asked)
    handled: list[int] = []

    async def handler(message: lanes.Message) -> None:
        handled.append(message.position)

    hand_offs = HandOffs(monkeypatch)
    async with running(lanes.Consumer(stream.source(), handler)):
        counts = await hand_offs.of(lambda number: stream.publish(1), handled)
        # A request expires after some time, and ten messages may take longer on a busy machine.
        assert len(requests) <= 2
    assert counts["to a worker"] == 1
    assert "to a commit" not in counts
