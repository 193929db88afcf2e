"""``http=`` of ``lanes.main`` and ``lanes.serve`` takes an address, and refuses other values by name."""

from __future__ import annotations

from typing import Any

import pytest

from lanes import ConfigError
from lanes.web import Web
from lanes.web.settings import address_of, web_of


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:8080", "127.0.0.1", 8080, True),
        ("localhost:0", "localhost", 0, True),
        ("0.0.0.0:65535", "0.0.0.0", 65_535, False),
        ("[::1]:8080", "::1", 8080, True),
        ("[::]:8080", "::", 8080, False),
    ],
)
def test_an_address_has_a_host_and_a_port(text: str, host: str, port: int, loopback: bool) -> None:
    address = address_of(text)
    assert (address.host, address.port, address.loopback) == (host, port, loopback)
    assert str(address) == text
    assert web_of(text) == Web(address=text)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (8080, 'http is an int: write "127.0.0.1:8080"'),
        (True, "http is a bool: write"),
        (("127.0.0.1", 8080), "http is a tuple: write"),
        ("8080", "write a host and a port"),
        (":8080", "write a host and a port"),
        ("127.0.0.1", "write a host and a port"),
        ("127.0.0.1:", "the port must be a number from 0 to 65535"),
        ("127.0.0.1:http", "the port must be a number from 0 to 65535"),
        ("127.0.0.1:-1", "the port must be a number from 0 to 65535"),
        ("127.0.0.1:65536", "the port must be a number from 0 to 65535"),
        ("127.0.0.1:٣", "the port must be a number from 0 to 65535"),
        ("http://127.0.0.1:8080", "is a URL: write a host and a port"),
        ("::1:8080", "write an IPv6 host in brackets"),
        ("a host:8080", "write a host and a port"),
        ("", "write a host and a port"),
    ],
)
def test_another_value_is_refused(value: Any, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        web_of(value)
    assert error in str(caught.value)


@pytest.mark.parametrize(
    ("values", "options", "said"),
    [
        ((), {"adress": "127.0.0.1:1"}, "lanes.web.Web has no option adress=: did you mean address=?"),
        ((), {}, "lanes.web.Web lacks address=: write lanes.web.Web(address=…)"),
        (
            ("127.0.0.1:1",),
            {},
            "lanes.web.Web takes no argument(s) without a name, and the call has 1: write the names, such as address=…",
        ),
    ],
)
def test_a_wrong_call_is_refused_with_the_right_one(values: Any, options: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Web(*values, **options)
    assert str(refused.value) == said


def test_an_address_of_another_type_and_a_wrong_flag_are_refused() -> None:
    with pytest.raises(ConfigError, match="address is an int"):
        Web(address=8080)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="show_keys='yes': must be True or False"):
        Web(address="127.0.0.1:0", show_keys="yes")  # type: ignore[arg-type]
