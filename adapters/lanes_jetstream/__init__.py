"""Runs ``lanes`` on NATS JetStream: a source, dead letters, and the commands for cohorts, queues and servers.

Reading order: ``source``, ``wire``, ``durable``, ``cohort``, ``dead_letters``, ``publisher``, ``cli``,
``queue_survey``, ``doctor``.
"""

from __future__ import annotations

try:
    import nats  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "nats":
        raise
    raise ImportError(
        "lanes_jetstream needs nats: pip install '.[jetstream]' in the checkout of lanes",
        name="nats",
    ) from error

from lanes_jetstream.cohort.settings import Cohort, CohortStream
from lanes_jetstream.dead_letters.wire import read_dead_letter
from lanes_jetstream.dead_letters.writer import JetStreamDeadLetters
from lanes_jetstream.publisher import JetStreamPublisher
from lanes_jetstream.source import JetStreamSource
from lanes_jetstream.wire.keys import header, subject_token, whole_subject

__all__ = [
    "Cohort",
    "CohortStream",
    "JetStreamDeadLetters",
    "JetStreamPublisher",
    "JetStreamSource",
    "header",
    "read_dead_letter",
    "subject_token",
    "whole_subject",
]
