"""The states of a group, by number: whatever is called in one of them is called once, and remembered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from memsource.explorer.invariants import Commit
from memsource.explorer.member import SOURCE, Event, Published
from memsource.explorer.scope import Scope
from memsource.memory.group import Group, GroupState

__all__ = ["Groups"]

_Call = tuple[int, str, tuple[object, ...]]


class Groups:
    """``topic`` is what was published: partition -> position -> key. Member ``first`` is there from the beginning."""

    def __init__(self, scope: Scope, first: str) -> None:
        self.topic: Published = {number: {} for number in range(scope.partitions)}
        self._group = Group(
            scope.partitions, name=SOURCE, cooperative=scope.cooperative, assignor=_rotate if scope.rotate else None
        )
        for count, (number, key) in enumerate(scope.messages, 1):
            self.topic[number][self._group.publish(key=key, partition=number).position] = key
            if scope.gap and count in (1, len(scope.messages)):
                self._group.skip(1, partition=number)
        self._group.join(first)
        self._states: list[GroupState] = []
        self._numbers: dict[GroupState, int] = {}
        self._calls: dict[_Call, int] = {}
        self._fetches: dict[tuple[int, str, int, int], tuple[int, Event] | None] = {}
        self._members: list[dict[str, tuple[tuple[str, int], ...]]] = []
        self.first: Final = self._number()

    def call(self, state: int, method: str, *args: object) -> int:
        """The state behind a call of the group."""
        call = state, method, args
        found = self._calls.get(call)
        if found is None:
            self._group.restore(self._states[state])
            getattr(self._group, method)(*args)
            found = self._calls[call] = self._number()
        return found

    def fetch(self, state: int, name: str, number: int, count: int) -> tuple[int, Event] | None:
        """The state behind a fetch of exactly so many, and what was fetched; None when there is no such fetch."""
        fetch = state, name, number, count
        if fetch not in self._fetches:
            self._fetches[fetch] = self._fetch(*fetch)
        return self._fetches[fetch]

    def _fetch(self, state: int, name: str, number: int, count: int) -> tuple[int, Event] | None:
        group = self._group
        group.restore(self._states[state])
        if number not in group.held(name):
            return None
        before = group.position(name, number)
        records = group.fetch(name, number, count)
        upto = group.position(name, number)
        only_a_gap = not records and count == 1
        if upto == before or (len(records) < count and not only_a_gap):
            return None
        run = tuple((record.position, self.topic[number][record.position]) for record in records)
        return self._number(), Event("fetches", number, position=upto, run=run)

    def knows(self, state: int, name: str) -> bool:
        """Whether a member is in the group."""
        return name in self._members[state]

    def hears(self, state: int, name: str) -> Event | None:
        """What a member would hear now."""
        notices = self._members[state][name]
        told = tuple((kind, number, self.committed(state, number)) for kind, number in notices)
        return Event("hears", notices=told) if told else None

    def owners(self, state: int) -> Sequence[str | None]:
        """Who owns which partition."""
        return self._states[state].owners

    def committed(self, state: int, number: int) -> Commit:
        """What is committed of a partition."""
        return self._states[state].committed[number]

    def _number(self) -> int:
        state = self._group.snapshot()
        if state not in self._numbers:
            self._numbers[state] = len(self._states)
            self._states.append(state)
            self._members.append({name: notices for name, notices, _ in state.members})
        return self._numbers[state]


def _rotate(owners: Sequence[str | None], members: Sequence[str]) -> list[str | None]:
    """Everything goes to the member that came last."""
    return [members[-1] if members else None] * len(owners)
