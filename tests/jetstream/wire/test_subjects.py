"""Patterns of subjects match like on the server, and the subjects of a stream include the subjects of its sources."""

from __future__ import annotations

from typing import Any

import pytest

from lanes_jetstream.wire.intake import Intake
from lanes_jetstream.wire.subjects import is_subject, matches, overlap


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
def test_a_valid_subject_is_accepted(subject: str) -> None:
    assert is_subject(subject)


@pytest.mark.parametrize("subject", ["", "a..b", ".a", "a.", "a b", "a.>.b", None, 5, ["a"]])
def test_an_invalid_subject_is_refused(subject: object) -> None:
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
def test_a_stream_stores_exactly_the_subjects_of_its_configuration(
    config: dict[str, Any], stream: str, subject: str, stored: bool
) -> None:
    assert Intake.of({"name": "S", **config}).stores(stream, subject) is stored


def test_a_stream_with_a_transform_changes_subjects() -> None:
    assert not Intake.of({"name": "S", "subjects": ["a.>"], "sources": [{"name": "T"}]}).transforms
    assert Intake.of({"name": "S", "subject_transform": {"src": "a.*", "dest": "b.*"}}).transforms
    for destination, changes in (("b", True), ("", False)):
        pairs = [{"src": "a", "dest": destination}]
        assert Intake.of({"name": "S", "sources": [{"name": "T", "subject_transforms": pairs}]}).transforms is changes


@pytest.mark.parametrize(
    ("one", "other", "overlapping"),
    [
        ("orders.*", "order.*", False),
        ("orders.*", "*.paid", True),
        ("orders.>", "*.*.paid", True),
        ("orders.>", "orders", False),
        ("orders.>", "*", False),
        ("orders.*", "orders.*.paid", False),
        (">", "a", True),
        ("a.*.c", "a.b.*", True),
        ("a.*.c", "a.b.d", False),
        ("a.>", "b.>", False),
    ],
)
def test_two_patterns_overlap_exactly_if_one_subject_matches_both(one: str, other: str, overlapping: bool) -> None:
    assert overlap(one, other) is overlapping
    assert overlap(other, one) is overlapping


@pytest.mark.parametrize(
    ("config", "pattern", "stored"),
    [
        ({"subjects": ["orders.*", "bills.>"]}, "bill.*", False),
        ({"subjects": ["orders.*", "bills.>"]}, "*.2026.*", True),
        ({"subjects": ["orders.*"], "subject_transform": {"src": "orders.*", "dest": "o.$1"}}, "o.*", True),
        ({"subjects": ["orders.*"], "subject_transform": {"src": "orders.*", "dest": "o.$1"}}, "orders.*", False),
        # The transform leaves the other subjects as they are.
        ({"subjects": ["orders.>"], "subject_transform": {"src": "orders.*", "dest": "o.$1"}}, "orders.*", True),
        ({"subjects": ["orders.*"], "subject_transform": {"src": "orders.*", "dest": "{{split(1,-)}}.b"}}, "c.d", True),
        ({"mirror": {"name": "T"}, "subject_transform": {"src": "a.*", "dest": "b.$1"}}, "any.*", True),
        ({"mirror": {"name": "T"}}, "any.*", True),
        ({"mirror": {"name": "T", "external": {"api": "$JS.hub.API"}}}, "any.*", True),
        ({"sources": [{"name": "T", "filter_subject": "orders.*"}]}, "orders.1", True),
        ({"sources": [{"name": "T", "filter_subject": "orders.*"}]}, "order.1", False),
        ({"sources": [{"name": "T", "subject_transforms": [{"src": "a.*", "dest": "b"}]}]}, "b", True),
        ({"sources": [{"name": "T", "subject_transforms": [{"src": "a.*", "dest": "b"}]}]}, "a.1", False),
        ({"sources": [{"name": "T", "subject_transforms": [{"src": "a.*", "dest": ""}]}]}, "a.1", True),
    ],
)
def test_a_stream_may_store_the_subjects_that_a_filter_selects(
    config: dict[str, Any], pattern: str, stored: bool
) -> None:
    assert Intake.of({"name": "S", **config}).may_store(pattern) is stored
