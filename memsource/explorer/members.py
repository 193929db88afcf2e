"""The states of a member, by number: whatever happens in one of them happens once, and is remembered."""

from __future__ import annotations

from typing import NamedTuple

from lanes.core.engine import Engine
from lanes.core.lane import RUNNING
from lanes.core.snapshot import restore, snapshot
from memsource.explorer.actor import act
from memsource.explorer.member import Event, Member, Output, Published, events
from memsource.explorer.scope import Scope
from memsource.explorer.search import Broken

__all__ = ["Members", "View"]


class View(NamedTuple):
    """What others see of a member: what may happen to it by itself, what runs, whether it owns anything, its
    partitions that do not drain, and its room."""

    events: tuple[Event, ...]
    running: frozenset[tuple[object, ...]]
    owns: bool
    live: frozenset[int]
    messages: int
    paused: frozenset[int]


class _Done(NamedTuple):
    member: int
    outputs: tuple[Output, ...]
    notes: tuple[str, ...]


class Members:
    """``fresh`` is a member that has just begun."""

    def __init__(self, scope: Scope, topic: Published) -> None:
        self._scope = scope
        self._topic = topic
        self._members: list[Member] = []
        self._numbers: dict[Member, int] = {}
        self._views: list[View] = []
        self._acts: dict[tuple[int, Event], _Done | Broken] = {}
        self.fresh: int = self._number(Member(snapshot(Engine(scope.policy()))))

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, number: int) -> Member:
        return self._members[number]

    def view(self, number: int) -> View:
        """What others see of it."""
        return self._views[number]

    def act(self, number: int, event: Event) -> _Done:
        """What becomes of a member. Raises ``Broken``."""
        found = self._acts.get((number, event))
        if found is None:
            try:
                acted = act(self._scope, self._topic, self._members[number], event)
                found = _Done(self._number(acted.member), acted.outputs, acted.notes)
            except Broken as broken:
                found = broken
            except Exception as error:
                found = Broken("nothing_raises", f"{type(error).__name__}: {error}")
            self._acts[number, event] = found
        if isinstance(found, Broken):
            raise found
        return found

    def _number(self, member: Member) -> int:
        if member not in self._numbers:
            self._numbers[member] = len(self._members)
            self._members.append(member)
            self._views.append(_view(self._scope, member))
        return self._numbers[member]


def _view(scope: Scope, member: Member) -> View:
    state = member.engine
    room = restore(state).room()
    return View(
        events=tuple(events(scope, member)),
        running=frozenset(
            (a.id, m.lane) for a in state.assignments if a.live for m in a.in_flight if m.state == RUNNING
        ),
        owns=any(a.owned for a in state.assignments),
        live=frozenset(a.id.number for a in state.assignments if a.live and not a.draining),
        messages=room.messages,
        paused=frozenset(partition.id.number for partition in room.paused),
    )
