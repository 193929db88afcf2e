"""The runbook of a new number of partitions, computed from the facts of the broker.

For a larger number, deploy the workers first. For a smaller number, deploy the producers first. In this order every
message goes to a physical queue with a reader. docs/model/widths.pml is a model of both orders. The functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from lanes.queues.partitioned import PartitionedQueue
from lanes.queues.stranded import QueueFacts

Progress = Literal["done", "due", "unknown"]
"""Whether a step is done. ``unknown`` = the broker does not show whether the step has happened, and a person must
confirm the step.
"""

_NONE: Final = QueueFacts()

_NAMED_LIMIT: Final = 5
"""Maximum number of findings that one step names."""


class Survey(NamedTuple):
    """The facts of physical queues at one time.

    Attributes:
        facts: Facts by the name of the physical queue. A missing physical queue has the size 0.
        groups: Groups with a member or a position in the queue, in alphabetical order.
        ends: Position after the last message of each physical queue, or the sum of its partitions' positions.
        stored: Stored number of partitions of each group, by the name of the group. A group without an entry uses the
            number in the configuration of its members.
    """

    facts: Mapping[str, QueueFacts]
    groups: tuple[str, ...]
    ends: Mapping[str, int]
    stored: Mapping[str, int] = {}


class Step(NamedTuple):
    """A step of a runbook.

    Attributes:
        action: The action of the operator.
        progress: State of the step, as far as the facts of the broker show it.
        found: The finding at the broker.
    """

    action: str
    progress: Progress
    found: str


class Runbook(NamedTuple):
    """The steps of a change of the number of partitions, in their order.

    Attributes:
        steps: The steps.
        create: Physical queues to create, each with its number of broker partitions. Empty while the existing physical
            queues contradict each other.
        remove: Removable physical queues: no member reads them, and every group has finished their messages.
        faults: Faults because of which messages would be stranded, or the change must not continue; empty = the change
            may continue.
    """

    steps: tuple[Step, ...]
    create: Mapping[str, int]
    remove: tuple[str, ...]
    faults: tuple[str, ...]


def grow_steps(
    before: PartitionedQueue,
    after: PartitionedQueue,
    facts: Mapping[str, QueueFacts],
    groups: Sequence[str],
    stored: Mapping[str, int] = {},
) -> Runbook:
    """Return the runbook of a larger number of partitions: create, start workers, then start producers.

    Args:
        before: The queue with its current number.
        after: The queue with its new number.
        facts: Facts by the name of the physical queue.
        groups: Groups that must read the queue.
        stored: Number of partitions that a group has stored; see ``Survey``.

    Returns:
        The runbook.
    """
    faults = [f"{name!r} of the present queue does not exist" for name in before.names if not _of(facts, name).size]
    sizes = {name: _of(facts, name).size for name in after.names if _of(facts, name).size}
    size = sizes.get(before.names[0], 1)
    faults += [
        f"{name!r} has {found} partitions at the broker, and {before.names[0]!r} has {size}; give both the same number"
        for name, found in sizes.items()
        if found != size
    ]
    contradict = bool(faults)
    missing = [name for name in after.names[before.partitions :] if name not in sizes]
    added = after.names[before.partitions :]
    unread = [(name, group) for group in groups for name in added if not _of(facts, name).readers.get(group, 0)]
    faults += [
        f"{number} messages wait in {name!r}, and no consumer of group {group!r} reads them; producers already use "
        f"more than {before.partitions} partitions, so start the workers with {after.partitions} now"
        for name, group in unread
        if (number := _of(facts, name).unfinished.get(group, 0))
    ]
    arrived = sum(_of(facts, name).messages for name in added)
    create = Step(
        "create the physical queues",
        "due" if missing else "done",
        f"missing: {_some(map(repr, missing))}"
        if missing
        else f"all exist, with {size} partition(s) each"
        if size > 1
        else "all exist",
    )
    former = _former(stored, groups, after.partitions)
    workers = Step(
        f"start all workers with {_with(after)}",
        "unknown" if not groups else "due" if unread or former else "done",
        "no group has a position in the queue; name the groups of the workers"
        if not groups
        else former
        if former
        else f"not read: {_some(f'{name!r} by group {group!r}' for name, group in unread)}"
        if unread
        else f"read by {_some(map(repr, groups))}",
    )
    producers = Step(
        f"start all producers with {_with(after)}",
        "unknown",
        f"the broker does not list producers; the added physical queues hold {arrived} messages",
    )
    to_create = {} if contradict else dict.fromkeys(missing, size)
    return Runbook((create, workers, producers), to_create, (), tuple(faults))


def shrink_steps(
    before: PartitionedQueue,
    after: PartitionedQueue,
    facts: Mapping[str, QueueFacts],
    groups: Sequence[str],
    arrived: Mapping[str, int],
    stored: Mapping[str, int] = {},
) -> Runbook:
    """Return the runbook of a smaller number of partitions: producers, wait, workers, then remove.

    Args:
        before: The queue with its current number.
        after: The queue with its new number.
        facts: Facts by the name of the physical queue.
        groups: Groups of the workers. Every other group in ``facts`` must have finished the removed queues too.
        arrived: Number of messages that arrived between two readings, by the name of the physical queue.
        stored: Number of partitions that a group has stored; see ``Survey``.

    Returns:
        The runbook.
    """
    faults = [f"{name!r} of the remaining queue does not exist" for name in after.names if not _of(facts, name).size]
    removed = [name for name in before.names[after.partitions :] if _of(facts, name).size]
    written = {name: arrived[name] for name in removed if arrived.get(name)}
    unfinished = [
        (name, group, number)
        for name in removed
        for group, number in sorted(_of(facts, name).unfinished.items())
        if number
    ]
    unclaimed = [
        (name, _of(facts, name).messages)
        for name in removed
        if _of(facts, name).messages and not _of(facts, name).unfinished
    ]
    read = [(name, group) for name in removed for group, count in sorted(_of(facts, name).readers.items()) if count]
    waiting = [f"{number} messages of {name!r} by group {group!r}" for name, group, number in unfinished]
    waiting += [f"{number} messages of {name!r}, in which no group has a position" for name, number in unclaimed]
    faults += [
        f"group {group!r} has not finished {number} messages of {name!r}, and none of its consumers reads it; start a "
        f"worker with {_with(before)} again"
        for name, group, number in unfinished
        if group in groups and (name, group) not in read
    ]
    producers = Step(
        f"start all producers with {_with(after)}",
        "due" if written else "unknown",
        f"a producer still writes: {_some(f'{number} messages to {name!r}' for name, number in written.items())}"
        if written
        else "no message has arrived since the last look"
        if removed
        else "the removed physical queues do not exist",
    )
    wait = Step(
        "wait until every group has finished the removed physical queues",
        "due" if waiting else "done",
        f"not finished: {_some(waiting)}" if waiting else "all finished",
    )
    former = _former(stored, groups, after.partitions)
    workers = Step(
        f"start all workers with {_with(after)}",
        "due" if read or former else "done",
        former
        if former
        else f"still read: {_some(f'{name!r} by group {group!r}' for name, group in read)}"
        if read
        else "no longer read",
    )
    kept = {name for name, *_ in (*unfinished, *unclaimed, *read)} | written.keys()
    remove = Step(
        "remove the physical queues",
        "due" if removed else "done",
        f"left: {_some(map(repr, removed))}" if removed else "none is left",
    )
    return Runbook(
        (producers, wait, workers, remove), {}, tuple(name for name in removed if name not in kept), tuple(faults)
    )


def wider_readers(queue: PartitionedQueue, facts: Mapping[str, QueueFacts], groups: Iterable[str]) -> list[str]:
    """Return a fault for each group that reads physical queues beyond the larger number of a change.

    Args:
        queue: The queue with the larger number of the change.
        facts: Facts of the names beyond that number.
        groups: Groups of the workers.

    Returns:
        The faults; empty = no fact contradicts the number.
    """
    read = {
        group: [name for name, fact in facts.items() if fact.readers.get(group, 0) and name not in queue.names]
        for group in groups
    }
    return [
        f"group {group!r} reads {_some(map(repr, names))}, so its workers have more than {queue.partitions} "
        "partitions; correct --from or --to"
        for group, names in read.items()
        if names
    ]


def refused_removals(runbook: Runbook, removed: Sequence[str], facts: Mapping[str, QueueFacts]) -> list[str]:
    """Return the reasons against the removal of physical queues by a shrink: group, physical queue and messages.

    Args:
        runbook: The runbook of the shrink.
        removed: Names to remove.
        facts: Facts by the name of the physical queue.

    Returns:
        A text for each reason; empty = the operator may remove all existing physical queues.
    """
    reasons = []
    for name in removed:
        fact = _of(facts, name)
        if not fact.size or name in runbook.remove:
            continue
        found = [
            f"group {group!r} has not finished {number} messages of {name!r}"
            for group, number in sorted(fact.unfinished.items())
            if number
        ]
        found += [f"group {group!r} still reads {name!r}" for group, count in sorted(fact.readers.items()) if count]
        if fact.messages and not fact.unfinished:
            found.append(f"{name!r} holds {fact.messages} messages, and no group has a position in it")
        reasons += found or [f"messages still arrive in {name!r}"]
    return reasons


def _with(queue: PartitionedQueue) -> str:
    """Return the argument that a program passes for the number of partitions, or for their names."""
    _, _, argument = repr(queue).removesuffix(")").partition(", ")
    return argument


def _former(stored: Mapping[str, int], groups: Sequence[str], partitions: int) -> str:
    """Return the finding about groups that have stored another number of partitions; "" = no finding."""
    found = [f"group {name!r} ({number})" for name, number in stored.items() if name in groups and number != partitions]
    return (
        f"a number of partitions is stored by {_some(found)}; stop all its members, and run the command with --apply"
        if found
        else ""
    )


def _of(facts: Mapping[str, QueueFacts], name: str) -> QueueFacts:
    return facts.get(name, _NONE)


def _some(texts: Iterable[str]) -> str:
    found = list(texts)
    more = f" and {len(found) - _NAMED_LIMIT} more" if len(found) > _NAMED_LIMIT else ""
    return ", ".join(found[:_NAMED_LIMIT]) + more
