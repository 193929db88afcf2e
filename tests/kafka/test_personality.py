"""The scenarios of the simulated Kafka have the same results on a real broker."""

from __future__ import annotations

from typing import Any

import pytest

from memsource.kafka.client import RebalanceProtocol
from tests.conftest import KafkaFactory
from tests.kafka.conftest import MakeTopic
from tests.kafka.real_cluster import RealCluster
from tests.memsource.kafka.scenarios import CASES
from tests.memsource.kafka.stage import Scenario
from tests.memsource.kafka.virtual import VirtualCluster


def _cases(*, outage: bool) -> list[Any]:
    return [
        pytest.param(
            scenario,
            protocol,
            marks=() if protocol in scenario.quick else pytest.mark.slow,
            id=f"{scenario}-{protocol}",
        )
        for scenario, protocol in CASES
        if scenario.settings.outage == outage
    ]


@pytest.mark.parametrize(("scenario", "protocol"), _cases(outage=False))
def test_the_personality_behaves_like_the_broker(
    scenario: Scenario, protocol: RebalanceProtocol, topic: MakeTopic
) -> None:
    with RealCluster(topic(scenario.settings.partitions), protocol, scenario.settings) as cluster:
        _same(scenario, cluster)


@pytest.mark.parametrize(("scenario", "protocol"), _cases(outage=True))
def test_the_personality_behaves_like_a_killed_broker(
    scenario: Scenario, protocol: RebalanceProtocol, topic: MakeTopic, fresh_kafka: KafkaFactory
) -> None:
    server = fresh_kafka(warm=True)
    partitions = scenario.settings.partitions
    with RealCluster(topic(partitions, on=server), protocol, scenario.settings, server) as cluster:
        _same(scenario, cluster)


def _same(scenario: Scenario, cluster: RealCluster) -> None:
    seen = scenario.play(cluster)
    assert seen == scenario.play(VirtualCluster(cluster.protocol, scenario.settings))
    assert seen == scenario.expected[cluster.protocol]
