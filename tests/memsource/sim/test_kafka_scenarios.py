"""The personality does what a broker was seen to do. The broker itself: ``tests/kafka/test_personality.py``."""

from __future__ import annotations

import pytest

from memsource.kafka.client import RebalanceProtocol
from tests.memsource.sim.kafka_scenarios import CASES, SCENARIOS
from tests.memsource.sim.kafka_stage import PROTOCOLS, Scenario
from tests.memsource.sim.kafka_virtual import VirtualCluster


@pytest.mark.parametrize(("scenario", "protocol"), CASES, ids=str)
def test_the_personality_does_what_the_broker_was_seen_to_do(scenario: Scenario, protocol: RebalanceProtocol) -> None:
    assert scenario.play(VirtualCluster(protocol, scenario.settings)) == scenario.expected[protocol]


def test_there_are_scenarios_for_what_the_research_has_measured() -> None:
    assert len(SCENARIOS) >= 20
    for protocol in PROTOCOLS:
        assert sum(1 for _, each in CASES if each == protocol) >= 15
    # Of each, some of those that need time.
    assert any(scenario.settings.apart for scenario in SCENARIOS)
    assert any(scenario.settings.outage for scenario in SCENARIOS)
