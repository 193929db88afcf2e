"""Patterns of subjects match like on the server, and the subjects of a stream include those of its sources."""

from __future__ import annotations

from typing import Any

import pytest

from lanes_jetstream.wire.stream import Intake, is_subject, matches


@pytest.mark.parametrize(
    ("pattern", "subject", "matched"),
    [
        (">", "a", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*.>", "a.b", False),
        ("a.*.>", "a.b.c", True),
    ],
)
def test_a_pattern_matches_as_at_the_server(pattern: str, subject: str, matched: bool) -> None:
    assert matches(pattern, subject) is matched


@pytest.mark.parametrize("subject", ["a", "a.b", "a.*.>", ">"])
def test_a_subject(subject: str) -> None:
    assert is_subject(subject)


@pytest.mark.parametrize("subject", ["", "a..b", ".a", "a.", "a b", "a.>.b", None, 5, ["a"]])
def test_no_subject(subject: object) -> None:
    assert not is_subject(subject)


@pytest.mark.parametrize(
    ("config", "stream", "subject", "stored"),
    [
        ({"subjects": ["orders.>"]}, "S", "orders.dead", True),
        ({"subjects": ["orders.>"]}, "S", "dead", False),
        ({"subjects": ["orders.>"]}, "T", "orders.dead", False),
        ({"mirror": {"name": "T"}}, "T", "dead", True),
        ({"sources": [{"name": "T", "filter_subject": "orders.*"}]}, "T", "orders.dead", True),
        ({"sources": [{"name": "T", "filter_subject": "orders.*"}]}, "T", "dead", False),
        ({"sources": [{"name": "T", "subject_transforms": [{"src": "a.*", "dest": "b"}]}]}, "T", "a.1", True),
        ({"sources": [{"name": "T", "subject_transforms": [{"src": "a.*", "dest": "b"}]}]}, "T", "dead", False),
        ({"sources": [{"name": "T", "external": {"api": "$JS.hub.API"}}]}, "T", "dead", False),
        ({}, "S", "dead", False),
    ],
)
def test_the_subjects_that_a_stream_stores(config: dict[str, Any], stream: str, subject: str, stored: bool) -> None:
    assert Intake.of({"name": "S", **config}).stores(stream, subject) is stored


def test_whether_a_stream_changes_subjects() -> None:
    assert not Intake.of({"name": "S", "subjects": ["a.>"], "sources": [{"name": "T"}]}).transforms
    assert Intake.of({"name": "S", "subject_transform": {"src": "a.*", "dest": "b.*"}}).transforms
    assert Intake.of({"name": "S", "sources": [{"name": "T", "subject_transforms": [{"src": "a"}]}]}).transforms
