"""A transform is undone: the published subject of a stored one, or none if the transform loses a part of it."""

from __future__ import annotations

import pytest

from lanes_jetstream.cohort.settings import CohortStream
from lanes_jetstream.wire.transforms import published_subject, transforms_of

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
def test_a_transform_is_undone(stored: str, transform: tuple[str, str], published: str | None) -> None:
    assert published_subject(stored, *transform) == published


@pytest.mark.parametrize("tokens", [(1,), (1, 3), None])
def test_the_transform_of_a_cohort_stream_is_undone(tokens: tuple[int, ...] | None) -> None:
    made = CohortStream(subject="orders.*.eu.*", tokens=tokens)
    copied = CohortStream(subject="orders.*.eu.*", tokens=tokens, origin="ORDERS")
    for stream in (made, copied):
        ((source, destination),) = transforms_of(stream.config("S", 64))
        assert published_subject("17.orders.ann.eu.9", source, destination) == "orders.ann.eu.9"


def test_a_stream_without_a_transform_has_none() -> None:
    assert list(transforms_of({"subjects": ["a"]})) == []
    assert list(transforms_of({"mirror": {"name": "a"}, "sources": None})) == []
    assert list(transforms_of({"subject_transform": {"src": "", "dest": "a.>"}})) == [(">", "a.>")]
