"""Errors of the client, as those of ``lanes``: what will pass by itself, and what somebody has to change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import psycopg

from lanes.errors import ConfigError, LanesError, SourceError

_RETRYABLE_CLASSES: Final = frozenset({"08", "40", "53", "55", "57"})
"""Of SQLSTATE: connection, transaction (serialization, deadlock), resources, locks, an operator or a timeout."""

_QUOTED: Final = re.compile(r'"[^"]*"')
_BEFORE_HOST: Final = re.compile(r"""[^\s'"]*@""")

_REMEDIES: Final[Mapping[str, str]] = {
    "25006": "connect to the primary (target_session_attrs=read-write), and not in a read-only transaction",
    "25P02": "an earlier statement of this transaction failed; let its exception out of the transaction block",
    "3F000": "run lanes_postgres.migrate with the same schema=",
    "42501": "grant this user USAGE on the schema, and SELECT, INSERT, UPDATE and DELETE on its tables lanes_…",
    "42703": "run lanes_postgres.migrate of this version of lanes",
    "42P01": "run lanes_postgres.migrate with the same schema=",
}


def mapped(where: str, error: psycopg.Error) -> LanesError:
    """What is raised in place of an error of the client, from it.

    ``SourceError(retryable=True)``: the same transaction may succeed later (no connection, serialization failure,
    deadlock, timeout). ``ConfigError``: somebody has to change something. Shown is the primary message of the server,
    never its details, which may hold values of a row.
    """
    state = error.sqlstate
    text = f"{where}: {_said(error)}"
    if state is not None and state in _REMEDIES:
        return ConfigError(f"{text}: {_REMEDIES[state]}")
    if state is None:
        # Without a state the server has said nothing: the connection is gone, or the client was misused.
        return SourceError(text, retryable=isinstance(error, psycopg.OperationalError))
    return SourceError(text, retryable=state[:2] in _RETRYABLE_CLASSES)


def _said(error: psycopg.Error) -> str:
    primary = error.diag.message_primary
    if primary is None:
        # The client's own words name host and user, and no password; but of a URL that they cannot read they quote any
        # part, and in one with an @ too many they take the end of the password for the begin of the host.
        words = " ".join(str(error).split())
        if isinstance(error, psycopg.ProgrammingError):
            words = _QUOTED.sub('"…"', words)
        primary = _BEFORE_HOST.sub("…@", words) or type(error).__name__
    return f"{error.sqlstate or type(error).__name__} {primary}"
