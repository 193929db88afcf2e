"""Each planted bug of the engine is found by its invariant, with a path that leads to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lanes.core.chains import Chains
from lanes.core.commits import Committer, PartitionCommits
from lanes.core.drain import PartitionDrain
from lanes.core.engine import Engine
from lanes.core.lane import QUEUED
from lanes.core.ledgers import AckLedger, OffsetLedger
from lanes.core.ownership import Ownership
from lanes.core.types import Message, Partition
from memsource.explorer import AckWorld, Scope, search
from tests.memsource.explorer.scopes import ACKS, DAILY, keys, violation


def floor_of_the_highest(ledger: OffsetLedger) -> int:
    return ledger.highest + 1 if not ledger._open or 0 in ledger._open else ledger._floor


def completed_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    real = OffsetLedger.completed
    monkeypatch.setattr(OffsetLedger, "completed", lambda ledger: [(start, end + 9) for start, end in real(ledger)])


def zombies_count(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine._finish_slow

    def finish(engine: Engine, message: Message, *rest: Any) -> None:
        position = message.position
        real(engine, message, *rest)
        heir = engine.partitions.get(message.partition.id)
        if heir is not None and not message.partition.live:
            engine.committer.partitions[heir].progressed(position + 1)

    monkeypatch.setattr(Engine, "_finish_slow", finish)


def commits_after_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Committer, "forget", lambda committer, partition: None)


def commits_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartitionCommits, "pending", property(lambda commits: commits.changes > 0))


def commits_count_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartitionCommits, "unknown", lambda commits, again_at: commits.confirm(commits.sending))


def commits_highest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffsetLedger, "floor", floor_of_the_highest)


def drain_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop_starting(engine: Engine, partition: Partition, kept: set[Message]) -> list[Message]:
        partition.draining = True
        partition.steady = False
        partition.unended = sum(1 for _ in partition.ledger.in_flight())
        return []

    monkeypatch.setattr(Ownership, "_stop_starting", stop_starting)


def drained_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ownership._drained_if_ended

    def drained(engine: Engine, partition: Partition) -> None:
        partition.unended = 0
        real(engine, partition)

    monkeypatch.setattr(Ownership, "_drained_if_ended", drained)


def last_come_first_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stack(deque[Message]):
        def popleft(self) -> Message:
            return self.pop()

    real = Chains.__init__

    def init(chains: Chains, policy: Any) -> None:
        real(chains, policy)
        chains.ready = Stack()

    monkeypatch.setattr(Chains, "__init__", init)


def successor_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Chains.free

    def free(chains: Chains, message: Message) -> None:
        ready = list(chains.ready)
        real(chains, message)
        chains.ready.clear()
        chains.ready.extend(ready)

    monkeypatch.setattr(Chains, "free", free)


def no_max_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Committer, "_space", lambda committer, ledger, commits: 99)


def drain_stops_every_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Chains.abandon

    def abandon(chains: Chains, *args: Any) -> None:
        real(chains, *args)
        chains.ready.clear()

    monkeypatch.setattr(Chains, "abandon", abandon)


def set_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffsetLedger, "completed", lambda ledger: [])


def prefix_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chains, "prefix", lambda chains, partition: set())


def closing_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ownership, "stop_closing", lambda engine, partition: [])


def commits_after_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = property(lambda commits: commits.changes > 0 and commits.sending is None)
    monkeypatch.setattr(PartitionCommits, "pending", pending)


def drained_unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartitionDrain, "left", property(lambda drain: False))


def every_message_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Chains.admit

    def admit(chains: Chains, partition: Partition, run: list[Message]) -> None:
        real(chains, partition, run)
        chains.ready.extend(m for m in run if m not in chains.ready)

    monkeypatch.setattr(Chains, "admit", admit)


def zombie_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ownership.lose

    def lose(engine: Engine, partition: Partition) -> list[Message]:
        zombies = real(engine, partition)
        engine.chains.tails.pop(partition.id, None)
        return zombies

    monkeypatch.setattr(Ownership, "lose", lose)


def seeds_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffsetLedger, "_seed", lambda ledger, run: [])


def in_flight_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ownership, "_released", lambda engine, count, size: None)


def token_not_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine._redelivered

    def redelivered(engine: Engine, ledger: AckLedger, message: Message, now: float) -> bool:
        known = ledger.unsettled.get(message.position)
        if known is not None:
            message.token = known.token
        return real(engine, ledger, message, now)

    monkeypatch.setattr(Engine, "_redelivered", redelivered)


def held_runs_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine._redelivered

    def redelivered(engine: Engine, ledger: AckLedger, message: Message, now: float) -> bool:
        held = ledger.unsettled.get(message.position)
        if held is not None and held.state == QUEUED:
            engine._ready.append(held)
        return real(engine, ledger, message, now)

    monkeypatch.setattr(Engine, "_redelivered", redelivered)


def settled_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AckLedger, "is_settled", lambda ledger, position: False)


def acknowledged_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine.take

    def take(engine: Engine) -> Message | None:
        message = real(engine)
        if message is not None:
            engine.outbox.finished(message)
        return message

    monkeypatch.setattr(Engine, "take", take)


AAB = Scope(messages=keys("AAB"))
PREFIX = replace(AAB, hands_over=False, close_prefix=True)
BOUNDS = DAILY["max_ahead, two failures"]

PLANTED: list[tuple[Callable[[pytest.MonkeyPatch], None], Scope, str]] = [
    (commits_highest, AAB, "commit_only_what_is_done"),
    (completed_too_far, replace(AAB, messages=keys("ABA")), "commit_only_what_is_done"),
    (zombies_count, replace(AAB, faults=1), "zombie_changes_nothing"),
    (commits_after_the_release, AAB, "given_up_is_forgotten"),
    (commits_cross, AAB, "one_commit_under_way"),
    (commits_count_without_an_answer, replace(AAB, unknown=1), "stop_keeps_what_is_done"),
    (drain_goes_on, AAB, "drain_starts_nothing_above"),
    (drained_at_once, AAB, "drained_when_nothing_runs"),
    (last_come_first_taken, AAB, "first_come_first_taken"),
    (successor_forgotten, replace(AAB, failures=1), "only_its_lane_waits"),
    (no_max_ahead, BOUNDS, "ahead_bounded"),
    (drain_stops_every_partition, DAILY["two partitions, cooperative, a fault"], "other_partitions_untouched"),
    (set_not_handed_over, AAB, "stop_keeps_what_is_done"),
    (prefix_left_open, PREFIX, "prefix_closed"),
    (closing_goes_on, replace(PREFIX, faults=1), "drain_starts_nothing_above"),
    (commits_after_the_drain, replace(AAB, faults=1), "commit_names_what_is_assigned"),
    (drained_unsettled, AAB, "stop_keeps_what_is_done"),
    (every_message_a_head, AAB, "former_ended_first"),
    (zombie_forgotten, replace(AAB, faults=1), "one_handler_a_key"),
    (seeds_run_again, AAB, "replay_from_the_committed"),
    (in_flight_for_ever, AAB, "in_flight_bounded"),
]


@pytest.mark.parametrize(("plant", "scope", "invariant"), PLANTED, ids=[plant.__name__ for plant, _, _ in PLANTED])
def test_a_planted_bug_is_found_by_its_invariant(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], scope: Scope, invariant: str
) -> None:
    plant(monkeypatch)
    found = violation(scope)
    assert found is not None
    assert found.invariant == invariant, str(found)


PLANTED_ACKS = [
    (token_not_swapped, "redelivery_joins_the_held"),
    (held_runs_twice, "redelivery_joins_the_held"),
    (settled_forgotten, "settled_runs_no_more"),
    (acknowledged_too_early, "ack_only_what_is_done"),
]


@pytest.mark.parametrize(("plant", "invariant"), PLANTED_ACKS, ids=[plant.__name__ for plant, _ in PLANTED_ACKS])
def test_a_planted_bug_of_acknowledgements_is_found_by_its_invariant(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], invariant: str
) -> None:
    plant(monkeypatch)
    scope, redeliveries = ACKS["a redelivery, an acknowledgement is lost"]
    found = search(AckWorld(scope, redeliveries)).violation
    assert found is not None
    assert found.invariant == invariant, str(found)
