"""The invariants of every order of events. Each invariant is a function that raises ``Broken``.

The number of an invariant is its number in the table of ``docs/design/explorer.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Never, TypeAlias

from lanes.core.engine import Engine
from lanes.core.lane import QUEUED, RUNNING, SETTLED
from lanes.core.snapshot import AssignmentState, EngineState, MessageId
from lanes.core.types import Message
from memsource.explorer.search import Broken

Commit: TypeAlias = tuple[int, tuple[tuple[int, int], ...]]
"""A floor, and the runs of finished messages above the floor."""


def covered(commit: Commit, positions: Iterable[int]) -> set[int]:
    """Return the positions that a commit declares finished."""
    floor, completed = commit
    return {p for p in positions if p < floor or any(start <= p < end for start, end in completed)}


def broken(invariant: Callable[..., None], text: str) -> Never:
    raise Broken(invariant.__name__, text)


# --- order and exclusion


def one_handler_a_key(running: Collection[tuple[object, ...]]) -> None:
    """1: at most one handler of a key runs at any time.

    Two entries of ``running`` are equal if they have the same key.
    """
    if len(set(running)) < len(running):
        broken(one_handler_a_key, f"two handlers of one key run at once: {sorted(map(str, running))}")


def starts_in_order(message: Message, last: int | None) -> None:
    """2: within an assignment the handlers of a key start in rising order. Only a retry starts a message again."""
    position = message.position
    if last is not None and (position < last or (position == last and message.attempt == 1)):
        broken(starts_in_order, f"position {position} starts after {last} of the same key")


def former_ended_first(position: int, unfinished: Collection[int]) -> None:
    """3: a message starts only if no earlier message of its key is in ``unfinished``."""
    if unfinished:
        broken(former_ended_first, f"position {position} starts while {sorted(unfinished)} of its key are unfinished")


# --- commits


def commit_only_what_is_done(commit: Commit, unfinished: Collection[int]) -> None:
    """8: for each position that a commit declares finished, a handler has succeeded or a dead letter is confirmed."""
    if wrong := covered(commit, unfinished):
        broken(commit_only_what_is_done, f"commit {commit} declares the unfinished positions {sorted(wrong)} finished")


def commits_rise(commit: Commit, before: Commit | None, positions: Sequence[int]) -> None:
    """9: within an assignment no commit declares fewer positions finished than the previous commit."""
    if before is not None and (commit[0] < before[0] or covered(before, positions) - covered(commit, positions)):
        broken(commits_rise, f"commit {commit} is sent after {before}")


def committed_never_falls(commit: Commit, before: Commit, positions: Sequence[int]) -> None:
    """9, at the broker: unless the broker takes a partition from its owner, the committed set never shrinks."""
    if commit[0] < before[0] or covered(before, positions) - covered(commit, positions):
        broken(committed_never_falls, f"{commit} is committed after {before}")


def one_commit_under_way(commit: Commit, under_way: Commit | None) -> None:
    """10: a partition has at most one unanswered commit, because two commits could arrive in the wrong order."""
    if under_way is not None:
        broken(one_commit_under_way, f"commit {commit} is sent while {under_way} is under way")


def commit_names_what_is_assigned(commit: Commit, *, owned: bool) -> None:
    """11, 12: a commit belongs to the current assignment. No commit follows the drain or loss of its assignment."""
    if not owned:
        broken(commit_names_what_is_assigned, f"commit {commit} of an assignment that was released or lost")


def given_up_is_forgotten(engine: Engine) -> None:
    """12: the engine's collections for commits, settlements and starts have no released or lost partition."""
    kept = {*engine.committer.partitions, *engine.committer.ahead, *engine.dirty}
    kept |= {message.partition for message in [*engine.stopped.by_head, *engine.chains.ready]}
    if strays := kept - set(engine.partitions.values()):
        broken(given_up_is_forgotten, f"{sorted(map(repr, strays))} were given up and are not forgotten")


