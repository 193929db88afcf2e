"""Invalid arguments of a JetStream source are refused when it is created."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

import lanes
from lanes_jetstream import JetStreamSource, header, subject_token

pytestmark = pytest.mark.anyio


READERS = pytest.mark.parametrize("reader", [{"durable": "d"}, {"cohort": "c"}], ids=["durable", "cohort"])
"""One process on a durable, and a member of a cohort."""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stream": "a b"}, "stream='a b'"),
        ({"stream": ""}, "stream=''"),
        ({"durable": "a.b"}, "durable='a.b'"),
        ({"cohort": "c"}, "durable=… and cohort=… exclude each other: pass durable=… for one process"),
        ({"durable": None}, "neither durable=… nor cohort=… is given: pass durable=… for one process"),
        ({"key": "subject"}, "key='subject'"),
        ({"key": subject_token}, r"key=subject_token: makes a key function, .*; write key=subject_token\(1\)"),
        ({"key": header}, r'key=header: makes a key function, .*; write key=header\("customer"\)'),
        ({"ack_wait": 0.5}, "ack_wait=0.5"),
        ({"ack_wait": float("nan")}, "ack_wait=nan"),
        ({"ack_wait": "30"}, "ack_wait='30'"),
        ({"takeover": "force"}, "takeover='force'"),
    ],
)
async def test_an_invalid_argument_of_a_durable_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(lanes.ConfigError, match=words):
        JetStreamSource("nats://x", **{"stream": "S", "durable": "d", "key": None, **arguments})


@READERS
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"start": 0}, "start=0 is invalid; use .* 1 or more"),
        ({"start": -5}, "start=-5 is invalid; use"),
        ({"start": True}, "start=True is invalid; use"),
        ({"start": "begining"}, "start='begining' is invalid; use"),
        ({"start": datetime(2020, 1, 1)}, "start=2020-01-01T00:00:00 has no time zone"),  # noqa: DTZ001
        ({"max_ack_pending": 0}, "max_ack_pending=0: must be a whole number, 1 or more"),
        ({"max_ack_pending": -1}, "max_ack_pending=-1: must be a whole number, 1 or more"),
        ({"max_ack_pending": True}, "max_ack_pending=True: must be a whole number, 1 or more"),
    ],
)
async def test_an_invalid_argument_of_any_source_is_refused(
    reader: dict[str, Any], arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(lanes.ConfigError, match=words):
        JetStreamSource("nats://x", stream="S", key=None, **reader, **arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"acks": "later"}, "acks='later'.*confirmed-at-drain"),
        ({"out_of_range": "latest"}, "out_of_range='latest'"),
        ({"start_timeout": -1}, "start_timeout=-1"),
    ],
)
async def test_an_invalid_value_of_an_argument_of_a_durable_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(lanes.ConfigError, match=words):
        JetStreamSource("nats://x", stream="S", durable="d", key=None, **arguments)
