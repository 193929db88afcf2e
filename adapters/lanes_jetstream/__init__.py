"""NATS JetStream for ``lanes``: a pull consumer as a source, a subject as dead letters."""

from __future__ import annotations

from lanes_jetstream.cohort import Cohort
from lanes_jetstream.cohort_stream import CohortStream
from lanes_jetstream.dead_letters import JetStreamDeadLetters
from lanes_jetstream.keys import header, subject_token, whole_subject
from lanes_jetstream.letters import read_letter
from lanes_jetstream.source import JetStreamSource

__all__ = [
    "Cohort",
    "CohortStream",
    "JetStreamDeadLetters",
    "JetStreamSource",
    "header",
    "read_letter",
    "subject_token",
    "whole_subject",
]
