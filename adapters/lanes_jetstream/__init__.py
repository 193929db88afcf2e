"""NATS JetStream for ``lanes``: a pull consumer as a source, a subject as dead letters.

Reading order: ``source``; then the rooms ``wire``, ``durable``, ``cohort``, ``dead_letters``, and ``cli``.
"""

from __future__ import annotations

from lanes_jetstream.cohort.settings import Cohort, CohortStream
from lanes_jetstream.dead_letters.wire import read_dead_letter
from lanes_jetstream.dead_letters.writer import JetStreamDeadLetters
from lanes_jetstream.source import JetStreamSource
from lanes_jetstream.wire.keys import header, subject_token, whole_subject

__all__ = [
    "Cohort",
    "CohortStream",
    "JetStreamDeadLetters",
    "JetStreamSource",
    "header",
    "read_dead_letter",
    "subject_token",
    "whole_subject",
]
