"""The simulated Kafka behaves like the measured broker. ``tests/kafka/test_personality.py`` measures a broker."""

from __future__ import annotations

import pytest

from memsource.kafka.client import RebalanceProtocol
from tests.memsource.kafka.scenarios import CASES, SCENARIOS
from tests.memsource.kafka.stage import PROTOCOLS, Scenario
from tests.memsource.kafka.virtual import VirtualCluster


@pytest.mark.parametrize(("scenario", "protocol"), CASES, ids=str)
def test_the_simulated_kafka_behaves_as_the_measured_broker(scenario: Scenario, protocol: RebalanceProtocol) -> None:
    assert scenario.play(VirtualCluster(protocol, scenario.settings)) == scenario.expected[protocol]


def test_each_measured_behaviour_has_a_scenario() -> None:
    assert len(SCENARIOS) >= 20
    for protocol in PROTOCOLS:
        assert sum(1 for _, each in CASES if each == protocol) >= 15
    # Of each protocol, some of the scripts that need time.
    assert any(scenario.settings.apart for scenario in SCENARIOS)
    assert any(scenario.settings.outage for scenario in SCENARIOS)
