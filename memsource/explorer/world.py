"""A group of members, each with its own engine, in every order of events.

A state is a few numbers: the state of the group, the state of each member, and the handled messages. The explorer
numbers the states of the group and of each member, and applies each event to each numbered state once.

The explorer leaves out two kinds of orders, because these orders cannot show further violations. First, the explorer
tells a member of a lost partition at once, and leaves out the orders with a later notice. A late action of the member
equals an action before the loss whose messages arrive after the loss. Second, the fenced handlers of a member without
partitions and notices end last, because their ends affect no other member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from lanes.core.engine import Engine
from lanes.core.lane import RUNNING
from lanes.core.snapshot import restore, snapshot
from memsource.explorer import invariants
from memsource.explorer.invariants import Commit, covered
from memsource.explorer.member import HANDLER, SOURCE, Event, Member, Output, Published, act, events
from memsource.explorer.scope import Scope, check
from memsource.explorer.search import Broken
from memsource.memory.group import Group, GroupState

_DOWN: Final = -1
_NOBODY: Final = -1
_NAMES: Final = "abcdefgh"
_FAILURES: Final = frozenset({"fails", "gives up"})

_Call = tuple[int, str, tuple[object, ...]]


class Groups:
    """The states of a group, by number. The class makes each call in each state once, and stores the next state.

    ``topic`` has the published messages: partition -> position -> key. The member ``first`` is in the group from the
    start.
    """

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
        """Call a method of the group in a state, and return the number of the next state."""
        call = state, method, args
        found = self._calls.get(call)
        if found is None:
            self._group.restore(self._states[state])
            getattr(self._group, method)(*args)
            found = self._calls[call] = self._number()
        return found

    def fetch(self, state: int, name: str, number: int, count: int) -> tuple[int, Event] | None:
        """Return the next state and the event of a fetch of ``count`` messages; None = no such fetch is possible."""
        fetch = state, name, number, count
        if fetch not in self._fetches:
            self._fetches[fetch] = self._fetch(*fetch)
        return self._fetches[fetch]

    def _fetch(self, state: int, name: str, number: int, count: int) -> tuple[int, Event] | None:
        group = self._group
        group.restore(self._states[state])
        if number not in group.partitions_of(name):
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
        """Return whether a member is in the group."""
        return name in self._members[state]

    def hears(self, state: int, name: str) -> Event | None:
        """Return the event by which a member receives its present notices; None = no notice."""
        notices = self._members[state][name]
        told = tuple((kind, number, self.committed(state, number)) for kind, number in notices)
        return Event("hears", notices=told) if told else None

    def owners(self, state: int) -> Sequence[str | None]:
        """Return the owner of each partition."""
        return self._states[state].owners

    def committed(self, state: int, number: int) -> Commit:
        """Return the committed set of a partition."""
        return self._states[state].committed[number]

    def _number(self) -> int:
        state = self._group.snapshot()
        if state not in self._numbers:
            self._numbers[state] = len(self._states)
            self._states.append(state)
            self._members.append({name: notices for name, notices, _ in state.members})
        return self._numbers[state]


def _rotate(owners: Sequence[str | None], members: Sequence[str]) -> list[str | None]:
    """Assign all partitions to the last member that joined."""
    return [members[-1] if members else None] * len(owners)


class View(NamedTuple):
    """The parts of a member that affect others: events, running handlers, ownership, live partitions and room."""

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
    """The states of a member, by number. The class applies each event to each state once.

    ``fresh`` is the number of the state of a newly started member.
    """

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
        """Return a member as the other members see it."""
        return self._views[number]

    def act(self, number: int, event: Event) -> _Done:
        """Apply an event to a member. Raises ``Broken``."""
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


class State(NamedTuple):
    """The whole state: the group, its members, the handled messages, and the counts of limited events.

    Attributes:
        group: Number of the state of the group.
        members: Number of the state of each member.
        done: Handled or dead-lettered messages, one bit for each message; 0 after a fault.
        moves: Number of joins and stops since the first state.
        faults: Number of faults since the first state.
        failures: Number of failures of handlers since the first state.
        unknown: Number of late or missing answers to commits since the first state.
        split: Whether a commit that a member sent before a loss may arrive after the loss.
        excused: Whether a drain did not wait for a head or a failed handler, so that messages may run again.
        crashed: Index of the member that has crashed and has not started again; -1 = no member.
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


class _Step(NamedTuple):
    """A possible event and the next state. ``moving`` is False for an event that may never happen."""

    event: Event
    state: State
    moving: bool = True


