"""Tests again and again on a busy machine: `python -m tests.flaky`, and which tests, by which rule, in `choosing`."""
