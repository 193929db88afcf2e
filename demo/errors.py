"""Errors that stop the demo before its report: one line with the subject, the fault and the remedy."""

from __future__ import annotations

from lanes.errors import LanesError


class DemoError(LanesError):
    """An error that stops the demo, such as bad input, a missing server or a full disk."""


class NoAnswer(Exception):
    """The broker did not answer a question, but may answer later."""
