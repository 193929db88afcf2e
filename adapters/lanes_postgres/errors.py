"""Functions that convert errors of psycopg to errors of ``lanes``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import psycopg

from lanes.errors import ConfigError, LanesError, SourceError

_RETRYABLE_CLASSES: Final = frozenset({"08", "40", "53", "55", "57"})
"""SQLSTATE classes of temporary faults: connection, transaction (deadlock), resources, locks, operator."""

_CONNECTION_CODES: Final = ("08", "53", "57P", "25P03")
"""Beginnings of the SQLSTATE codes of faults that no other statement would escape: connection, resources, operator."""

_IDLE_IN_TRANSACTION: Final = "25P03"
"""The server has ended the session of a process that was frozen in a transaction, and rolled the transaction back."""

_REFUSED: Final = re.compile(
    "password authentication failed|no password supplied|no pg_hba.conf entry|is not permitted to log in"
    '|(database|role) ".*" does not exist'
)
"""SQLSTATE codes with which a server refuses every repetition of the request."""

# The server and its client quote by ", psycopg by the repr of a text, which may hold a ' itself.
_QUOTED: Final = re.compile(r"""("[^"]*"|'.*')""")
_RELATION: Final = re.compile(r'relation "([^"]*)"')
_BEFORE_HOST: Final = re.compile(r"""[^\s'"]*@""")

_REMEDIES: Final[Mapping[str, str]] = {
    "25006": "connect to the primary (target_session_attrs=read-write), and not in a read-only transaction",
    "25P02": "an earlier statement of this transaction failed, so let its exception leave the transaction block",
    "3F000": "run lanes_postgres.migrate with the same schema=",
    "42501": "grant this user USAGE on the schema and its sequences, and SELECT, INSERT, UPDATE and DELETE on its "
    "tables lanes_…",
    "42703": "run lanes_postgres.migrate of this version of lanes",
    "LN001": "append in a session with session_replication_role=origin",
    "42P01": "run lanes_postgres.migrate with the same schema=",
}


def lanes_error(where: str, error: psycopg.Error) -> LanesError:
    """Return the error of ``lanes`` to raise in place of an error of psycopg.

    ``SourceError(retryable=True)``: the same transaction may succeed later, for example after a deadlock or a timeout.
    ``ConfigError``: a person must change the setup. Every other fault: ``SourceError(retryable=False)``. The text
    contains the server's primary message, or the text of psycopg without passwords. The text never contains the details
    of the server, because details may show values of a row.
    """
    state = error.sqlstate
    text = f"{where}: {primary_message(error)}"
    if state == "LN002":
        # A refusal of a function of lanes, with its remedy.
        return ConfigError(text)
    if state == "42P01" and (missing := _RELATION.search(text)) and "lanes_" not in missing[1]:
        return ConfigError(f"{text}; create the table, or correct the name given to Log.over")
    if state is not None and state in _REMEDIES:
        return ConfigError(f"{text}; {_REMEDIES[state]}")
    if state is None:
        # An error without a state is the client's own: the connection is lost, or the client was misused.
        return SourceError(text, retryable=isinstance(error, psycopg.OperationalError))
    return SourceError(text, retryable=state[:2] in _RETRYABLE_CLASSES or state == _IDLE_IN_TRANSACTION)


def is_about_statement(error: LanesError) -> bool:
    """Return whether the server refused one statement and kept the connection, so other statements may succeed."""
    state = error.__cause__.sqlstate if isinstance(error.__cause__, psycopg.Error) else None
    return state is not None and not state.startswith(_CONNECTION_CODES)


def not_connected(error: psycopg.Error, where: str) -> LanesError:
    """Return the error of a failed connection. If the server has no connection left, the error names the remedy."""
    found = lanes_error(where, error)
    text = str(error)
    if "too many clients" in text or "connection slots" in text or "too many connections" in text:
        return SourceError(f"{found}; raise max_connections, or start fewer processes", retryable=True)
    # A connection that fails has no SQLSTATE. The text has one line for each host.
    hosts = text.splitlines()[2:] if "Multiple connection attempts failed" in text else [text]
    if hosts and all(_REFUSED.search(host) for host in hosts):
        return SourceError(
            f"{found}; correct the connection string, or the users and rights of the server", retryable=False
        )
    if error.sqlstate is None and isinstance(error, psycopg.OperationalError):
        return SourceError(f"{found}; start the server, or correct the connection string", retryable=True)
    return found


def primary_message(error: psycopg.Error) -> str:
    """Return the server's primary message, or the text of psycopg without passwords."""
    primary = error.diag.message_primary
    if primary is None:
        # The client's own errors name host and user, but no password. An error about an unreadable URL may quote any
        # part of the URL, and so may one about an invalid port. With an extra @ in the URL, the client takes the end of
        # the password for the host.
        words = " ".join(str(error).split())
        if isinstance(error, psycopg.ProgrammingError) or "invalid" in words:
            words = _QUOTED.sub('"…"', words)
        primary = _BEFORE_HOST.sub("…@", words) or type(error).__name__
    return f"{error.sqlstate or type(error).__name__} {primary}"
