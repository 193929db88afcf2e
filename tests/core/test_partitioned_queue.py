"""A partitioned queue names its physical queues, routes messages by key or in turn, and refuses wrong arguments."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes import ConfigError, PartitionedQueue, Route
from lanes.core.queue_hash import queue_partition
from lanes.core.types import PartitionKey, key_bytes
from tests.core.test_ring import KEYS

LIST = 'must be a list of names, such as physical_names=["orders-a", "orders-b"]'
LINE = "contains U+%s, but a name is one line of text; remove this character"
NAMES = ("customer-updates", "customer-updates__p1", "customer-updates__p2", "customer-updates__p3")


def test_physical_queues_have_the_names_of_the_specification() -> None:
    assert PartitionedQueue("customer-updates", partitions=4).names == NAMES
    assert PartitionedQueue("customer-updates", 2).names == NAMES[:2]


def test_a_queue_of_one_partition_has_the_plain_name() -> None:
    queue = PartitionedQueue("customer-updates")
    assert queue == PartitionedQueue("customer-updates", partitions=1)
    assert (queue.partitions, queue.names) == (1, ("customer-updates",))
    assert queue.route_by_key("customer-42") == Route("customer-updates", 0, b"customer-42")


def test_a_queue_may_have_physical_names_of_its_own() -> None:
    queue = PartitionedQueue.of("orders", physical_names=["eu", "us"])
    assert (queue.name, queue.partitions, queue.names) == ("orders", 2, ("eu", "us"))
    assert {queue.route_by_index(number).name for number in range(4)} == {"eu", "us"}
    assert PartitionedQueue.of("orders", ["orders", "orders__p1"]) == PartitionedQueue("orders", 2)
    assert queue != PartitionedQueue("orders", 2)


def test_a_key_gives_the_physical_name_and_the_ordering_key() -> None:
    queue = PartitionedQueue("customer-updates", 4)
    assert queue.route_by_key("customer-42") == Route(name="customer-updates", partition=0, key=b"customer-42")
    assert queue.route_by_key(42) == Route("customer-updates__p1", 1, (42).to_bytes(16, "little"))


@given(key=KEYS, partitions=st.integers(1, 64))
def test_a_route_by_key_depends_on_the_bytes_of_the_key_alone(key: PartitionKey, partitions: int) -> None:
    queue = PartitionedQueue("q", partitions)
    route = queue.route_by_key(key)
    assert route == queue.route_by_key(key_bytes(key)) == PartitionedQueue("q", partitions).route_by_key(key)
    assert route == Route(queue.names[route.partition], queue_partition(key, partitions), key_bytes(key))
    named = PartitionedQueue.of("other", [f"name-{number}" for number in range(partitions)])
    assert named.route_by_key(key).partition == route.partition


def test_routes_by_index_take_turns_and_have_no_key() -> None:
    queue = PartitionedQueue("customer-updates", 4)
    routes = [queue.route_by_index(number) for number in range(400)]
    assert Counter(route.name for route in routes) == dict.fromkeys(NAMES, 100)
    assert [route.partition for route in routes[:5]] == [0, 1, 2, 3, 0]
    assert {route.key for route in routes} == {None}
    assert queue.route_by_index(10**30).partition == 0


def test_a_queue_is_an_immutable_value() -> None:
    for queue in (PartitionedQueue("q", 3), PartitionedQueue.of("q", ["a", "b"])):
        assert copy.deepcopy(queue) == pickle.loads(pickle.dumps(queue)) == queue
        assert len({queue, copy.copy(queue)}) == 1
        with pytest.raises(FrozenInstanceError):
            queue.partitions = 9  # type: ignore[misc]


def test_the_repr_of_a_queue_is_the_call_that_makes_it_unless_it_is_too_long() -> None:
    for queue in (PartitionedQueue("q"), PartitionedQueue("q", 32_767), PartitionedQueue.of("q", ["a", "b"])):
        assert eval(repr(queue)) == queue
    many = repr(PartitionedQueue.of("q", [f"n{number}" for number in range(9)]))
    assert many.endswith(" 'n7', …])")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("",), "name='': must be a str that is not empty"),
        ((b"q",), "name=a bytes: must be a str that is not empty"),
        (("a\nb",), f"name='a\\nb': {LINE % '000A'}"),
        (("\ud800",), f"name='\\ud800': {LINE % 'D800'}"),
        (("q", 0), "partitions=0: must be a whole number, 1 or more"),
        (("q", -3), "partitions=-3: must be a whole number, 1 or more"),
        (("q", True), "partitions=True: must be a whole number, 1 or more, not a bool"),
        (("q", "4"), "partitions='4': must be a whole number, 1 or more, not a str; pass an int"),
        (("q", 32_768), "partitions=32768: queue 'q' can have at most 32767 partitions; try 2 before 4"),
    ],
)
def test_a_queue_with_an_invalid_name_or_width_is_refused(arguments: Any, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        PartitionedQueue(*arguments)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("logical", "names", "text"),
    [
        ("", ["a"], "logical='': must be a str that is not empty"),
        ("q", [], "physical_names=[]: queue 'q' needs a physical queue; name at least one"),
        ("q", ["a", ""], "physical_names[1]='': must be a str that is not empty"),
        ("q", ["a", None], "physical_names[1]=None: must be a str that is not empty"),
        ("a\u2028", ["a"], f"logical='a\\u2028': {LINE % '2028'}"),
        ("q", ["a", "b\x00"], f"physical_names[1]='b\\x00': {LINE % '0000'}"),
        (
            "q",
            ["a", "b", "a"],
            "physical_names[2]='a': is also physical_names[0]; give each partition a name of its own",
        ),
        ("q", "ab", f"physical_names='ab': {LIST}"),
        ("q", 4, f"physical_names=4: {LIST}"),
    ],
)
def test_wrong_physical_names_are_refused(logical: Any, names: Any, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        PartitionedQueue.of(logical, physical_names=names)
    assert str(error.value) == text


def test_too_many_physical_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^partitions=32768: queue 'q' can have at most 32767 partitions"):
        PartitionedQueue.of("q", (str(number) for number in range(32_768)))


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^PartitionedQueue has no option width=: the options are name, partitions$"):
        PartitionedQueue("q", width=4)  # type: ignore[call-arg]


@pytest.mark.parametrize("key", [None, True, 1.5, bytearray(b"k"), ("k",)])
def test_a_key_of_another_type_is_refused(key: Any) -> None:
    text = r"^route_by_key: the key is .*, and must be bytes, str or int; use route_by_index\(i\)"
    with pytest.raises(TypeError, match=text):
        PartitionedQueue("q", 4).route_by_key(key)


@pytest.mark.parametrize("key", [-1, 2**128, "\ud800"])
def test_a_key_out_of_its_range_is_refused(key: Any) -> None:
    with pytest.raises(ValueError, match=r"must be in 0 … 2\*\*128-1|surrogates not allowed"):
        PartitionedQueue("q", 4).route_by_key(key)


@pytest.mark.parametrize("index", [None, True, "1", 1.0])
def test_an_index_of_another_type_is_refused(index: Any) -> None:
    with pytest.raises(TypeError, match=r"^route_by_index: the index is .*, and must be an int, 0 or more$"):
        PartitionedQueue("q", 4).route_by_index(index)


def test_a_negative_index_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^route_by_index: the index -1 is negative; count the messages from 0$"):
        PartitionedQueue("q", 4).route_by_index(-1)