# --- bounds and flow


def in_flight_bounded(state: EngineState) -> None:
    """25: the count of messages in flight is correct, and at most ``max_in_flight``."""
    counted, bound = state.flow.in_flight, state.policy.max_in_flight
    held = [m for a in state.assignments for m in a.in_flight + a.fenced + a.waiting if m.state != SETTLED]
    if len(held) != counted or counted > bound:
        broken(in_flight_bounded, f"{len(held)} in flight, {counted} counted, bound {bound}")


def ahead_bounded(started: int, confirmed: int, positions: Sequence[int], bound: int) -> None:
    """27: from the confirmed floor to a starting message, both included, there are at most ``max_ahead`` messages."""
    ahead = sum(confirmed <= position <= started for position in positions)
    if ahead > bound:
        broken(ahead_bounded, f"position {started} starts {ahead} ahead of the confirmed {confirmed}; bound {bound}")


def only_its_lane_waits(state: EngineState) -> None:
    """29: a lane waits only for its own head. Other messages wait only for ``max_ahead``, as the engine reports."""
    running_elsewhere = {(a.id, m.lane) for a in state.assignments for m in a.fenced}
    for each in state.assignments:
        if each.draining or not each.live:
            continue
        if each.waiting and not each.ahead:
            broken(only_its_lane_waits, f"{len(each.waiting)} messages wait, and max_ahead is not reached")
        lanes = set()
        for message in each.in_flight:
            head = message.lane not in lanes
            lanes.add(message.lane)
            name = MessageId(each.assignment, message.position)
            fenced = (each.id, message.lane) in running_elsewhere
            if head and message.state == QUEUED and not fenced and name not in state.ready:
                broken(only_its_lane_waits, f"position {message.position} is the first of its lane and is not ready")


def first_come_first_taken(taken: MessageId, ready: Sequence[MessageId]) -> None:
    """30: the engine takes the head that has been ready for the longest time, so no lane starves."""
    if taken != ready[0]:
        broken(first_come_first_taken, f"position {taken.position} is taken before {ready[0].position}")


def keeps_its_turn(before: Sequence[MessageId], after: Sequence[MessageId], gone: Collection[MessageId]) -> None:
    """30: a ready head keeps its place in the queue, and a new head joins the end of the queue."""
    stayed = [one for one in before if one not in gone]
    if list(after[: len(stayed)]) != stayed:
        broken(keeps_its_turn, f"the queue was {list(before)} and is {list(after)}")


# --- reassignment


def drained_when_nothing_runs(running: Collection[int]) -> None:
    """36: a drained partition has no running handler."""
    if running:
        broken(drained_when_nothing_runs, f"drained while {sorted(running)} run")


def prefix_closed(done: Collection[int], positions: Sequence[int]) -> None:
    """36: without a handover of the completed set, a drain leaves no unfinished message below a finished message."""
    holes = [p for p in positions if p < max(done, default=-1) and p not in done]
    if holes:
        broken(prefix_closed, f"drained with {sorted(done)} finished and {holes} not")


def drain_starts_nothing_above(position: int, highest: int, *, draining: bool, closing: bool) -> None:
    """37: a drain starts no message, except queued messages below the highest started message to close the prefix.

    ``closing`` says whether the drain closes the prefix and its deadline has not passed.
    """
    if draining and (not closing or position > highest):
        broken(drain_starts_nothing_above, f"position {position} starts during a drain; highest started: {highest}")


def other_partitions_untouched(before: EngineState, after: EngineState, given_up: Collection[int]) -> None:
    """41: the end of an assignment changes no other partition. ``given_up`` has the numbers of the ended partitions."""
    for old, new in zip(_others(before, given_up), _others(after, given_up), strict=True):
        if old != new:
            broken(other_partitions_untouched, f"giving up {sorted(given_up)} changed {new} from {old}")


