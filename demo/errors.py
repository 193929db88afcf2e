"""The errors of the demo: one that stops the demo before its report, and one for a broker that does not answer."""

from __future__ import annotations

from lanes.errors import LanesError


class DemoError(LanesError):
    """An error that stops the demo, such as bad input, a missing server or a full disk."""


class NoAnswer(Exception):
    """The broker did not answer a question, but may answer later."""
