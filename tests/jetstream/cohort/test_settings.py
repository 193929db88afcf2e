"""Settings of a cohort: invalid values and settings of a durable are refused when the source is created."""

from __future__ import annotations

import re
from typing import Any

import pytest

import lanes
from lanes_jetstream import Cohort, JetStreamSource

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": "a b"},
        {"name": ""},
        {"name": "c", "namespace": "a.b"},
        {"name": "c", "member": "a b"},
        {"name": "c", "member": "a*"},
        {"name": "c", "lease": 2},
        {"name": "c", "lease": 3.5},
        {"name": "c", "weight": 0},
        {"name": "c", "active_members": 0},
        {"name": "c", "consumer_target": 0},
        {"name": "c", "consumer_target": True},
        {"name": "c", "consumer_target": 1.0},
        {"name": "c", "consumer_target": "2"},
        {"name": "c", "consumer_target": 2**53 + 1},
        {"name": "c", "default_consumer_target": 0},
        {"name": "c", "partitions": 0},
        {"name": "c", "drain_within": 0},
        {"name": "c", "overdue": "never"},
        {"name": "c", "create": "S"},
    ],
    ids=lambda arguments: "-".join(map(str, arguments)),
)
async def test_an_invalid_setting_is_refused(arguments: dict[str, Any]) -> None:
    setting, value = list(arguments.items())[-1]
    named = "cohort" if setting == "name" else setting
    said = re.escape(f"{named}={value!r}") + "( is unknown)?: (must be|use|pass|.*use letters)"
    with pytest.raises(lanes.ConfigError, match=said):
        Cohort(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"durable": "d"},
        {"filter_subject": "a.>"},
        {"takeover": "modify"},
        {"acks": "confirmed"},
        {"shared": True},
        {"start_timeout": 5.0},
        {"ack_wait": 0.5},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
async def test_a_setting_of_a_durable_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(lanes.ConfigError, match=next(iter(arguments))):
        JetStreamSource("nats://127.0.0.1:1", stream="S", cohort="c", key=None, **arguments)


async def test_a_durable_and_a_cohort_exclude_each_other() -> None:
    with pytest.raises(lanes.ConfigError, match=r"durable=.*cohort="):
        JetStreamSource("nats://127.0.0.1:1", stream="S", key=None)


@pytest.mark.parametrize(
    ("cohort", "named"),
    [
        (Cohort("courier", member="a"), "PARCELS/courier, member a"),
        (Cohort("courier", member="a", namespace="eu"), "PARCELS/eu/courier, member a"),
        (Cohort(member="a"), "PARCELS/lanes, member a"),
    ],
    ids=["name", "name_and_namespace", "no_name"],
)
async def test_the_lines_of_a_member_have_the_name_of_its_cohort(cohort: Cohort, named: str) -> None:
    source = JetStreamSource("nats://127.0.0.1:9", stream="PARCELS", key=None, cohort=cohort)
    assert isinstance(source, lanes.source.Declaring)
    assert source.declared().name == f"jetstream {named}"
