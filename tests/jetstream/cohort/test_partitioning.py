"""The partitioning of a stream is read from its configuration, and agrees with the server."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.aio.msg import Msg

import lanes
from lanes_jetstream import header, subject_token, whole_subject
from lanes_jetstream.cohort.partitioning import KeyWatch, Partitioning, partition_of, read_partitioning
from lanes_jetstream.cohort.settings import CohortStream
from lanes_jetstream.cohort.setup import ensure_stream
from lanes_jetstream.wire.connection import Connection
from tests.jetstream.cohort.conftest import Names
from tests.jetstream.workload import unique

KEYS = ["a", "42", "customer-42", "ä-ö", "x" * 200, "🙂", "0", "!"]


def transform(source: str, destination: str) -> dict[str, Any]:
    return {"subject_transform": {"src": source, "dest": destination}}


GOOD = {"subjects": ["o.*.*"], **transform("o.*.*", "{{partition(64,1)}}.o.{{wildcard(1)}}.{{wildcard(2)}}")}


def key_of_body(message: Msg) -> bytes:
    return message.data


def two_tokens() -> Partitioning:
    return read_partitioning("S", transform("o.*.*.>", "{{partition(64,1,2)}}.o.{{wildcard(1)}}.{{wildcard(2)}}.>"))


_CONFIG: dict[str, Any] = {
    "retention": "limits",
    "subjects": ["a.*.*"],
    "subject_transform": {"src": "a.*.*", "dest": "{{partition(4,1)}}.a.{{wildcard(1)}}.{{wildcard(2)}}"},
}


_TOKENS = st.text(st.characters(exclude_characters=". *>\t\r\n\x00", exclude_categories=["Cs"]), min_size=1)


@pytest.mark.anyio
async def test_partition_of_agrees_with_the_server(client: Client, names: Names) -> None:
    """The partition agrees for one token, for two tokens in the order of the call, and for the whole subject."""
    streams: dict[str, tuple[str, Callable[[str, str, str], list[str]]]] = {
        "one": ("{{partition(64,1)}}.%s.{{wildcard(1)}}.{{wildcard(2)}}", lambda a, b, prefix: [a]),
        "two": ("{{ Partition(7, 2,1) }}.%s.$1.$2", lambda a, b, prefix: [b, a]),
        "whole": (
            "{{partition(200)}}.%s.{{wildcard(1)}}.{{wildcard(2)}}",
            lambda a, b, prefix: [prefix, ".", a, ".", b],
        ),
    }
    for kind, (destination, hashed) in streams.items():
        prefix = unique(kind)
        stream = await names.create(subjects=[f"{prefix}.*.*"], **transform(f"{prefix}.*.*", destination % prefix))
        config = (await names.request(f"STREAM.INFO.{stream}", {}))["config"]
        found = read_partitioning(stream, config)
        for sequence, (a, b) in enumerate(itertools.product(KEYS, KEYS), start=1):
            await client.request(f"{prefix}.{a}.{b}", b"", timeout=5)
            partition = partition_of(hashed(a, b, prefix), found.partitions)
            assert await names.stored(stream, sequence) == f"{partition}.{prefix}.{a}.{b}"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("subject", "tokens", "publish"),
    [
        ("S.*", None, "S.{}"),
        ("S.*.paid.*", (1,), "S.{}.paid.1"),
        ("S.>", None, "S.{}.b.c"),
        ("S.*.>", (1,), "S.{}.x.y"),
    ],
)
@pytest.mark.parametrize("sourced", [False, True], ids=["created", "sourced"])
async def test_a_created_stream_is_divided(
    client: Client, names: Names, subject: str, tokens: tuple[int, ...] | None, publish: str, sourced: bool
) -> None:
    name = unique("S")
    subject, publish = subject.replace("S", name), publish.replace("S", name)
    origin = await names.create(subjects=[subject]) if sourced else None
    stream = names()
    create = CohortStream(subject=subject, tokens=tokens, origin=origin)
    await ensure_stream(Connection(client), stream, create, 16)
    partitioning, info = await ensure_stream(Connection(client), stream, create, 16)
    assert (partitioning.choice, partitioning.partitions) == ("sourced" if sourced else "created", 16)
    assert info["config"]["retention"] == "workqueue"
    for number in range(40):
        await client.publish(publish.format(f"k{number}"), b"")
    await client.flush()
    counts: list[int] = []
    for partition in range(16):
        filters = partitioning.filters(partition)
        durable = f"c{partition}"
        config = {"name": durable, "durable_name": durable, "ack_policy": "explicit", "filter_subjects": filters}
        await names.request(f"CONSUMER.CREATE.{stream}.{durable}", {"stream_name": stream, "config": config})
    while sum(counts) < 40:
        infos = [await names.request(f"CONSUMER.INFO.{stream}.c{partition}", {}) for partition in range(16)]
        counts = [info["num_pending"] for info in infos]
    assert sum(counts) == 40
    assert max(counts) < 40


@pytest.mark.anyio
async def test_a_stream_with_another_partitioning_is_refused(client: Client, names: Names) -> None:
    stream = names()
    name = unique("D")
    await ensure_stream(Connection(client), stream, CohortStream(subject=f"{name}.*.*", tokens=(1,)), 16)
    with pytest.raises(lanes.ConfigError, match=r"is divided by .*partition\(16,1\).*not by .*partition\(16,2\)"):
        await ensure_stream(Connection(client), stream, CohortStream(subject=f"{name}.*.*", tokens=(2,)), 16)
    with pytest.raises(lanes.ConfigError, match=rf"does not exist .*create=CohortStream.*did you mean '{stream}'"):
        await ensure_stream(Connection(client), f"{stream}x", None, 16)


@pytest.mark.anyio
async def test_an_existing_stream_is_not_changed(client: Client, names: Names) -> None:
    stream = await names.create(subjects=[f"U{os.getpid()}.*"])
    before = (await names.request(f"STREAM.INFO.{stream}", {}))["config"]
    with pytest.raises(lanes.ConfigError, match=r"no transform with partition\(\)"):
        await ensure_stream(Connection(client), stream, CohortStream(subject=f"U{os.getpid()}.*"), 16)
    assert (await names.request(f"STREAM.INFO.{stream}", {}))["config"] == before


def test_the_partitioning_is_read_from_the_transform_of_a_stream() -> None:
    found = read_partitioning("S", GOOD)
    assert (found.choice, found.partitions, found.filters(3)) == ("transform", 64, ["3.>"])
    assert found.rules[0].hashed == (2,)
    assert found.check_key(subject_token(2), refines=False) is False
    assert found.check_key(subject_token(-2), refines=False) is False
    assert found.check_key(whole_subject, refines=False) is False
    assert found.check_key(None, refines=False) is False


def test_the_number_of_the_partition_may_be_any_token_of_the_subject() -> None:
    found = read_partitioning("S", transform("o.*", "p.{{wildcard(1)}}.{{partition(4,1)}}"))
    assert found.filters(3) == ["p.*.3"]
    found = read_partitioning("S", transform("o.*.>", "p.$1.{{partition(4,1)}}.>"))
    assert found.filters(0) == ["p.*.0.>"]


def test_a_stream_with_several_sources_has_several_filters() -> None:
    sources = [
        {"name": "A", "subject_transforms": [{"src": "a.*", "dest": "a.{{partition(4,1)}}.{{wildcard(1)}}"}]},
        {"name": "B", "subject_transforms": [{"src": "b.*.*", "dest": "b.{{partition(4,2)}}.{{wildcard(1)}}.$2"}]},
    ]
    found = read_partitioning("S", {"sources": sources})
    assert (found.choice, found.filters(2)) == ("sourced", ["a.2.>", "b.2.>"])
    with pytest.raises(lanes.ConfigError, match="partition"):
        found.check_key(subject_token(2), refines=False)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"subjects": ["o.*"]}, ["no transform", "CohortStream"]),
        (
            {"subjects": ["o.*", "x"], **transform("o.*", "{{partition(4,1)}}.$1")},
            ["x", "no member would receive them"],
        ),
        ({"subjects": ["o.>"], **transform("o.*", "{{partition(4,1)}}.$1")}, ["o.>", "no member would receive them"]),
        ({"subjects": ["o.*"], **transform("o.*", "a.$1")}, ["no valid partition()"]),
        (transform("o.*", "{{partition(4,1)}}.{{partition(4,1)}}.$1"), ["2 valid partition()"]),
        (transform("o.*", "{{partition(0,1)}}.$1"), ["partition()"]),
        (transform("o.*.*", "{{partition(4,2)}}.o.$1"), ["wildcard(s) 2", "a key cannot include them"]),
        (transform("o.*.*", "{{partition(4,2)}}.{{split(1,-)}}.$2"), ["wildcard(s) 2"]),
        (transform("o.*", "{{left(1,2)}}.{{partition(4,1)}}.$1"), ["{{left(1,2)}} before", "{{wildcard(n)}}", "first"]),
        (transform("o.*", "o.{{split(1,-)}}.{{partition(4,1)}}.$1"), ["{{split(1,-)}} before"]),
        ({"sources": [{"name": "A"}]}, ["no valid partition()"]),
        ({"sources": [{"name": "A"}], **transform("o.*", "{{partition(4,1)}}.$1")}, ["sources and its own transform"]),
        (
            {
                "sources": [
                    {"name": "A", "subject_transforms": [{"src": "a.*", "dest": "{{partition(4,1)}}.a.$1"}]},
                    {"name": "B", "subject_transforms": [{"src": "b.*", "dest": "{{partition(5,1)}}.b.$1"}]},
                ]
            },
            ["4 and 5"],
        ),
    ],
)
def test_a_transform_without_a_partitioning_is_refused(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(lanes.ConfigError) as refused:
        read_partitioning("S", config)
    for word in ["'S'", *words]:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("found", "key", "words"),
    [
        (two_tokens(), subject_token(2), ["3", "add these tokens to the key"]),
        (two_tokens(), subject_token(1), ["2, 3", "use subject_token(2, 3)"]),
        (two_tokens(), subject_token(-2), ["count from the beginning"]),
        (two_tokens(), header("Key"), ["key=header('Key'): the server", "key_refines_partition=True"]),
        (two_tokens(), key_of_body, ["key_of_body", "key_refines_partition=True"]),
        (read_partitioning("S", transform(">", "{{partition(64)}}.>")), subject_token(1), ["whole_subject"]),
    ],
    ids=["token_missing", "another_token", "from_the_end", "header", "function", "whole"],
)
def test_a_key_that_may_be_in_two_partitions_is_refused(found: Partitioning, key: Any, words: list[str]) -> None:
    with pytest.raises(lanes.ConfigError) as refused:
        found.check_key(key, refines=False)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"subject_transform": None}, ["no transform", "divided by a.*.* -> {{partition(4,1)}}"]),
        ({"subjects": ["a.*.*", "b.*"]}, ["also stores b.*"]),
        ({"subject_transform": {"src": "a.*.*", "dest": "{{partition(8,1)}}.a.$1.$2"}}, ["{{partition(8,1)}}"]),
        ({"subject_transform": {"src": "a.*.*", "dest": "{{partition(4,2)}}.a.$1.$2"}}, ["{{partition(4,2)}}"]),
        ({"subject_transform": {"src": "a.*.*", "dest": "a.{{partition(4,1)}}.$1.$2"}}, ["a.{{partition(4,1)}}"]),
        ({"retention": "interest"}, ["from retention limits to interest"]),
    ],
    ids=["none", "subjects", "count", "tokens", "place", "retention"],
)
def test_a_changed_partitioning_is_detected(changed: dict[str, Any], words: list[str]) -> None:
    found = read_partitioning("S", _CONFIG)
    found.check_unchanged("S", "limits", _CONFIG | {"max_bytes": 5, "metadata": {"a": "b"}})
    with pytest.raises(lanes.ConfigError) as stopped:
        found.check_unchanged("S", "limits", _CONFIG | changed)
    for word in ("'S' was changed while the cohort used it", "back, and start again", *words):
        assert word in str(stopped.value)


def test_a_key_that_refines_the_partition_is_watched(caplog: pytest.LogCaptureFixture) -> None:
    assert two_tokens().check_key(header("Key"), refines=True) is True
    watch = KeyWatch(limit=2)
    for key, partition in ((b"a", 1), (b"b", 2), (b"a", 1)):
        watch.see(key, partition)
    with pytest.raises(lanes.SourceError, match=r"partitions 2 and 3.*key_refines_partition") as stopped:
        watch.see(b"b", 3)
    assert "b'b'" not in str(stopped.value)
    assert not stopped.value.retryable
    assert caplog.text == ""
    watch.see(b"c", 3)  # Above the limit the oldest key is forgotten.
    watch.see(b"a", 2)
    watch.see(b"d", 2)
    assert caplog.text.count("more than 2 keys arrived, so the check forgets the oldest") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"subject": "a"},
        {"subject": ""},
        {"subject": "a..*"},
        {"subject": "a.>.*"},
        {"subject": "a b.*"},
        {"subject": "a.*", "tokens": (0,)},
        {"subject": "a.*", "tokens": (2,)},
        {"subject": "a.*", "tokens": ()},
        {"subject": "a.*", "tokens": "1"},
        {"subject": "a.>", "tokens": (1,)},
        {"subject": "a.*", "replicas": 0},
    ],
)
def test_an_invalid_cohort_stream_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(lanes.ConfigError, match="CohortStream"):
        CohortStream(**arguments)


@given(st.lists(_TOKENS, min_size=1, max_size=4), st.integers(1, 256))
def test_the_partition_of_a_subject_is_below_the_number_of_partitions(tokens: list[str], partitions: int) -> None:
    assert 0 <= partition_of(tokens, partitions) < partitions


@given(st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=4), st.booleans(), st.integers(1, 256))
def test_the_partitioning_of_a_created_stream_is_read_back(parts: list[str], rest: bool, partitions: int) -> None:
    subject = ".".join(parts + [">"] * rest)
    if "*" not in parts and not rest:
        return
    create = CohortStream(subject=subject)
    found = read_partitioning("S", create.config("S", partitions))
    assert (found.choice, found.partitions, found.filters(0)) == ("created", partitions, ["0.>"])
    tokens = tuple(place for place, part in enumerate(parts) if part == "*")
    if tokens:
        found = read_partitioning("S", CohortStream(subject=subject, tokens=tokens).config("S", partitions))
        assert found.rules[0].hashed == tuple(place + 1 for place in tokens)
