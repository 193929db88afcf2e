"""Names that users give: of a subscription, of a schema."""

from __future__ import annotations

from typing import Final, TypeGuard

from lanes.errors import ConfigError

SCHEMA: Final = "lanes"
"""The schema that the tables are in unless another one is named."""

_SUBSCRIPTION_LIMIT: Final = 200
_SCHEMA_LIMIT: Final = 63  # bytes: PostgreSQL cuts longer ones, and two would be one


def check_subscription(name: object) -> None:
    """Raise ``ConfigError`` for what is no name of a subscription."""
    if not _is_text(name) or not 0 < len(name) <= _SUBSCRIPTION_LIMIT:
        raise ConfigError(
            f"subscription={name!r}: must be a str of 1 to {_SUBSCRIPTION_LIMIT} characters, without zero bytes; name "
            "what the effects are for, such as 'billing'"
        )


def check_schema_name(name: object) -> None:
    """Raise ``ConfigError`` for what is no name of a schema."""
    if not _is_text(name) or not 0 < len(name.encode()) <= _SCHEMA_LIMIT:
        raise ConfigError(
            f"schema={name!r}: must be a str of 1 to {_SCHEMA_LIMIT} bytes, without zero bytes; leave it out for "
            f"{SCHEMA!r}"
        )


def _is_text(value: object) -> TypeGuard[str]:
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
