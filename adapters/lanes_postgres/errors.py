"""Converts errors of psycopg to errors of ``lanes``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import psycopg

from lanes.errors import ConfigError, LanesError, SourceError

_RETRYABLE_CLASSES: Final = frozenset({"08", "40", "53", "55", "57"})
"""SQLSTATE classes of temporary faults: connection, transaction (deadlock), resources, locks, operator."""

_CONNECTION_CODES: Final = ("08", "53", "57P", "25P03")
"""SQLSTATE classes of faults that affect every statement: connection, resources, operator."""

_IDLE_IN_TRANSACTION: Final = "25P03"
"""Error code: the server has ended the session of a process that was frozen in a transaction. The transaction rolled
back."""

_REFUSED: Final = re.compile(
    "password authentication failed|no password supplied|no pg_hba.conf entry|is not permitted to log in"
    '|(database|role) ".*" does not exist'
)
"""SQLSTATE codes with which a server refuses every repetition of the request."""

# The server and libpq quote a name by ". psycopg quotes a name by its repr, which may contain a '.
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

    The result is a ``SourceError(retryable=True)`` if the same transaction may succeed later, for example after a
    deadlock or a timeout. The result is a ``ConfigError`` if a person must change the setup. For every other fault the
    result is a ``SourceError(retryable=False)``. The text contains the server's primary message, or the text of psycopg
    without passwords. The text omits the details of the server, because details may show values of a row.
    """
    state = error.sqlstate
    text = f"{where}: {primary_message(error)}"
    if state == "LN002":
        # A database function of ``lanes`` has refused the call. Its text contains the remedy.
        return ConfigError(text)
    if state == "42P01" and (missing := _RELATION.search(text)) and "lanes_" not in missing[1]:
        return ConfigError(f"{text}; create the table, or correct the name given to Log.over")
    if state is not None and state in _REMEDIES:
        return ConfigError(f"{text}; {_REMEDIES[state]}")
    if state is None:
        # An error without an SQLSTATE comes from the client, after a lost connection or a wrong call.
        return SourceError(text, retryable=isinstance(error, psycopg.OperationalError))
    return SourceError(text, retryable=state[:2] in _RETRYABLE_CLASSES or state == _IDLE_IN_TRANSACTION)


def is_about_statement(error: LanesError) -> bool:
    """Return whether the server refused only this statement, so that other statements may succeed."""
    state = error.__cause__.sqlstate if isinstance(error.__cause__, psycopg.Error) else None
    return state is not None and not state.startswith(_CONNECTION_CODES)


def not_connected(error: psycopg.Error, where: str) -> LanesError:
    """Return the error of a failed connection. If the server has no connection left, the error names the remedy."""
    found = lanes_error(where, error)
    text = str(error)
    if "too many clients" in text or "connection slots" in text or "too many connections" in text:
        return SourceError(f"{found}; raise max_connections, or start fewer processes", retryable=True)
    # The error of a failed connection has no SQLSTATE. Its text has one line for each host.
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
        # Most errors of the client name host and user, but no password. An error about an unreadable URL or an invalid
        # port may quote any part of the URL. If the URL has an extra @, the client treats the end of the password as
        # the host.
        words = " ".join(str(error).split())
        if isinstance(error, psycopg.ProgrammingError) or "invalid" in words:
            words = _QUOTED.sub('"…"', words)
        primary = _BEFORE_HOST.sub("…@", words) or type(error).__name__
    return f"{error.sqlstate or type(error).__name__} {primary}"
