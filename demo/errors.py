"""Errors that stop the demo before its report: one line with the fault, the place and the remedy."""

from __future__ import annotations

from lanes.errors import LanesError


class DemoError(LanesError):
    """The demo cannot begin or go on: bad input, a server that is not there, a disk that is full."""


class NoAnswer(Exception):
    """The broker did not answer a question; it may do later."""
