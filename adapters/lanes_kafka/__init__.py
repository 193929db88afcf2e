"""The Kafka source and the Kafka dead letters of ``lanes``: order within a key, parallel handlers across keys.

Reading order: ``source``, ``topic_names``, ``callbacks``, ``config``, ``bridge``, ``broker``, ``errors``,
``client_log``, ``keywords``, ``partitioners``, ``publisher``; then the folders ``client``, ``transactions``,
``dead_letters``, ``cli``.
"""

from __future__ import annotations

try:
    import confluent_kafka  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "confluent_kafka":
        raise
    raise ImportError(
        "lanes_kafka needs confluent_kafka: pip install '.[kafka]' in the checkout of lanes",
        name="confluent_kafka",
    ) from error

from lanes_kafka.client.records import record_key
from lanes_kafka.dead_letters.wire import read_dead_letter, read_disposition
from lanes_kafka.dead_letters.writer import KafkaDeadLetters
from lanes_kafka.publisher import KafkaPublisher
from lanes_kafka.source import KafkaSource
from lanes_kafka.transactions.settings import KafkaTransactions

__all__ = [
    "KafkaDeadLetters",
    "KafkaPublisher",
    "KafkaSource",
    "KafkaTransactions",
    "read_dead_letter",
    "read_disposition",
    "record_key",
]
