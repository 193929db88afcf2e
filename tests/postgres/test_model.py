"""Two subscribers agree with a naive model: claims, commits and rollbacks in any order, under any epochs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.errors import SourceError
from lanes_postgres import Positions
from tests.components import PostgresServer
from tests.postgres.tables import Effects, message, partition

_numbers = itertools.count(1)


Kept = dict[tuple[int, bytes | int], tuple[int, int | None]]


class Claim(NamedTuple):
    key: bytes | None
    position: int
    partition: int
    epoch: int | None


class Step(NamedTuple):
    subscriber: int
    does: Literal["claim", "batch", "commit", "rollback"]
    claims: list[Claim]


CLAIMS = st.builds(
    Claim,
    st.sampled_from([b"k", b"", None]),
    st.integers(-2, 4),
    st.integers(0, 1),
    st.one_of(st.none(), st.integers(1, 3)),
)


STEPS = st.lists(
    st.builds(
        Step,
        st.integers(0, 1),
        st.sampled_from(["claim", "claim", "batch", "commit", "rollback"]),
        st.lists(CLAIMS, min_size=1, max_size=4),
    ),
    max_size=25,
)


@dataclass
class Model:
    """The committed positions of one subscriber, and its claims since."""

    kept: Kept = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    claimed: Kept = field(default_factory=dict)
    doing: list[int] = field(default_factory=list)

    def claim(self, claim: Claim) -> bool | None:
        """Whether a claim is fresh; None = refused."""
        place = (claim.partition, claim.position if claim.key is None else claim.key)
        position, epoch = self.claimed.get(place, (None, None))
        if position is not None and position >= claim.position:
            return False
        if epoch is not None and claim.epoch is not None and claim.epoch < epoch:
            return None
        self.claimed[place] = (claim.position, max(filter(None, (epoch, claim.epoch)), default=None))
        self.doing.append(claim.position)
        return True

    def commit(self) -> None:
        self.kept, self.done = dict(self.claimed), list(self.doing)

    def rollback(self) -> None:
        self.claimed, self.doing = dict(self.kept), list(self.done)


class Subscriber:
    """The same operations on the tables."""

    def __init__(self, connection: psycopg.Connection[Any], effects: Effects, name: str) -> None:
        self.name = name
        self._connection = connection
        self._effects = effects
        self._positions = Positions(name, schema=effects.schema)

    def claim(self, claim: Claim) -> bool | None:
        each = message(claim.position, claim.key, partition(claim.partition, epoch=claim.epoch))
        try:
            fresh = self._positions.claim(self._connection, each)
        except SourceError:
            return None
        if fresh:
            self._effects.add(self._connection, claim.position, self.name)
        return fresh

    def batch(self, claims: list[Claim]) -> list[Claim]:
        messages = [message(one.position, one.key, partition(one.partition)) for one in claims]
        fresh = self._positions.claim_all(self._connection, messages)
        for each in fresh:
            self._effects.add(self._connection, each.position, self.name)
        return [one for one, each in zip(claims, messages, strict=True) if each in fresh]

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        self._connection.rollback()


@pytest.fixture(scope="module")
def effects(postgres: PostgresServer) -> Effects:
    return Effects.make(postgres, f"model{os.getpid()}")


@pytest.fixture(scope="module")
def connections(postgres: PostgresServer) -> Iterator[list[psycopg.Connection[Any]]]:
    with psycopg.connect(postgres.url) as one, psycopg.connect(postgres.url) as other:
        yield [one, other]


@settings(max_examples=60)
@given(steps=STEPS)
def test_two_subscribers_agree_with_the_model(
    steps: list[Step], effects: Effects, connections: list[psycopg.Connection[Any]]
) -> None:
    number = next(_numbers)
    models = [Model(), Model()]
    subscribers = [
        Subscriber(connection, effects, f"{name}{number}") for name, connection in zip("ab", connections, strict=True)
    ]
    try:
        for step in steps:
            model, subscriber = models[step.subscriber], subscribers[step.subscriber]
            if step.does == "claim":
                assert subscriber.claim(step.claims[0]) == model.claim(step.claims[0])
            elif step.does == "batch":
                # A batch is claimed in the order of its positions, not in its given order.
                claims = sorted(
                    {one._replace(epoch=None) for one in step.claims}, key=lambda one: (one.position, repr(one))
                )
                assert subscriber.batch(claims) == [one for one in claims if model.claim(one)]
            elif step.does == "commit":
                subscriber.commit()
                model.commit()
            else:
                subscriber.rollback()
                model.rollback()
    finally:
        for subscriber in subscribers:
            subscriber.rollback()
    for model, subscriber in zip(models, subscribers, strict=True):
        assert effects.all(subscriber.name) == model.done
