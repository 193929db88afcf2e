"""A group of members, each with an engine of its own, in every order of what can happen.

A state is a few numbers: which state the group is in, which each member is in, and what was handled so far. Engines
and groups are values, so whatever happens to one of them in one state happens once, and is remembered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, ParamSpec, TypeAlias

from lanes.core.engine import Engine
from lanes.core.lane import RUNNING
from lanes.core.snapshot import restore, snapshot
from memsource.explorer import invariants
from memsource.explorer.invariants import covered
from memsource.explorer.member import Event, Member, Output, Published, Scope, act, events
from memsource.explorer.search import Broken
from memsource.group import Group, GroupState

__all__ = ["GroupWorld", "State"]

P = ParamSpec("P")

_DOWN: Final = -1
_NOBODY: Final = -1
_NAMES: Final = "abcdefgh"
_FAILURES: Final = frozenset({"fails", "gives up"})

Step: TypeAlias = tuple[Callable[[], str], "State"]


class State(NamedTuple):
    """Everything: the group, its members, what was handled to its end (one bit a message), and what has been used up.

    ``split``: what a member sent before a loss may arrive behind it. ``excused``: a drain had to leave a hole.
    ``crashed``: who has, and did not start again yet.
    """

    group: int
    members: tuple[int, ...]
    done: int = 0
    moves: int = 0
    faults: int = 0
    failures: int = 0
    unknown: int = 0
    split: bool = False
    excused: bool = False
    crashed: int = _NOBODY


class _View(NamedTuple):
    """What the others see of a member: its running lanes, its partitions, those that do not drain, its room."""

    running: frozenset[tuple[object, ...]]
    owned: bool
    live: frozenset[int]
    messages: int
    paused: frozenset[int]


class GroupWorld:
    """One ``Scope``. ``reached`` counts kinds of events and rare branches."""

    def __init__(self, scope: Scope) -> None:
        self.reached: Counter[str] = Counter()
        self._scope = scope
        self._names = _NAMES[: scope.members]
        self._group = Group(scope.partitions, cooperative=scope.cooperative, assignor=_rotate if scope.rotate else None)
        self._bits: dict[tuple[int, int], int] = {}
        self._topic: Published = {number: {} for number in range(scope.partitions)}
        for number, key in scope.messages:
            record = self._group.publish(key=key, partition=number)
            self._bits[number, record.position] = 1 << len(self._bits)
            self._topic[number][record.position] = key
            if scope.gap and len(self._bits) in (1, len(scope.messages)):
                self._group.skip(1, partition=number)
        self._positions = {number: tuple(p for n, p in self._bits if n == number) for number in range(scope.partitions)}
        self._new = snapshot(Engine(scope.policy()))
        self._groups: list[GroupState] = []
        self._group_ids: dict[GroupState, int] = {}
        self._members: list[Member] = []
        self._member_ids: dict[Member, int] = {}
        self._events: list[list[Event]] = []
        self._views: list[_View] = []
        self._acts: dict[tuple[int, Event], tuple[int, list[Output]] | Broken] = {}
        self._calls: dict[tuple[int, Event], int] = {}
        self._fetches: dict[tuple[int, str, int, int], tuple[int, Event] | None] = {}
        self._sound: set[tuple[int, ...]] = set()
        self._known: list[frozenset[str]] = []

    @property
    def locals(self) -> int:
        """How many different states of one member there are so far."""
        return len(self._members)

    # --- search.World

    def start(self) -> State:
        """The first member is there, and has heard of nothing."""
        self._group.join(self._names[0])
        group = self._group_id(self._group.snapshot())
        return State(group, (self._fresh(),) + (_DOWN,) * (len(self._names) - 1))

    def steps(self, state: State) -> Iterator[Step]:
        """See ``search.World``."""
        progress = False
        for index, name in enumerate(self._names):
            if state.members[index] == _DOWN:
                crashed = state.crashed == index
                if crashed or state.moves < self._scope.moves:
                    group = self._call(state.group, "join", name)
                    joined = _with(state, index, self._fresh())._replace(group=group)
                    if crashed:
                        yield self._step(joined._replace(crashed=_NOBODY), name, ("starts again",))
                    else:
                        yield self._step(joined._replace(moves=state.moves + 1), name, ("joins",))
                continue
            for following, event, counts in self._of(state, index, name):
                progress = progress or counts
                yield self._step(following, name, event)
        for index, name in enumerate(self._names if not progress else ()):
            for following, event in self._late(state, index, name):
                progress = True
                yield self._step(following, name, event)
        if not progress:
            self._stands_still(state)

    def _step(self, state: State, name: str, event: Event) -> Step:
        self.reached[str(event[3] if event[0] == "handler" else event[0])] += 1
        return partial(self._text, name, event), state

    # --- what may happen to a member

    def _of(self, state: State, index: int, name: str) -> Iterator[tuple[State, Event, bool]]:
        """What follows, by what, and whether it is something that happens if nothing else does."""
        scope, group = self._scope, self._groups[state.group]
        member = state.members[index]
        known = next((m for m in group.members if m[0] == name), None)
        waits = known is None or not (known[1] or self._views[member].owned)
        for event in self._events[member]:
            following = None if waits and event[0] == "handler" else self._local(state, index, name, event)
            if following is not None:
                yield following, event, event[0] not in ("stops", "deadline")
        if known is None:
            group_id = self._call(state.group, "join", name)
            yield state._replace(group=group_id), ("joins again",), True
            return
        if known[1]:
            yield self._polled(state, index, name), ("hears", known[1]), True
        yield from self._fetched(state, index, name)
        if state.faults < scope.faults:
            yield from self._struck(_faulty(state), index, name)

    def _late(self, state: State, index: int, name: str) -> Iterator[tuple[State, Event]]:
        """What nobody waits for: the end of fenced handlers of a member that owns nothing, and has nothing to hear of.

        It matters to none but the member itself, so one order of it and the others' events is enough.
        """
        if state.members[index] != _DOWN and not self._views[state.members[index]].owned:
            for event in self._events[state.members[index]]:
                if event[0] == "handler":
                    yield self._act(state, index, name, event), event

    def _struck(self, state: State, index: int, name: str) -> Iterator[tuple[State, Event, bool]]:
        """The faults that a member in the group can meet.

        It hears of a loss at once: whatever it does in between it might have done before, and what it has sent before
        arrives behind the loss all the same.
        """
        crashed = state._replace(group=self._call(state.group, "crash", name))
        yield _with(crashed, index, _DOWN)._replace(crashed=index), ("crashes",), False
        event: Event = ("session expires",)
        yield self._act(crashed, index, name, event), event, False
        for number, owner in enumerate(self._groups[state.group].owners):
            if owner == name:
                lost = state._replace(group=self._call(state.group, "lose", name, number), split=True)
                yield self._polled(lost, index, name), ("loses", number), False

    def _polled(self, state: State, index: int, name: str) -> State:
        group = self._groups[state.group]
        notices = next(member[1] for member in group.members if member[0] == name)
        event = ("polls", tuple((kind, number, group.committed[number]) for kind, number in notices))
        return self._act(state._replace(group=self._call(state.group, "poll", name)), index, name, event)

    def _local(self, state: State, index: int, name: str, event: Event) -> State | None:
        """What follows when a member acts by itself; None when that is used up."""
        scope, word = self._scope, event[0]
        if word in ("made", "confirmed") and not (self._is_known(state, name) or self._is_made(state, index, event)):
            return None  # It is refused; that is answered when the member hears why.
        if word == "deadline":
            if state.faults == scope.faults:
                return None
            state = _faulty(state)
        elif word == "made" or (word == "unanswered" and not self._is_made(state, index, event)):
            if state.unknown == scope.unknown:
                return None
            state = state._replace(unknown=state.unknown + 1)
        elif word == "stops":
            if state.moves == scope.moves:
                return None
            state = state._replace(moves=state.moves + 1)
        elif word == "handler" and event[3] in _FAILURES:
            if state.failures == scope.failures:
                return None
            state = state._replace(failures=state.failures + 1)
        elif word == "leaves":
            group = self._call(state.group, "leave", name)
            return _with(state, index, _DOWN)._replace(group=group)
        return self._act(state, index, name, event)

    def _fetched(self, state: State, index: int, name: str) -> Iterator[tuple[State, Event, bool]]:
        view = self._views[state.members[index]]
        for number in sorted(view.live - view.paused):
            for count in range(1, min(view.messages, self._scope.batch) + 1):
                fetch = state.group, name, number, count
                if fetch not in self._fetches:
                    self._fetches[fetch] = self._fetch(*fetch)
                found = self._fetches[fetch]
                if found is None:
                    break
                group, event = found
                yield self._act(state._replace(group=group), index, name, event), event, True

    def _fetch(self, group: int, name: str, number: int, count: int) -> tuple[int, Event] | None:
        """The group behind a fetch of exactly so many, and what it was; None when there is no such fetch."""
        self._group.restore(self._groups[group])
        if number not in self._group.held(name):
            return None
        before = self._group.position(name, number)
        records = self._group.fetch(name, number, count)
        upto = self._group.position(name, number)
        if upto == before or len(records) < (count if count > 1 or records else 0):
            return None
        run = tuple((r.position, self._topic[number][r.position]) for r in records)
        return self._group_id(self._group.snapshot()), ("fetches", number, run, upto)

    def _act(self, state: State, index: int, name: str, event: Event) -> State:
        """Let something happen to a member, and the rest see it. Raises ``Broken``."""
        found = self._acts.get((state.members[index], event))
        if found is None:
            try:
                member, outputs = act(self._scope, self._topic, self._members[state.members[index]], event)
                found = self._member_id(member), outputs
            except Broken as broken:
                found = broken
            self._acts[state.members[index], event] = found
        try:
            if isinstance(found, Broken):
                raise Broken(found.invariant, found.text)
            state = _with(state, index, found[0])
            for output in found[1]:
                state = self._seen(state, name, output)
            self._together(state)
        except Broken as broken:
            broken.step = self._text(name, event)
            raise
        return state

    # --- what the others see

    def _seen(self, state: State, name: str, output: Output) -> State:
        match output:
            case ("note", str(note)):
                self.reached[note] += 1
            case ("excused",):
                state = state._replace(excused=True)
            case ("started", int(number), int(position)):
                self._started(state, number, position)
            case ("done", int(number), int(position)):
                if not state.faults:
                    state = state._replace(done=state.done | self._bits[number, position])
            case ("made", int(number), (int(floor), completed)):
                before = self._groups[state.group].committed[number]
                if not state.split:
                    after = (floor, completed)
                    self._check(invariants.committed_never_falls, after, before, self._positions[number])  # type: ignore[arg-type]
                state = state._replace(group=self._call(state.group, "commit", name, number, floor, completed))
            case ("drained", int(number)):
                if not (self._scope.hands_over or state.excused or state.faults):
                    self._check(invariants.prefix_closed, self._done(state, number), self._positions[number])
            case ("released", int(number)):
                committed = self._groups[state.group].committed[number]
                if not (state.excused or state.faults):
                    self._check(invariants.stop_keeps_what_is_done, committed, self._done(state, number))
                if self._is_known(state, name):
                    state = state._replace(group=self._call(state.group, "release", name, number))
        return state

    def _started(self, state: State, number: int, position: int) -> None:
        done = self._done(state, number)
        if not (state.faults or state.excused):
            self._check(invariants.clean_rebalance_repeats_nothing, position, done=position in done)

    def _together(self, state: State) -> None:
        """What must hold of all members together."""
        if state.members in self._sound:
            return
        views = [(name, self._views[m]) for name, m in zip(self._names, state.members, strict=True) if m != _DOWN]
        self._check(invariants.one_handler_a_key, [one for _, view in views for one in view.running])
        owners = {n: [name for name, view in views if n in view.live] for n in range(self._scope.partitions)}
        self._check(invariants.one_owner, owners)
        self._sound.add(state.members)

    def _stands_still(self, state: State) -> None:
        """Nothing more happens by itself: everything must be handled and committed, if there is anybody."""
        group = self._groups[state.group]
        for number, owner in enumerate(group.owners):
            if owner is None:
                continue  # Nobody is there, or it is nobody's until the next rebalance.
            self.reached["came to rest"] += 1
            shells = self._members[state.members[self._names.index(owner)]].assignments
            shell = next((s for _, s in shells if s.number == number and not s.over), None)
            positions = set(self._positions[number])
            finished = set() if shell is None else covered(shell.origin, positions) | shell.done
            # A member that was lost may have committed less behind the back of its successor.
            kept = finished if state.split else finished & covered(group.committed[number], positions)
            self._check(invariants.nothing_stands_still, positions - kept)

    def _check(self, invariant: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        wanted = self._scope.invariants
        if wanted is None or invariant in wanted:
            invariant(*args, **kwargs)

    def _is_made(self, state: State, index: int, event: Event) -> bool:
        on_way = dict(self._members[state.members[index]].assignments)[int(str(event[1]))].on_way
        return on_way is not None and on_way.made

    def _is_known(self, state: State, name: str) -> bool:
        return name in self._known[state.group]

    def _done(self, state: State, number: int) -> set[int]:
        return {p for p in self._positions[number] if state.done & self._bits[number, p]}

    # --- values and their numbers

    def _call(self, group: int, method: str, *args: object) -> int:
        """The group behind a call."""
        found = self._calls.get((group, (method, *args)))
        if found is None:
            self._group.restore(self._groups[group])
            getattr(self._group, method)(*args)
            found = self._calls[group, (method, *args)] = self._group_id(self._group.snapshot())
        return found

    def _group_id(self, group: GroupState) -> int:
        if group not in self._group_ids:
            self._group_ids[group] = len(self._groups)
            self._groups.append(group)
            self._known.append(frozenset(member[0] for member in group.members))
        return self._group_ids[group]

    def _fresh(self) -> int:
        return self._member_id(Member(self._new))

    def _member_id(self, member: Member) -> int:
        if member not in self._member_ids:
            self._member_ids[member] = len(self._members)
            self._members.append(member)
            self._events.append(events(self._scope, member))
            self._views.append(_view(member))
        return self._member_ids[member]

    # --- words

    def _text(self, name: str, event: Event) -> str:
        match event:
            case ("handler", _, int(position), str(way)):
                return f"{name}: the handler of {position} {way}"
            case ("fetches", int(number), run, _):
                fetched = ", ".join(f"{p} ({key})" for p, key in run) if isinstance(run, tuple) else ""
                return f"{name} fetches {fetched or 'the gap at the end'} of partition {number}"
            case ("hears", tuple(notices)):
                return f"{name} hears: {', '.join(f'{kind} {number}' for kind, number in notices)}"
        about = " ".join(str(one) for one in event[1:])
        return f"{name} {event[0]} {about}".rstrip()


def _view(member: Member) -> _View:
    state = member.engine
    room = restore(state).room()
    return _View(
        frozenset((a.id, m.lane) for a in state.assignments if a.live for m in a.held if m.state == RUNNING),
        any(a.owned for a in state.assignments),
        frozenset(a.id.number for a in state.assignments if a.live and not a.draining),
        room.messages,
        frozenset(partition.id.number for partition in room.paused),
    )


def _faulty(state: State) -> State:
    """What was handled before a fault may be handled again, so it is of no interest any more."""
    return state._replace(faults=state.faults + 1, done=0)


def _with(state: State, index: int, member: int) -> State:
    members = state.members
    return state._replace(members=(*members[:index], member, *members[index + 1 :]))


def _rotate(owners: Sequence[str | None], members: Sequence[str]) -> list[str | None]:
    """Everything goes to the member that came last."""
    return [members[-1] if members else None] * len(owners)
