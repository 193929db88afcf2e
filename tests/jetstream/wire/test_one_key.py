"""A ``subject_token`` that is a literal, or the partition number of a transform, is refused as a key."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lanes import ConfigError
from lanes_jetstream import JetStreamSource, header, subject_token, whole_subject
from lanes_jetstream.wire.intake import Intake
from lanes_jetstream.wire.keys import KeyFunction, check_no_partition_number, check_varies
from lanes_jetstream.wire.subjects import matches, narrowed, overlap

SERVER = "nats://127.0.0.1:1"


@pytest.mark.parametrize(
    ("key", "patterns", "said"),
    [
        (subject_token(0), ["ord.*"], "key=subject_token(0): is 'ord' for every subject of S (ord.*), so all messages"),
        (subject_token(0), ["ord.*"], "Use another token, such as subject_token(1); or pass key=None with Settings"),
        (subject_token(0), ["ord.>"], "Use another token, such as subject_token(1);"),
        (subject_token(0, 2), ["ord.*.paid", "ord.eu.paid"], "subject_token(0, 2): is 'ord.paid' for every subject"),
        (subject_token(-1), ["ord.*.paid", "ord.eu.42.paid"], "is 'paid' for every subject of S (ord.*.paid, ord.eu."),
        (
            subject_token(1),
            ["ord.eu"],
            "so all messages have one key and run one at a time. Use header(name), or",
        ),
        (subject_token(1), ["a.x.1", "b.x.1"], "Use another token, such as subject_token(0)"),
        (whole_subject, ["ord.eu"], "key=whole_subject: is 'ord.eu' for every subject of S (ord.eu), so all messages"),
        (whole_subject, ["ord.eu", "ord.eu"], "run one at a time. Use header(name), or another function; or pass"),
    ],
)
def test_a_key_that_is_equal_for_every_subject_is_refused(key: KeyFunction, patterns: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_varies(key, patterns, "S")


@pytest.mark.parametrize(
    ("key", "patterns"),
    [
        (subject_token(1), ["ord.*"]),
        (subject_token(1), ["ord.>"]),
        (subject_token(0), [">"]),
        # The tokens before the end of a subject of unknown length may be any.
        (subject_token(-2), ["ord.paid.>"]),
        (subject_token(2), ["ord.paid.>"]),
        # Two subjects with a literal each have two keys.
        (subject_token(0), ["ord.*", "bill.*"]),
        (subject_token(0), ["ord.*", "*.paid"]),
        (subject_token(0, 1), ["ord.*"]),
        # The key function refuses the messages of one pattern.
        (subject_token(2), ["ord.*", "ord.*.paid"]),
        (subject_token(0), []),
        (whole_subject, ["ord", "bill"]),
        (whole_subject, ["ord.*"]),
        (whole_subject, ["ord.>"]),
        (whole_subject, []),
        (header("customer"), ["ord"]),
        (None, ["ord"]),
    ],
)
def test_a_key_that_differs_between_subjects_is_accepted(key: KeyFunction | None, patterns: list[str]) -> None:
    check_varies(key, patterns, "S")


@pytest.mark.parametrize(
    ("key", "patterns", "said"),
    [
        (
            subject_token(2),
            ["ord.*"],
            "key=subject_token(2): no subject of S (ord.*) has a token 2; the subjects",
        ),
        (
            subject_token(1, 3),
            ["ord.*", "ord.*.paid"],
            "a token 3; the subjects have at most 3 token(s), so use an",
        ),
        (
            subject_token(-3),
            ["ord.eu"],
            "a token -3; the subjects have at most 2 token(s), so use an index from 0 to 1",
        ),
    ],
)
def test_a_token_that_no_subject_has_is_refused(key: KeyFunction, patterns: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_varies(key, patterns, "S")


def test_the_error_for_one_key_names_at_most_ten_patterns() -> None:
    with pytest.raises(ConfigError, match=r"\(a\.0, a\.1, .*, a\.9, …\)"):
        check_varies(subject_token(0), [f"a.{number}" for number in range(11)], "S")
    with pytest.raises(ConfigError, match=r"\(a\.0, a\.1, .*, a\.9\)"):
        check_varies(subject_token(0), [f"a.{number}" for number in range(10)], "S")


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ("ord.*", "*.paid", "ord.paid"),
        ("ord.>", "*.eu.*", "ord.eu.*"),
        (">", "ord.*", "ord.*"),
        ("*.>", "ord.>", "ord.>"),
        ("ord.eu.>", "ord.*.>", "ord.eu.>"),
        ("ord.>", "ord.*.paid.>", "ord.*.paid.>"),
        ("ord.*", "ord.*", "ord.*"),
        ("ord", "ord", "ord"),
    ],
)
def test_two_patterns_are_narrowed_to_their_common_subjects(one: str, other: str, both: str) -> None:
    assert (narrowed(one, other), narrowed(other, one)) == (both, both)
    texts = ("ord", "eu", "paid")
    subjects = [
        *texts,
        *(f"{a}.{b}" for a in texts for b in texts),
        *(f"{a}.{b}.{c}" for a in texts for b in texts for c in texts),
        "ord.eu.paid.eu",
    ]
    assert overlap(one, other)
    for subject in subjects:
        assert matches(both, subject) == (matches(one, subject) and matches(other, subject)), subject


@pytest.mark.parametrize(
    ("config", "filters", "within"),
    [
        ({"subjects": ["ord.*", "bill.*"]}, [">"], ["bill.*", "ord.*"]),
        ({"subjects": ["ord.*", "bill.*"]}, ["ord.>"], ["ord.*"]),
        ({"subjects": ["ord.*", "bill.*"]}, ["*.paid", "bill.sent"], ["bill.paid", "bill.sent", "ord.paid"]),
        ({"subjects": ["ord.*"]}, ["bill.*"], []),
        ({"subjects": ["ord.*"], "subject_transform": {"src": "ord.*", "dest": "$1.ord"}}, [">"], ["*.ord"]),
        ({"subjects": ["ord.*"], "subject_transform": {"src": "ord.*", "dest": "$1.ord"}}, ["eu.*"], ["eu.ord"]),
        ({"mirror": {"name": "T", "external": {"api": "$JS.hub.API"}}}, ["a.*"], ["a.*"]),
        ({"sources": [{"name": "T", "filter_subject": "ord.eu.*"}]}, ["ord.>"], ["ord.eu.*"]),
    ],
)
def test_filters_are_narrowed_to_the_subjects_that_a_stream_stores(
    config: dict[str, Any], filters: list[str], within: list[str]
) -> None:
    assert Intake.of({"name": "S", **config}).within(filters) == within


@pytest.mark.parametrize(
    ("key", "destination", "said"),
    [
        (
            subject_token(1),
            "ord.{{partition(64,1)}}.{{wildcard(1)}}",
            (
                "key=subject_token(1): is the partition number that stream 'S' stores by its transform to "
                "'ord.{{partition(64,1)}}.{{wildcard(1)}}', so all messages of a partition have one key and run one at "
                "a time. Use subject_token(2), which partition() hashes; or pass a function of the message, if you "
                "want one order for each partition number"
            ),
        ),
        (subject_token(0, 1), "ord.{{partition(64,1)}}.$1", "Use subject_token(2), which partition() hashes;"),
        (subject_token(-2), "ord.{{ Partition(64, 1) }}.$1", "Use subject_token(2), which partition() hashes;"),
        (subject_token(0), "{{partition(9,2,1)}}.$1.x.$2", "Use subject_token(3, 1), which partition() hashes;"),
        # The whole subject is hashed, or a hashed token is not stored.
        (subject_token(0), "{{partition(9)}}.ord.$1", "Use the token that holds the key, such as subject_token(2);"),
        (subject_token(0), "{{partition(9,2)}}.ord.$1", "Use the token that holds the key, such as subject_token(2);"),
        (subject_token(0), "{{partition(9)}}.>", "Use header(name), or another token;"),
        (subject_token(0), "{{partition(9,1)}}.{{split(1,-)}}", "Use header(name), or another token;"),
    ],
)
def test_the_number_of_a_partition_is_refused(key: KeyFunction, destination: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_no_partition_number(key, ["bill.$1", destination], "S")


@pytest.mark.parametrize(
    ("key", "destination"),
    [
        (subject_token(2), "ord.{{partition(64,1)}}.{{wildcard(1)}}"),
        # Key and partition number together are no coarser than the key.
        (subject_token(1, 2), "ord.{{partition(64,1)}}.$1"),
        # The key function refuses each of these messages.
        (subject_token(3), "ord.{{partition(64,1)}}.$1"),
        # The index of a token may be any after a function that makes several tokens, and counted from an open end.
        (subject_token(1), "{{split(1,-)}}.{{partition(64,1)}}.$1"),
        (subject_token(-2), "{{partition(64)}}.>"),
        (subject_token(0), "ord.{{partition(64,1)}}.$1"),
        (whole_subject, "{{partition(64,1)}}.$1"),
        (None, "{{partition(64,1)}}.$1"),
    ],
)
def test_a_key_beside_the_number_of_a_partition_is_accepted(key: KeyFunction | None, destination: str) -> None:
    check_no_partition_number(key, [destination], "S")


def test_only_the_transforms_that_a_filter_selects_count() -> None:
    a, b = "a.{{partition(4,1)}}.$1", "b.$1"
    sources = [{"name": "T", "subject_transforms": [{"src": "a.*", "dest": a}, {"src": "b.*", "dest": b}]}]
    intake = Intake.of({"name": "S", "subjects": ["c.*"], "sources": sources})
    assert (intake.made([">"]), intake.made(["b.*"]), intake.made(["c.*"])) == ([a, b], [b], [])


def test_a_filter_whose_subjects_all_have_one_key_is_refused() -> None:
    arguments: dict[str, Any] = {"stream": "S", "durable": "d", "filter_subject": "ord.*"}
    with pytest.raises(ConfigError, match=re.escape("is 'ord' for every subject of filter_subject='ord.*'")):
        JetStreamSource(SERVER, key=subject_token(0), **arguments)
    JetStreamSource(SERVER, key=subject_token(1), **arguments)
    # A shared consumer keeps no order, so its key delays no message.
    JetStreamSource(SERVER, key=subject_token(0), shared=True, **arguments)