def _others(state: EngineState, given_up: Collection[int]) -> list[object]:
    kept = [a for a in state.assignments if a.id.number not in given_up and a.owned]
    numbers = {a.assignment for a in kept}
    return [kept, [one for one in state.ready if one.assignment in numbers]]


def one_owner(owners: Mapping[int, Collection[str]]) -> None:
    """43: at most one member works on a partition, because the explorer tells a member of a loss at once."""
    for number, names in owners.items():
        if len(names) > 1:
            broken(one_owner, f"partition {number} is worked on by {', '.join(sorted(names))}")


def clean_rebalance_repeats_nothing(position: int, *, done: bool) -> None:
    """44: without a fault or an excused drain, no finished message runs again."""
    if done:
        broken(clean_rebalance_repeats_nothing, f"position {position} had finished, and runs again without a fault")


def replay_from_the_committed(message: Message) -> None:
    """56: an assignment runs no message committed before the assignment."""
    partition = message.partition
    if covered((partition.floor or 0, tuple(partition.completed)), [message.position]):
        broken(replay_from_the_committed, f"position {message.position} runs again although it was committed")


# --- outcomes and lifetime


def zombie_changes_nothing(before: EngineState, after: EngineState) -> None:
    """40, 53: a handler that ends after the fence of its assignment changes no ledger, commit or settlement."""
    changed = [new for old, new in zip(_ledgers(before), _ledgers(after), strict=True) if old != new]
    if changed:
        broken(zombie_changes_nothing, f"the end of a fenced handler changed {changed}")


def _ledgers(state: EngineState) -> list[object]:
    return [(a.ledger, a.commits, a.finished, a.resettle, len(a.in_flight)) for a in state.assignments if a.owned]


def stop_keeps_what_is_done(commit: Commit, done: Collection[int]) -> None:
    """54: without a fault or an excused drain, a member commits every finished message before a release."""
    if lacking := set(done) - covered(commit, done):
        broken(stop_keeps_what_is_done, f"released with {commit} committed, and {sorted(lacking)} had finished too")


def nothing_stands_still(lacking: Collection[int]) -> None:
    """56, 14: when no event is possible, the members have handled and committed every message."""
    if lacking:
        broken(nothing_stands_still, f"nothing more happens, and {sorted(lacking)} are not handled or not committed")


def running_of(assignment: AssignmentState) -> list[int]:
    """Return the positions of an assignment whose handlers run."""
    return [m.position for m in assignment.in_flight + assignment.fenced if m.state == RUNNING]


# --- individual acknowledgements


def ack_only_what_is_done(message: Message, done: Collection[int], *, owned: bool) -> None:
    """19: a member acknowledges a message only after it has handled the message in the same assignment."""
    if message.position not in done or not owned:
        broken(ack_only_what_is_done, f"position {message.position} is acknowledged, and {sorted(done)} are done")


def redelivery_joins_the_held(before: EngineState, after: EngineState, position: int) -> None:
    """21: the redelivery of a message in flight changes the token of the message and nothing else."""
    (old,), (new,) = ([a for a in state.assignments if a.owned] for state in (before, after))
    if position in {m.position for m in old.in_flight}:
        blank = [[m._replace(token=None) for m in held] for held in (old.in_flight, new.in_flight)]
        tokens = [next(m.token for m in held if m.position == position) for held in (old.in_flight, new.in_flight)]
        if blank[0] != blank[1] or before.ready != after.ready or tokens[0] == tokens[1]:
            broken(redelivery_joins_the_held, f"the redelivery of position {position} in flight led to {new.in_flight}")


def settled_runs_no_more(after: EngineState, position: int, *, done: bool) -> None:
    """22: a redelivered finished message does not run again."""
    queued = {m.position for a in after.assignments if a.owned for m in a.in_flight if m.state == QUEUED}
    if done and position in queued:
        broken(settled_runs_no_more, f"position {position} was done, and is queued after its redelivery")
