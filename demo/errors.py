"""What stops the demo before it has a report: one line that says what, where, and what to do."""

from __future__ import annotations

from lanes.errors import LanesError


class DemoError(LanesError):
    """The demo cannot begin or go on: bad input, a server that is not there, a disk that is full."""


class NoAnswer(Exception):
    """The broker did not answer a question; it may do later."""
