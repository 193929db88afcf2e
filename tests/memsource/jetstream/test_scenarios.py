"""The simulated broker behaves like the measured server. ``tests/jetstream/test_personality.py`` measures a server."""

from __future__ import annotations

import pytest

from tests.memsource.jetstream.scenarios import SCENARIOS, ModelCluster, Scenario


@pytest.mark.anyio
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
async def test_the_simulated_jetstream_behaves_as_the_measured_server(scenario: Scenario) -> None:
    assert await scenario.play(ModelCluster(scenario.settings)) == scenario.expected


def test_each_measured_behaviour_has_a_scenario() -> None:
    assert len(SCENARIOS) >= 8
    assert sum(scenario.kills for scenario in SCENARIOS) >= 1
