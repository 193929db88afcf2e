"""One member of a group as a value: its engine and what its shell knows; and what may happen to it next."""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from lanes.core.drain import CANCELLING, ENDING, IDLE, RELEASING, SETTLING
from lanes.core.lane import DEAD_LETTERING
from lanes.core.snapshot import EngineState, restore
from lanes.core.types import NEVER
from memsource.explorer.invariants import Commit, running_of
from memsource.explorer.scope import Scope

__all__ = ["DRAINS", "HANDLER", "SOURCE", "Assignment", "Event", "Member", "OnWay", "Output", "Published", "events"]

SOURCE: Final = "memory"
"""The source of all partitions."""

HANDLER: Final = frozenset({"ends well", "fails", "gives up", "is cancelled"})
"""What may become of a handler."""

DRAINS: Final = {
    ENDING: ("deadline",),
    CANCELLING: ("fences",),
    SETTLING: ("settles late",),
    RELEASING: ("releases", "is refused"),
}
"""What may come of a drain by itself, by its phase."""

Published: TypeAlias = dict[int, dict[int, str]]
"""What was published: partition -> position -> key."""


class Event(NamedTuple):
    """What happens to a member: a word, and as far as it needs them a partition, an assignment, a position, and more.

    ``run``: positions and keys. ``notices``: what it hears of which partition, and what is committed of that.
    """

    word: str
    number: int = 0
    assignment: int = 0
    position: int = 0
    run: tuple[tuple[int, str], ...] = ()
    notices: tuple[tuple[str, int, Commit], ...] = ()


class Output(NamedTuple):
    """What the others see of it: a word, and as far as it needs them a partition, a position and a commit."""

    word: str
    number: int = 0
    position: int = 0
    commit: Commit = (0, ())


class OnWay(NamedTuple):
    """A commit that was sent: whether the broker has made it, and nobody knows."""

    commit: Commit
    made: bool = False


class Assignment(NamedTuple):
    """What the shell knows of an assignment.

    ``origin``: what was committed when it began; ``done``: what it has handled to its end since. ``started``: the last
    position that started, by key. ``sent``: the last commit. ``confirmed``: the floor the broker
    confirmed. ``drain``: the phase of its drain. ``over``: it was lost or released.
    """

    number: int
    origin: Commit
    confirmed: int
    done: frozenset[int] = frozenset()
    started: tuple[tuple[bytes | None, int], ...] = ()
    sent: Commit | None = None
    on_way: OnWay | None = None
    drain: str = IDLE
    over: bool = False


class Member(NamedTuple):
    """A member: its engine, what its shell knows of each assignment by its number, and whether it is being stopped."""

    engine: EngineState
    assignments: tuple[tuple[int, Assignment], ...] = ()
    stopping: bool = False


def events(scope: Scope, member: Member) -> list[Event]:
    """What may happen to a member by itself."""
    engine, known = restore(member.engine), dict(member.assignments)
    found: list[Event] = []
    if engine.ready and engine.running_handlers < engine.concurrency:
        found.append(Event("takes"))
    for state in member.engine.assignments:
        shell = known.get(state.assignment)
        for position in running_of(state):
            ways = ["ends well"]
            if shell is not None and not shell.over and state.live:
                ways += ["is cancelled"] if shell.drain == CANCELLING else ["fails", "gives up"]
            found += [Event(way, state.id.number, state.assignment, position) for way in ways]
        found += [
            Event("parked", state.id.number, state.assignment, m.position)
            for m in state.in_flight
            if m.state == DEAD_LETTERING
        ]
    if engine.next_due() != NEVER:
        found.append(Event("time passes"))
    if engine.dirty and scope.settles:
        found.append(Event("settles"))
    if engine.dirty or any(p.commits is not None and p.commits.pending for p in engine.partitions.values()):
        found.append(Event("commits"))
    for assignment, shell in known.items():
        if shell.on_way is not None:
            words = ["confirmed", "unanswered"] if shell.on_way.made else ["confirmed", "unanswered", "made"]
            found += [Event(word, shell.number, assignment) for word in words]
        if not shell.over:
            found += [Event(word, shell.number, assignment) for word in DRAINS.get(shell.drain, ())]
    if not member.stopping:
        found.append(Event("stops"))
    elif not engine.partitions:
        found.append(Event("leaves"))
    return found
