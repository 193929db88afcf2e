"""What may happen to a world: its traffic, its faults, and the settings of its consumers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from lanes.config import Poison

PARTITIONS = 2
KEYS = (b"hot", b"a", b"b", None)
REVOKE_TIMEOUT = 30.0
MAX_AHEAD = 8

Event = tuple[Any, ...]

NUMBERS = st.integers(0, PARTITIONS - 1)
MEMBERS = st.integers(0, 2)
SECONDS = st.sampled_from([0.1, 0.5, 1.0, 2.0, 7.0, 40.0])

SLOW, FAILS_ONCE, TERMINAL, FAILS, VERY_SLOW, STUBBORN = 4, 5, 6, 7, 8, 9
TROUBLE = frozenset({FAILS_ONCE, TERMINAL, FAILS, VERY_SLOW, STUBBORN})
"""What a message may be (its value): below ``SLOW`` it is handled at once or nearly so."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. ``commits``: members of a group that commit, else one after the other of a broker with individual acks.

    ``clean``: nothing happens that a consumer may answer with a repetition.
    """

    commits: bool
    clean: bool
    hands_over: bool
    cooperative: bool
    concurrency: int
    spare: int
    poison: Poison
    batch: int | None
    traffic: list[tuple[bytes | None, int]]
    events: list[Event]


def _happenings(*, commits: bool, clean: bool) -> st.SearchStrategy[Event]:
    """One event. Weighted by repetition."""
    sleep = st.tuples(st.just("sleep"), SECONDS)
    turns = st.tuples(st.just("turns"), st.integers(1, 30))
    publish = st.tuples(st.just("publish"), st.integers(1, 20))
    usual: list[st.SearchStrategy[Any]] = [sleep, sleep, turns, turns, publish, publish]
    usual += [
        st.tuples(st.just("revoke"), NUMBERS),
        st.tuples(st.just("stop"), MEMBERS),
        st.tuples(st.sampled_from(["pause", "resume"]), MEMBERS),
        st.tuples(st.sampled_from(["park", "unblock"]), st.sampled_from(KEYS)),
        st.tuples(st.just("letters fail"), st.integers(1, 3)),
        st.tuples(st.sampled_from(["letters hang", "letters go"])),
    ]
    if commits:
        usual += [
            st.tuples(st.just("join")),
            st.tuples(st.just("rebalance")),
            st.tuples(st.just("skip"), NUMBERS, st.integers(1, 3)),
        ]
    else:
        usual += [st.tuples(st.just("assign"), NUMBERS)] * 2
    if not clean:
        usual += [
            st.tuples(st.just("lose"), NUMBERS),
            st.tuples(st.just("crash"), MEMBERS),
            st.tuples(st.just("settling fails"), MEMBERS, st.integers(1, 3), st.booleans()),
            st.tuples(st.sampled_from(["settling hangs", "settling goes"]), MEMBERS),
        ]
        if not commits:
            usual += [st.tuples(st.just("redeliver"), NUMBERS, st.integers(0, 5))] * 2
            usual += [st.tuples(st.just("lose and assign"), NUMBERS)] * 2
    return st.one_of(usual)


@st.composite
def plans(draw: st.DrawFn, *, commits: bool) -> Plan:
    """A plan of one of the two kinds."""
    clean = draw(st.booleans())
    return Plan(
        commits=commits,
        clean=clean,
        hands_over=draw(st.booleans()),
        cooperative=draw(st.booleans()),
        concurrency=draw(st.integers(1, 5)),
        spare=draw(st.integers(0, 8)),
        poison=draw(st.sampled_from(["skip", "skip", "block", "block_and_dlq"])),
        batch=draw(st.sampled_from([None, None, 3])),
        traffic=draw(
            st.lists(
                st.tuples(st.sampled_from([b"hot", b"hot", *KEYS]), st.sampled_from([0, 0, 1, 2, 3, *range(10)])),
                min_size=10,
                max_size=60,
            )
        ),
        events=draw(st.lists(_happenings(commits=commits, clean=clean), min_size=10, max_size=50)),
    )
