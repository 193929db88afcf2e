"""A published subject is derived from its stored subject, unless the transform loses a part of the subject."""

from __future__ import annotations

import pytest

from lanes_jetstream.cohort.settings import CohortStream
from lanes_jetstream.wire.transforms import (
    Origin,
    Transform,
    may_make,
    origins_of,
    own_transform,
    published_subject,
)

DOCUMENTED = ("orders.*", "orders.{{partition(64,1)}}.{{wildcard(1)}}")


@pytest.mark.parametrize(
    ("stored", "transform", "published"),
    [
        ("orders.17.ann", DOCUMENTED, "orders.ann"),
        ("orders.17.ann", ("orders.*", "orders.{{ Partition( 64 , 1 ) }}.$1"), "orders.ann"),
        ("3.b.a", ("x.*.*", "{{partition(4,1,2)}}.{{wildcard(2)}}.{{wildcard(1)}}"), "x.a.b"),
        ("3.a.a", ("x.*", "{{partition(4,1)}}.$1.$1"), "x.a"),
        ("3.orders.eu.ann.paid", ("orders.>", "{{partition(4)}}.orders.>"), "orders.eu.ann.paid"),
        ("3.a.b", (">", "{{partition(4)}}.>"), "a.b"),
        # The transform makes no such subject.
        ("orders.ann", DOCUMENTED, None),
        ("orders.x.ann", DOCUMENTED, None),
        ("orders.17.ann.paid", DOCUMENTED, None),
        ("other.17.ann", DOCUMENTED, None),
        ("3.a.b", ("x.*", "{{partition(4,1)}}.$1.$1"), None),
        ("3", (">", "{{partition(4)}}.>"), None),
        # The transform does not store all of the subject.
        ("3.a", ("x.*.*", "{{partition(4,1,2)}}.{{wildcard(2)}}"), None),
        ("3.a", ("x.*.>", "{{partition(4,1)}}.{{wildcard(1)}}"), None),
        ("a.b", ("*", "{{split(1,-)}}"), None),
    ],
)
def test_the_published_subject_follows_from_the_stored_one(
    stored: str, transform: tuple[str, str], published: str | None
) -> None:
    assert published_subject(stored, *transform) == published


@pytest.mark.parametrize("tokens", [(1,), (1, 3), None])
def test_the_transform_of_a_cohort_stream_is_undone(tokens: tuple[int, ...] | None) -> None:
    made = own_transform(CohortStream(subject="orders.*.eu.*", tokens=tokens).config("S", 64))
    assert made is not None
    (copied,) = origins_of(CohortStream(subject="orders.*.eu.*", tokens=tokens, origin="ORDERS").config("S", 64))
    assert published_subject("17.orders.ann.eu.9", *made) == "orders.ann.eu.9"
    assert copied.subjects_before("17.orders.ann.eu.9") == ["orders.ann.eu.9"]


def test_transforms_and_copied_streams_are_read_from_a_configuration() -> None:
    assert (own_transform({"subjects": ["a"]}), origins_of({"subjects": ["a"], "sources": None})) == (None, [])
    assert own_transform({"subject_transform": {"src": "", "dest": "a.>"}}) == (">", "a.>")
    assert origins_of({"mirror": {"name": "A"}}) == [Origin("A", False, [Transform(">", "")])]
    pairs = [{"src": "a.*", "dest": "b.$1"}, {"src": "c.>"}]
    sources = [
        {"name": "A", "subject_transforms": pairs},
        {"name": "B", "filter_subject": "b", "external": {"api": "x"}},
    ]
    a, b = origins_of({"sources": sources})
    assert a == Origin("A", False, [Transform("a.*", "b.$1"), Transform("c.>", "")])
    assert b == Origin("B", True, [Transform("b", "")])
    assert [a.subjects_before(each) for each in ("b.x", "c.x", "d.x")] == [["a.x"], ["c.x"], []]


@pytest.mark.parametrize(
    ("stored", "destination", "may"),
    [
        ("orders.17.ann", "orders.{{partition(64,1)}}.$1", True),
        ("orders.17", "orders.{{partition(64,1)}}.$1", False),
        ("other.17.ann", "orders.{{partition(64,1)}}.$1", False),
        ("a.b.c", "a.>", True),
        ("x", "{{split(1,-)}}", True),
    ],
)
def test_a_subject_that_a_transform_makes_is_known(stored: str, destination: str, may: bool) -> None:
    assert may_make(stored, destination) is may
