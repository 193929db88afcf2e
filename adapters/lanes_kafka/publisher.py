"""Publishes the outputs of handlers to Kafka topics with an idempotent producer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import anyio
from confluent_kafka import KafkaError, KafkaException

from lanes.arguments import names_unknown_options, shown_value
from lanes.errors import ConfigError, SourceError
from lanes.outputs.publisher import Output, Report
from lanes_kafka.config import UserSettings
from lanes_kafka.dead_letters.producer import WRITE_TIMEOUT_MS, ConfirmedProducer, safe_settings
from lanes_kafka.dead_letters.wire import Headers
from lanes_kafka.errors import NOT_ALLOWED, client_text
from lanes_kafka.keywords import of_the_client
from lanes_kafka.topic_names import is_topic

PERMANENT: Final = NOT_ALLOWED | {
    KafkaError.INVALID_RECORD,
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.POLICY_VIOLATION,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
}
"""Errors of a record that fails until an operator or the handler changes something."""

_OF_A_BATCH: Final = frozenset(
    {
        KafkaError._INVALID_DIFFERENT_RECORD,
        KafkaError.INVALID_RECORD,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
    }
)
"""Errors with which a broker refuses all records of a batch, even if some of the records are valid."""

_SAFE_SETTINGS: Final[Mapping[str, Any]] = {
    "enable.idempotence": True,
    "acks": "all",
    # The client must not send an unconfirmed record long after the partition of its message has another owner.
    "message.timeout.ms": WRITE_TIMEOUT_MS,
}

_MOST_TOPICS: Final = 1_000
"""Maximum number of checked topics that a publisher remembers."""

_TRANSACTIONAL: Final = "transactional.id"


def publisher_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the producer of outputs. Pure.

    Settings of producers stay unchanged. The function omits settings that only consumers have, and adds idempotence and
    a write timeout. Raises ``ConfigError`` for settings that could lose or repeat outputs.
    """
    transactional = UserSettings(config).get(_TRANSACTIONAL)
    if transactional is not None:
        raise ConfigError(
            f"{_TRANSACTIONAL}={shown_value(transactional)}: the publisher sends outputs without transactions; leave "
            "the setting out"
        )
    return safe_settings(config, _SAFE_SETTINGS, "outputs")


@names_unknown_options("KafkaPublisher", homes=of_the_client("KafkaPublisher", ""))
class KafkaPublisher:
    """Publishes outputs to topics. The target of an output is a topic.

    The producer is idempotent, and all in-sync replicas confirm each output. The key of an output chooses its
    partition, by the partitioner of the settings. The object runs on asyncio and on trio.

    A broker refuses a whole batch because of one record, or because the batch exceeds ``max.message.bytes`` of the
    topic. The publisher then sends each record of the batch alone, so a wrong output fails alone.

    The consumer sends an output again if the broker does not confirm it within ``message.timeout.ms`` (default 10 s).
    The topic may then contain the output twice. A reader of the topic that needs each output once must deduplicate.

    Args:
        config: The dictionary of a ``confluent_kafka`` producer, or of the consumer. The publisher omits settings that
            only consumers have, and passes the other settings on.

    Raises:
        ConfigError: A setting is invalid, switches idempotence off, or is ``transactional.id``.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._producer = ConfirmedProducer(publisher_settings(config), "outputs")
        self._config = dict(config)
        self._settings = self._producer.settings
        self._topics: set[str] = set()
        # The topic has its own limit. The client would apply ``message.max.bytes`` before compression.
        alone = {"message.max.bytes": 1_000_000_000, **publisher_settings(config), "batch.num.messages": 1}
        self._alone = ConfirmedProducer(alone, "outputs")

    def __repr__(self) -> str:
        return "<KafkaPublisher>"

    @property
    def config(self) -> Mapping[str, Any]:
        """The dictionary of the user, which may contain secrets."""
        return self._config

    async def open(self) -> None:
        """Create the client, which connects in the background. Idempotent.

        Raises:
            ConfigError: The client refuses its settings.
        """
        self._producer.open()
        try:
            await self._producer.connect()
        except BaseException:
            await self._producer.aclose(0.0)
            raise

    async def publish(self, outputs: Sequence[Output], report: Report) -> None:
        """Write outputs and wait for their confirmations; see ``lanes.outputs.publisher.Publisher.publish``.

        Args:
            outputs: The outputs.
            report: Called once for each output.
        """
        if not self._producer.is_open:
            # A permanent error would turn the messages of the other consumer into dead letters.
            raise SourceError(
                "outputs: the publisher is closed, maybe by another consumer; pass each consumer a publisher of its "
                "own",
                retryable=True,
            )
        refused = await self._send(self._producer, outputs, report, batches=True)
        if refused:
            self._alone.open()
            await self._send(self._alone, refused, report, batches=False)

    async def _send(
        self, producer: ConfirmedProducer, outputs: Sequence[Output], report: Report, *, batches: bool
    ) -> list[Output]:
        """Write outputs and wait for their confirmations. Return the outputs to send alone, without a report."""
        await producer.connect()
        left, bell = len(outputs), anyio.Event()
        refused: list[Output] = []
        results: list[tuple[Output, KafkaException | SourceError | None]] = []

        def ended(some: Sequence[tuple[Output, KafkaException | None]]) -> None:
            results.extend(some)
            bell.set()

        records = []
        for output in outputs:
            target = output.target
            if target in self._topics or self._is_topic(target):
                headers: Headers = [*output.headers, *output.trace] if output.headers or output.trace else []
                records.append((output, target, output.value, output.key, headers))
            else:
                wrong = SourceError(
                    f"output to {target!r}: the target is no topic; use 1 to 249 letters, digits, '.', '_' and '-'"
                )
                results.append((output, wrong))
        producer.write_all(records, ended)
        while left:
            if not results:
                await bell.wait()
            bell = anyio.Event()
            left -= len(results)
            reported, results = results, []
            for output, failure in reported:
                if failure is None:
                    report(output, None)
                elif not isinstance(failure, KafkaException):
                    report(output, failure)
                elif batches and failure.args[0].code() in _OF_A_BATCH:
                    refused.append(output)
                else:
                    report(output, self._failure(output, failure))
        return refused

    def _is_topic(self, target: str) -> bool:
        found = is_topic(target)
        if found and len(self._topics) < _MOST_TOPICS:
            self._topics.add(target)
        return found

    def _failure(self, output: Output, failure: KafkaException) -> SourceError:
        error: KafkaError = failure.args[0]
        text = client_text(error, self._settings)
        if error.code() in PERMANENT:
            return SourceError(
                f"output refused by {output.target} ({text}); correct the output, or the permissions or settings of "
                "the topic"
            )
        missing = error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)
        remedy = "create this topic" if missing else "check that the broker runs and has this topic"
        return SourceError(f"output not confirmed by {output.target} ({text}); {remedy}", retryable=True)

    async def aclose(self) -> None:
        """Wait up to 5 seconds for unconfirmed outputs, and then close the client. Idempotent."""
        await self._producer.aclose()
        await self._alone.aclose()
