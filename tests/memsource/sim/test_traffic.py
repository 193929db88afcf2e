"""Traffic is the same for a seed, has the requested shares, and keeps each key in one partition."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.core.types import PartitionKey
from memsource.memory.topic import Topic
from memsource.sim.errors import ImpossiblePlan
from memsource.sim.plans.strategies import traffics
from memsource.sim.plans.traffic import Item, Traffic

SEEDS = st.integers(0, 2**64 - 1)
PARTITIONS = st.integers(1, 5)


def drawn(seed: int, n: int, keys: Any, *, partitions: int = 1, **shares: float) -> list[Item]:
    return Traffic(n=n, keys=keys, **shares).items(seed, partitions)


def counted(items: list[Item]) -> Counter[PartitionKey | None]:
    return Counter(item.key for item in items)


@given(traffics(), SEEDS, PARTITIONS)
def test_a_seed_always_gives_the_same_traffic(wanted: Traffic, seed: int, partitions: int) -> None:
    items = wanted.items(seed, partitions)
    assert items == wanted.items(seed, partitions)
    assert [item.index for item in items] == list(range(wanted.n))
    assert all(0 <= item.partition < partitions and item.gap >= 0 for item in items)
    assert isinstance(wanted.keys, int)
    assert len(counted(items).keys() - {None}) <= wanted.keys


def test_another_seed_gives_other_traffic() -> None:
    assert len({tuple(drawn(seed, 20, 5)) for seed in range(200)}) == 200


@given(traffics(), SEEDS, PARTITIONS, st.integers(0, 50))
def test_fewer_messages_are_the_beginning_of_more(wanted: Traffic, seed: int, partitions: int, fewer: int) -> None:
    less = Traffic(
        n=min(fewer, wanted.n),
        keys=wanted.keys,
        skew=wanted.skew,
        hot=wanted.hot,
        keyless=wanted.keyless,
        gaps=wanted.gaps,
    )
    assert less.items(seed, partitions) == wanted.items(seed, partitions)[: less.n]


@given(st.lists(st.binary(max_size=3) | st.text(max_size=2) | st.integers(0, 99), unique=True, min_size=1), PARTITIONS)
def test_a_key_goes_to_the_partition_that_a_topic_chooses(keys: list[PartitionKey], partitions: int) -> None:
    topic = Topic(partitions, "orders")
    try:
        items = drawn(7, 50, keys, partitions=partitions)
    except ImpossiblePlan:
        # Two of the keys have the same bytes.
        assert len({key.encode() if isinstance(key, str) else key for key in keys}) < len(keys)
        return
    assert {item.key for item in items} <= set(keys)
    assert all(topic.publish(key=item.key).partition == item.partition for item in items)


def test_the_first_keys_have_the_most_messages() -> None:
    found = counted(drawn(1, 20_000, 4))
    shares = [found[f"key-{number}".encode()] / 20_000 for number in range(4)]
    # 1, 1/2, 1/3 and 1/4 of 25/12.
    assert shares == pytest.approx([0.48, 0.24, 0.16, 0.12], abs=0.02)


def test_without_a_skew_all_keys_have_equal_shares() -> None:
    found = counted(drawn(1, 20_000, 4, skew=0.0))
    assert [count / 20_000 for count in found.values()] == pytest.approx([0.25] * 4, abs=0.02)


def test_a_hot_key_and_keyless_messages_have_their_shares() -> None:
    items = drawn(1, 20_000, 10, hot=0.6, keyless=0.25, partitions=3)
    found = counted(items)
    assert found[None] / 20_000 == pytest.approx(0.25, abs=0.02)
    assert found[b"key-0"] / 20_000 == pytest.approx(0.6 * 0.75, abs=0.02)
    assert len(found) == 11
    assert {item.partition for item in items if item.key is None} == {0, 1, 2}


def test_every_message_may_have_the_hot_key() -> None:
    assert counted(drawn(1, 500, 10, hot=1.0)) == {b"key-0": 500}


def test_the_share_of_messages_after_a_gap_is_kept() -> None:
    items = drawn(1, 20_000, 10, gaps=0.3)
    assert sum(item.gap > 0 for item in items) / 20_000 == pytest.approx(0.3, abs=0.02)
    assert not any(item.gap for item in drawn(1, 1_000, 10))


def test_a_traffic_of_zero_messages_is_empty() -> None:
    assert drawn(1, 0, 10) == []


def any_value(value: object) -> Any:
    """A value of a type that mypy refuses."""
    return value


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"n": "9"}, "n='9': must be a whole number of messages, 0 or more, not a str"),
        ({"n": -1}, "n=-1: must be a whole number of messages, 0 or more"),
        ({"n": 1.5}, "n=1.5"),
        ({"keys": 0}, "keys=0: must be 1 or more; for messages without a key set keyless=1.0"),
        ({"keys": True}, "keys=True"),
        ({"keys": "orders"}, "keys='orders': must be a count or a sequence of keys; write ['orders'] for one key"),
        ({"keys": b"a"}, "must be a count or a sequence of keys"),
        ({"keys": []}, "keys=[]: must name one key or more, and each key once"),
        ({"keys": ["a", b"a"]}, "each key once"),
        ({"hot": 1.1}, "hot=1.1: must be a share of the messages, 0 … 1"),
        ({"keyless": -0.1}, "keyless=-0.1"),
        ({"gaps": float("nan")}, "gaps=nan"),
        ({"skew": -1.0}, "skew=-1.0"),
        ({"skew": 1e9}, "skew=1000000000.0: must be in 0"),
    ],
)
def test_impossible_traffic_is_refused_by_name(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ImpossiblePlan) as caught:
        Traffic(**any_value(wrong))
    assert said in str(caught.value)


def test_traffic_without_partitions_is_refused() -> None:
    with pytest.raises(ImpossiblePlan, match="partitions=0: must be 1 or more"):
        drawn(1, 10, 10, partitions=0)
