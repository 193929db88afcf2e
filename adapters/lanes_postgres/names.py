"""Checks the names that users choose for subscriptions, groups, consumers and schemas."""

from __future__ import annotations

import re
from typing import Final, TypeGuard

from lanes.arguments import shown_value
from lanes.errors import ConfigError

SCHEMA: Final = "lanes"
"""The default schema of the tables."""

_NAME_LIMIT: Final = 200
_SCHEMA_LIMIT: Final = 63  # bytes: PostgreSQL cuts longer names, so two long names could become equal

_PASSWORD: Final = re.compile(r"(?i)\bpassword\s*=")


def check_subscription(name: object) -> None:
    """Raise ``ConfigError`` for an invalid name of a subscription."""
    check_name("subscription", name, "name the purpose of the effects, such as 'billing'")


def check_name(argument: str, name: object, remedy: str) -> None:
    """Raise ``ConfigError`` for an invalid name of a group, a consumer, or another part of a subscription."""
    refuse_address(argument, name, remedy)
    if not _is_text(name) or not 0 < len(name) <= _NAME_LIMIT:
        raise ConfigError(
            f"{argument}={shown_value(name)}: must be a str of 1 to {_NAME_LIMIT} characters, without zero bytes; "
            f"{remedy}"
        )


def check_schema_name(name: object) -> None:
    """Raise ``ConfigError`` for an invalid name of a schema."""
    refuse_address("schema", name, f"omit it for {SCHEMA!r}")
    if not _is_text(name) or not 0 < len(name.encode()) <= _SCHEMA_LIMIT:
        raise ConfigError(
            f"schema={shown_value(name)}: must be a str of 1 to {_SCHEMA_LIMIT} bytes, without zero bytes; omit it "
            f"for {SCHEMA!r}"
        )


def refuse_address(argument: str, name: object, remedy: str) -> None:
    """Raise ``ConfigError`` for an address in place of a name. The error omits the address, which may be a secret."""
    if is_address(name):
        raise ConfigError(f"{argument}= is the address of a server, not a name; {remedy}")


def is_address(name: object) -> bool:
    """Return whether a value is an address: a URL, or text with words such as ``password=…``."""
    return isinstance(name, str) and ("://" in name or _PASSWORD.search(name) is not None)


def _is_text(value: object) -> TypeGuard[str]:
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
