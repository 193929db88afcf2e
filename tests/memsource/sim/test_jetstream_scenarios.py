"""The personality does what the server was seen to do. The server itself: ``tests/jetstream/test_personality.py``."""

from __future__ import annotations

import pytest

from tests.memsource.sim.jetstream_scenarios import SCENARIOS, ModelCluster, Scenario


@pytest.mark.anyio
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
async def test_the_personality_does_what_the_server_was_seen_to_do(scenario: Scenario) -> None:
    assert await scenario.play(ModelCluster(scenario.settings)) == scenario.expected


def test_there_are_scenarios_for_what_the_research_has_measured() -> None:
    assert len(SCENARIOS) >= 8
    assert sum(scenario.kills for scenario in SCENARIOS) >= 1
