"""The errors of transactions that only an operator can mend, with their remedy."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException

from lanes.errors import ConfigError
from lanes.outputs.publisher import Output
from lanes_kafka.config import redacted
from lanes_kafka.errors import client_text, exception_text
from lanes_kafka.publisher import PERMANENT

log = logging.getLogger("lanes.kafka")

TOO_OLD: Final = (KafkaError._UNSUPPORTED_FEATURE, KafkaError.UNSUPPORTED_VERSION)
"""Errors of a broker that lacks a request of transactions."""


_POSITIONS: Final = "offsets"
"""A word in the client's error if the broker has refused the positions of a transaction, and not its outputs."""

Failed = Sequence[tuple[Output, KafkaError]]
"""The outputs that the client has reported as failed, with their errors."""


def refusal(
    name: str, error: KafkaError, settings: Mapping[str, Any], group: str, topics: Sequence[str] = ()
) -> ConfigError:
    """Make the error of a broker that refuses transactions for good.

    Args:
        name: Name of the source.
        error: The broker's answer.
        settings: Configuration of the producer, whose secrets the text does not show.
        group: Id of the group.
        topics: Topics whose positions the transaction has.

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
    if error.code() == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
        return ConfigError(
            f"{name}: transactional.id={settings['transactional.id']!r}: the broker refuses the producer ({text}); "
            "allow this user Write and Describe on the transactional id"
        )
    if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
        return ConfigError(
            f"{name}: group.id={group!r}: the broker refuses the positions of a transaction ({text}); allow the user "
            "of the publisher Read on the group"
        )
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return ConfigError(
            f"{name}: the broker refuses the positions of {' or '.join(topics)} ({text}); allow the user of the "
            "publisher Read on the topic"
        )
    return ConfigError(
        f"{name}: transactions=…: the broker refuses the producer ({text}); allow the user of the publisher "
        "IdempotentWrite on the cluster"
    )


def is_of_an_output(error: KafkaError, failed: Failed) -> bool:
    """Return whether the error of a call is about the topic of an output."""
    if error.code() != KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return False
    return _POSITIONS not in error.str() or any(each.code() == error.code() for _, each in failed)


def refused_output(error: KafkaError, failed: Failed, sent: Sequence[Output], settings: Mapping[str, Any]) -> str:
    """Return the text for an output that the broker refuses for good; "" = the broker may accept the outputs later.

    Args:
        error: Error of the call that has failed.
        failed: The failed outputs.
        sent: All outputs of the transaction.
        settings: Configuration of the producer, whose secrets the text does not show.

    Returns:
        The text, which names the topic and the message.
    """
    refused, cause = next(((output, each) for output, each in failed if each.code() in PERMANENT), (None, error))
    targets = []
    if refused is None and sent and is_of_an_output(error, failed):
        # The broker has refused to add a partition to the transaction, and the client does not say which.
        unsent = [output for output, _ in failed] or sent
        refused, targets = unsent[0], sorted({output.target for output in unsent})
    if refused is None:
        return ""
    remedy = "correct the handler, or the permissions or settings of the topic"
    if cause.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        remedy = "allow the user of the publisher Write and Describe on the topic"
    later = " or a later output" if len(targets) > 1 else ""
    return (
        f"{' or '.join(targets) or refused.target} refused output {refused.number} of {refused.source} position "
        f"{refused.position}{later} ({client_text(cause, settings)}); {remedy}, and start again"
    )


def missing_topic(output: Output, text: str) -> str:
    """Return the text for an output whose topic does not exist; ``text`` is the client's error."""
    return (
        f"output {output.number} of {output.source} position {output.position} to {output.target!r}: the topic does "
        f"not exist ({text}); create this topic"
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
