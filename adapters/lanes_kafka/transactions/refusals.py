"""The errors of transactions that only an operator can mend, with their remedy."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException

from lanes.errors import ConfigError
from lanes_kafka.config import redacted
from lanes_kafka.errors import client_text, exception_text

log = logging.getLogger("lanes.kafka")

TOO_OLD: Final = (KafkaError._UNSUPPORTED_FEATURE, KafkaError.UNSUPPORTED_VERSION)
"""Errors of a broker that lacks a request of transactions."""


def refusal(name: str, error: KafkaError, settings: Mapping[str, Any]) -> ConfigError:
    """Make the error of a broker that refuses transactions for good.

    Args:
        name: Name of the source.
        error: The broker's answer.
        settings: Configuration of the producer, whose secrets the text does not show.

    Returns:
        The error, with the remedy.
    """
    text = client_text(error, settings)
    if error.code() in TOO_OLD:
        return ConfigError(
            f"{name}: transactions=…: the broker is too old ({text}); use Kafka 2.5 or newer, or leave transactions out"
        )
    if error.code() == KafkaError.INVALID_TRANSACTION_TIMEOUT:
        return ConfigError(
            f"{name}: transaction.timeout.ms={settings['transaction.timeout.ms']}: the broker refuses this value; set "
            "at most transaction.max.timeout.ms of the broker"
        )
    return ConfigError(
        f"{name}: transactional.id={settings['transactional.id']!r}: the broker refuses the producer ({text}); allow "
        "this user Write and Describe on the transactional id"
    )


def thread_failure(name: str, raised: Exception, settings: Mapping[str, Any]) -> str:
    """Log the exception that ends the thread of the transactions, and return the text for its requests.

    Neither shows a secret of ``settings``. The log has the traceback, unless the client has raised the exception or the
    traceback shows a secret.
    """
    text = exception_text(raised, settings)
    if isinstance(raised, KafkaException):
        text = f"the thread of the transactions has failed ({text}); correct the cause, and start again"
        log.error("%s: %s", name, text)
        return text
    text = f"the thread of the transactions has failed ({text}); start again, and report this bug of lanes"
    shown = "".join(traceback.format_exception(raised))
    log.error("%s: %s", name, text, exc_info=raised if redacted(shown, settings) == shown else None)
    return text