class GroupWorld:
    """The model of a group: the first state, and for each state every possible event and its next state.

    The scope limits the events. ``reached`` counts events and rare branches.

    Args:
        scope: The scope of the exploration.
    """

    def __init__(self, scope: Scope) -> None:
        self.reached: Counter[str] = Counter()
        self._scope = scope
        self._names = _NAMES[: scope.members]
        self._groups = Groups(scope, self._names[0])
        self._topic = self._groups.topic
        self._members = Members(scope, self._topic)
        everything = [(number, position) for number, keys in self._topic.items() for position in keys]
        self._bits = {one: 1 << index for index, one in enumerate(everything)}
        self._sound: set[tuple[int, ...]] = set()

    def __repr__(self) -> str:
        return f"<GroupWorld {len(self._names)} members, {len(self._members)} states of one>"

    def start(self) -> State:
        """Return the first state: one member is in the group and has received no notice."""
        return State(self._groups.first, (self._members.fresh,) + (_DOWN,) * (len(self._names) - 1))

    def steps(self, state: State) -> Iterator[tuple[Callable[[], str], State]]:
        """Yield one function for each possible event. The function returns the event's text and the next state. Pure.

        Args:
            state: The state.

        Raises:
            Broken: The event or the state breaks an invariant.
        """
        moving = False
        for index, name in enumerate(self._names):
            for step in self._down(state, index, name) if state.members[index] == _DOWN else self._up(state, index):
                moving = moving or step.moving
                yield self._told(name, step)
        if moving:
            return
        for index, name in enumerate(self._names):
            for step in self._late(state, index):
                moving = True
                yield self._told(name, step)
        if not moving:
            self._stands_still(state)

    def _told(self, name: str, step: _Step) -> tuple[Callable[[], str], State]:
        self.reached[step.event.word] += 1
        return partial(_text, name, step.event), step.state

    # --- the possible events

    def _down(self, state: State, index: int, name: str) -> Iterator[_Step]:
        again = state.crashed == index
        if again or state.moves < self._scope.moves:
            joined = _with(state, index, self._members.fresh)._replace(group=self._call(state, "join", name))
            if again:
                yield _Step(Event("starts again"), joined._replace(crashed=_NOBODY), moving=False)
            else:
                yield _Step(Event("joins"), joined._replace(moves=state.moves + 1), moving=False)

    def _up(self, state: State, index: int) -> Iterator[_Step]:
        name, view = self._names[index], self._members.view(state.members[index])
        known = self._groups.knows(state.group, name)
        hears = self._groups.hears(state.group, name) if known else None
        for event in view.events:
            if event.word in HANDLER and not view.owns and hears is None:
                continue  # See ``_late``.
            following = self._allowed(state, index, event)
            if following is not None:
                moving = event.word not in ("stops", "deadline", "settles late", "is refused")
                yield _Step(event, self._act(following, index, event), moving)
        if not known:
            yield _Step(Event("joins again"), state._replace(group=self._call(state, "join", name)))
            return
        if hears is not None:
            yield _Step(hears, self._heard(state, index))
        for number in sorted(view.live - view.paused):
            for count in range(1, min(view.messages, self._scope.batch) + 1):
                found = self._groups.fetch(state.group, name, number, count)
                if found is None:
                    break
                group, event = found
                yield _Step(event, self._act(state._replace(group=group), index, event))
        if state.faults < self._scope.faults:
            yield from self._struck(_faulty(state), index, name)

    def _late(self, state: State, index: int) -> Iterator[_Step]:
        """Yield the ends of fenced handlers, for which no member waits."""
        if state.members[index] != _DOWN:
            for event in self._members.view(state.members[index]).events:
                if event.word in HANDLER:
                    yield _Step(event, self._act(state, index, event))

    def _struck(self, state: State, index: int, name: str) -> Iterator[_Step]:
        """Yield the possible faults of a member in the group."""
        crashed = state._replace(group=self._call(state, "crash", name))
        yield _Step(Event("crashes"), _with(crashed, index, _DOWN)._replace(crashed=index), moving=False)
        event = Event("session expires")
        yield _Step(event, self._act(crashed, index, event), moving=False)
        for number, owner in enumerate(self._groups.owners(state.group)):
            if owner == name:
                yield _Step(Event("loses", number), self._heard(self._taken(state, name, number), index), moving=False)

    def _taken(self, state: State, name: str, number: int) -> State:
        """Take a partition from its owner."""
        return state._replace(group=self._call(state, "lose", name, number), split=True)

    def _allowed(self, state: State, index: int, event: Event) -> State | None:
        """Return the state in which a member may act; None = the broker or the scope refuses the event."""
        scope, word, name = self._scope, event.word, self._names[index]
        if word in ("made", "confirmed", "unanswered"):
            on_way = dict(self._members[state.members[index]].assignments)[event.assignment].on_way
            made = on_way is not None and on_way.made
            if word != "unanswered" and not made and not self._groups.knows(state.group, name):
                return None  # The group has expelled the member and refuses the commit.
            if word == "confirmed" or made:
                return state
            return None if state.unknown == scope.unknown else state._replace(unknown=state.unknown + 1)
        if word in ("deadline", "settles late"):
            return None if state.faults == scope.faults else _faulty(state)
        if word == "is refused":
            return None if state.faults == scope.faults else self._taken(_faulty(state), name, event.number)
        if word == "stops":
            return None if state.moves == scope.moves else state._replace(moves=state.moves + 1)
        if word in _FAILURES:
            return None if state.failures == scope.failures else state._replace(failures=state.failures + 1)
        return state

    def _heard(self, state: State, index: int) -> State:
        """Deliver the notices of the coordinator to a member."""
        name = self._names[index]
        event = self._groups.hears(state.group, name)
        assert event is not None, "the member has a notice"
        return self._act(state._replace(group=self._call(state, "poll", name)), index, event)

    def _act(self, state: State, index: int, event: Event) -> State:
        """Apply an event to a member, and its effects to the other members. Raises ``Broken``."""
        name = self._names[index]
        if event.word == "leaves":
            return _with(state, index, _DOWN)._replace(group=self._call(state, "leave", name))
        try:
            done = self._members.act(state.members[index], event)
            self.reached.update(done.notes)
            state = _with(state, index, done.member)
            for output in done.outputs:
                state = self._seen(state, name, output)
            self._together(state)
        except Broken as broken:
            raise Broken(broken.invariant, broken.text, _text(name, event)) from broken
        return state

    # --- the effects on other members

    def _seen(self, state: State, name: str, output: Output) -> State:
        number, position = output.number, output.position
        match output.word:
            case "started":
                if not (state.faults or state.excused):
                    again = bool(state.done & self._bits[number, position])
                    check(self._scope, invariants.clean_rebalance_repeats_nothing, position, done=again)
            case "done":
                if not state.faults:
                    state = state._replace(done=state.done | self._bits[number, position])
            case "made":
                before = self._groups.committed(state.group, number)
                if not state.split:
                    check(
                        self._scope, invariants.committed_never_falls, output.commit, before, list(self._topic[number])
                    )
                state = state._replace(group=self._call(state, "commit", name, number, *output.commit))
            case "drained":
                if not (self._scope.hands_over or state.excused or state.faults):
                    check(self._scope, invariants.prefix_closed, self._done(state, number), list(self._topic[number]))
            case "released":
                committed = self._groups.committed(state.group, number)
                if not (state.excused or state.faults):
                    check(self._scope, invariants.stop_keeps_what_is_done, committed, self._done(state, number))
                if self._groups.knows(state.group, name):
                    state = state._replace(group=self._call(state, "release", name, number))
            case "excused":
                state = state._replace(excused=True)
        return state

    def _together(self, state: State) -> None:
        """Check the invariants of all members together."""
        if state.members in self._sound:
            return
        views = {name: self._members.view(m) for name, m in zip(self._names, state.members, strict=True) if m != _DOWN}
        check(self._scope, invariants.one_handler_a_key, [one for view in views.values() for one in view.running])
        owners = {n: [name for name, view in views.items() if n in view.live] for n in self._topic}
        check(self._scope, invariants.one_owner, owners)
        self._sound.add(state.members)

    def _stands_still(self, state: State) -> None:
        """Check that a state without further events has handled and committed each message of an owned partition."""
        for number, owner in enumerate(self._groups.owners(state.group)):
            if owner is None:
                continue  # The group has no member, or the next rebalance assigns the partition.
            self.reached["no further event"] += 1
            shells = self._members[state.members[self._names.index(owner)]].assignments
            shell = next((s for _, s in shells if s.number == number and not s.over), None)
            positions = set(self._topic[number])
            finished = set() if shell is None else covered(shell.origin, positions) | shell.done
            # A lost member may have overwritten the commit of its successor.
            kept = (
                finished if state.split else finished & covered(self._groups.committed(state.group, number), positions)
            )
            check(self._scope, invariants.nothing_stands_still, positions - kept)

    def _call(self, state: State, method: str, *args: object) -> int:
        return self._groups.call(state.group, method, *args)

    def _done(self, state: State, number: int) -> set[int]:
        return {p for p in self._topic[number] if state.done & self._bits[number, p]}


