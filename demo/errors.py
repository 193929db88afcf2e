"""The errors of the demo: a fault that stops the demo before its report, and a broker without an answer."""

from __future__ import annotations

from lanes.errors import LanesError


class DemoError(LanesError):
    """An error that stops the demo, such as bad input, a missing server or a full disk."""


class NoAnswer(Exception):
    """The broker did not answer a request, but may answer later."""
