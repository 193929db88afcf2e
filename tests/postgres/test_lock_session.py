"""The options of the session that holds advisory locks, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from lanes.errors import ConfigError
from lanes_postgres.lock_session import SessionMaker


def spawn(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    raise AssertionError("a constructor starts no task")


def options(dsn: str, lease: float = 2.0) -> tuple[dict[str, Any], float]:
    """The options that the session adds to a connection string, and the seconds for which it waits for the server."""
    maker = SessionMaker(dsn, lease, spawn)
    return dict(maker._options), maker._patience


def test_a_session_limits_the_time_of_its_connection_by_the_lease() -> None:
    assert options("postgresql://h/x") == (
        {"connect_timeout": 10, "tcp_user_timeout": 2_000, "fallback_application_name": "lanes locks"},
        10.0,
    )
    assert options("postgresql://h/x", 2.5)[0]["tcp_user_timeout"] == 2_500


@pytest.mark.parametrize(
    ("given", "added", "patience"),
    [
        ("connect_timeout=3", {"tcp_user_timeout", "fallback_application_name"}, 3.0),
        ("connect_timeout=0", {"tcp_user_timeout", "fallback_application_name"}, 10.0),
        ("tcp_user_timeout=7", {"connect_timeout", "fallback_application_name"}, 10.0),
        ("fallback_application_name=a", {"connect_timeout", "tcp_user_timeout"}, 10.0),
    ],
)
def test_a_connection_string_overrides_the_options(given: str, added: set[str], patience: float) -> None:
    found, seconds = options(f"postgresql://h/x?{given}")
    assert set(found) == added
    assert seconds == patience


@pytest.mark.parametrize("ports", ["", "1", "65535", "5432,5433", "5432,"])
def test_ports_of_several_hosts_are_accepted(ports: str) -> None:
    options(f"host=h,h2 port={ports}" if ports else "host=h")


@pytest.mark.parametrize("ports", ["0", "65536", "x", "5432,65536", "5432,x", "-1"])
def test_a_wrong_port_is_refused_without_its_value(ports: str) -> None:
    with pytest.raises(ConfigError, match="dsn: the port is no number from 1 to 65535") as refused:
        options(f"host=h,h2 port={ports}")
    assert ports not in str(refused.value).replace("65535", "")