def _with(state: State, index: int, member: int) -> State:
    members = state.members
    return state._replace(members=(*members[:index], member, *members[index + 1 :]))


def _faulty(state: State) -> State:
    """Count a fault. Forget the handled messages, because a message may repeat after a fault."""
    return state._replace(faults=state.faults + 1, done=0)


def _text(name: str, event: Event) -> str:
    """Return the text of an event for the path to a violation."""
    place = f"partition {event.number}"
    if event.word in HANDLER:
        return f"{name}: the handler of {event.position} {event.word}"
    match event.word:
        case "fetches":
            run = ", ".join(f"{position} (key {key})" for position, key in event.run)
            return f"{name} fetches {run or 'the gap at the end'} of {place}"
        case "hears":
            return f"{name} hears: {', '.join(f'{kind} {number}' for kind, number, _ in event.notices)}"
        case "made":
            return f"{name}: its commit of {place} is made, and not answered yet"
        case "confirmed" | "unanswered":
            return f"{name}: its commit of {place} is {event.word}"
        case "deadline":
            return f"{name}: the drain of {place} misses its deadline"
        case "parked":
            return f"{name}: the dead letter of {event.position} is confirmed"
        case "settles late":
            return f"{name} does not settle {place} in time"
        case "is refused":
            return f"{name}: the release of {place} is refused"
        case "releases" | "fences" | "loses":
            return f"{name} {event.word} {place}"
    return f"{name} {event.word}"
