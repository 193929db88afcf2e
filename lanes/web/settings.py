"""The settings of the HTTP server of a consumer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from lanes.arguments import check_flag, kind_of, names_unknown_options, shown_value
from lanes.errors import ConfigError

TOKEN_LENGTH: Final = 16
"""Minimum number of characters of a token."""

_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


class Address(NamedTuple):
    """A host and a port to listen on. Port 0 lets the system choose a free port."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only programs on this machine can connect."""
        return self.host in _LOOPBACK

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@names_unknown_options("lanes.web.Web")
@dataclass(frozen=True, kw_only=True)
class Web:
    """The settings of the HTTP server of a consumer; see ``lanes.main``.

    Attributes:
        address: Host and port to listen on, such as ``"127.0.0.1:8080"``. Port 0 = the system chooses a free port, and
            the log shows the port. Other machines can reach an address other than loopback.
        show_keys: Whether the page and ``/status`` show the keys of messages. False = only the hashes of the keys.
        hosts: Names by which browsers may open the page, in addition to the names of loopback and to the host of the
            address, such as ``"ops.example.com"``. Without this check, another site could read the page under its own
            host name. The probes and ``/metrics`` answer under every name.
        operate: Whether a person with the token may pause, resume, unblock and send to the dead letters.
        token: Secret of the person, at least 16 characters. ``operate`` needs a token. No ``repr`` shows the token.

    Raises:
        ConfigError: An argument has a wrong type or value.
    """

    address: str
    show_keys: bool = False
    hosts: Collection[str] = ()
    operate: bool = False
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        address_of(self.address)
        check_flag("show_keys", self.show_keys)
        check_flag("operate", self.operate)
        if isinstance(self.hosts, str) or not all(isinstance(host, str) for host in self.hosts):
            raise ConfigError(f'hosts is {kind_of(self.hosts)}: write the names of hosts, such as ["ops.example.com"]')
        if self.token is not None and (not isinstance(self.token, str) or len(self.token) < TOKEN_LENGTH):
            raise ConfigError(f"token has less than {TOKEN_LENGTH} characters: write secrets.token_urlsafe()")
        if self.operate != (self.token is not None):
            raise ConfigError(
                "operate=True needs a token, so that only operators act: write token=secrets.token_urlsafe()"
                if self.operate
                else "token has no effect without operate=True: write both, or leave out token"
            )


def is_of_host(text: str, allowed: Collection[str]) -> bool:
    """Return whether the value of a header ``Host`` names an allowed host or loopback; the port may be any."""
    host = text.rpartition("]")[0][1:] if text.startswith("[") else text.partition(":")[0]
    return host.casefold() in _LOOPBACK | {each.casefold() for each in allowed}


def web_of(http: object) -> Web:
    """Return the settings for the value of ``http=``. Raises ``ConfigError`` for a wrong type or value."""
    if isinstance(http, Web):
        return http
    if not isinstance(http, str):
        raise ConfigError(
            f'http is {kind_of(http)}: write "127.0.0.1:8080", or lanes.web.Web(address="127.0.0.1:8080")'
        )
    return Web(address=http)


def address_of(text: object) -> Address:
    """Return the address for a text such as ``"127.0.0.1:8080"`` or ``"[::1]:8080"``.

    Raises ``ConfigError`` for another text.
    """
    remedy = 'write a host and a port, such as "127.0.0.1:8080"'
    if not isinstance(text, str):
        raise ConfigError(f"address is {kind_of(text)}: {remedy}")
    if "://" in text:
        raise ConfigError(f"http={shown_value(text)} is a URL: {remedy}")
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f'http={shown_value(text)}: write an IPv6 host in brackets, such as "[::1]:8080"')
    if not colon or not host or any(character.isspace() or character in "/@" for character in host):
        raise ConfigError(f"http={shown_value(text)}: {remedy}")
    if not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ConfigError(f"http={shown_value(text)}: the port must be a number from 0 to 65535; {remedy}")
    return Address(host, int(port))
