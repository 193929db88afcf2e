"""Checks the addresses of servers, and selects the parts of an address that an error may show."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Final

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict

from lanes.errors import ConfigError
from lanes_postgres.errors import primary_message

_SCHEME: Final = re.compile("([A-Za-z][A-Za-z0-9+.-]{0,30})://")
_SHORT_SCHEME: Final = re.compile("postgres(ql)?:(?!//)")
_UNKNOWN_OPTION: Final = re.compile('invalid (?:connection option|URI query parameter:) "([^"]*)"')

_SHOWN: Final[Mapping[str, re.Pattern[str]]] = {
    "host": re.compile(r"/[\w./-]{1,100}|[\w.,-]{1,253}|[0-9A-Fa-f:.]{2,45}"),
    "port": re.compile(r"[0-9,]{1,100}"),
    "dbname": re.compile(r"[\w.$+-]{1,63}"),
    "user": re.compile(r"[\w.$+-]{1,63}(@[\w.-]{1,100})?"),
}
"""The form of the values that an error shows. A value of another form may be a misplaced password."""


def read_address(where: str, address: str) -> Mapping[str, Any]:
    """Return the settings of an address.

    Args:
        where: Name of the object or argument, for the error.
        address: The address.

    Returns:
        The settings by name, without the defaults.

    Raises:
        ConfigError: psycopg cannot read the address, or would read a part of the password as another setting. The error
            omits possible passwords.
    """
    scheme = _SCHEME.match(address)
    try:
        given = conninfo_to_dict(address)
    except psycopg.Error as error:
        raise _unreadable(where, _fault(address, scheme, error)) from None
    if scheme is not None and re.split("[/?]", address[scheme.end() :], maxsplit=1)[0].count("@") > 1:
        fault = "two @ precede the first / of the address; write @ as %40, / as %2F and : as %3A in user and password"
        raise _unreadable(where, fault)
    if scheme is not None and "@" in address[scheme.end() :].partition("/")[2].partition("?")[0]:
        fault = "an @ follows the first / of the address; write @ as %40, / as %2F and : as %3A in user and password"
        raise _unreadable(where, fault)
    return given


def _unreadable(where: str, fault: str) -> ConfigError:
    return ConfigError(f"{where}: {fault}; correct the connection string, such as postgresql://user@host/database")


def _fault(address: str, scheme: re.Match[str] | None, error: psycopg.Error) -> str:
    if scheme is not None and scheme[1] not in ("postgresql", "postgres"):
        return f"the scheme {scheme[1]}:// is not a scheme of PostgreSQL"
    if _SHORT_SCHEME.match(address):
        return "two slashes must follow the scheme, as in postgresql://"
    unknown = _UNKNOWN_OPTION.search(str(error))
    if unknown is not None:
        return _unknown_option(unknown[1])
    if scheme is None and "=" not in address:
        return "the address has no scheme"
    return primary_message(error)


def _unknown_option(name: str) -> str:
    """Name an unknown option if a known option has a similar name. Any other name may be a part of a password."""
    known = [option.keyword.decode() for option in pq.Conninfo.get_defaults()]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if near:
        return f'the option "{name}" is unknown (did you mean "{near[0]}"?)'
    return "an option is unknown, and its name may be a part of a password; quote a password that has blanks"


def place_of(dsn: str) -> str:
    """Return host, port, database and user of an address, with the defaults of this process, for an error.

    Args:
        dsn: The address; "" = the ``PG…`` variables of the environment.

    Returns:
        The text, with "…" in place of a value that may be a misplaced password.
    """
    defaults = {option.keyword.decode(): option.val for option in pq.Conninfo.get_defaults()}
    values: dict[str, Any] = {name: value.decode() for name, value in defaults.items() if value is not None}
    try:
        values |= conninfo_to_dict(dsn)
    except psycopg.Error:
        return "an unreadable address"
    if "host" not in values and "hostaddr" in values:
        values["host"] = values["hostaddr"]
    named = {"host": "host", "port": "port", "dbname": "database", "user": "user"}
    return ", ".join(f"{text} {_shown(name, values[name])}" for name, text in named.items() if values.get(name))


def _shown(name: str, value: object) -> str:
    return str(value) if _SHOWN[name].fullmatch(str(value)) else "…"
