"""Remedies for calls that pass settings of the client as keyword arguments, which other Kafka clients accept."""

from __future__ import annotations

from typing import Final

from lanes.arguments import OF_CONSUMERS

_SETTINGS: Final = (
    "auto.offset.reset",
    "bootstrap.servers",
    "client.id",
    "enable.auto.commit",
    "group.id",
    "group.instance.id",
    "heartbeat.interval.ms",
    "isolation.level",
    "max.poll.interval.ms",
    "sasl.mechanism",
    "security.protocol",
    "session.timeout.ms",
)
"""Settings that other Kafka clients accept as keyword arguments, with underscores in place of dots."""


def of_the_client(caller: str, rest: str) -> dict[str, str]:
    """Return the remedies for a call that passes settings of the client as keyword arguments.

    Args:
        caller: Name of the class.
        rest: Arguments after the dictionary in the correct call, for the remedy; "" = no arguments.

    Returns:
        The remedies by keyword.
    """
    more = f", {rest}" if rest else ""
    settings = {setting.replace(".", "_"): setting for setting in _SETTINGS}
    return {
        keyword: f'write it into the dictionary of the client: {caller}({{"{setting}": …}}{more})'
        for keyword, setting in settings.items()
    }


def of_the_source(caller: str, rest: str) -> dict[str, str]:
    """Return the remedies of ``of_the_client``, and the remedies for settings of the consumer.

    Args:
        caller: Name of the class.
        rest: Arguments after the dictionary in the correct call, for the remedy.

    Returns:
        The remedies by keyword.
    """
    return {**of_the_client(caller, rest), **OF_CONSUMERS}
