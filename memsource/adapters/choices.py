"""The choices of a run: what happens to each request and to each process, between every two steps.

A ``Chooser`` decides at each boundary. ``Drawn`` draws faults, and aims further faults at the steps that follow a
fault, such as retries. ``Sought`` seeks one pair of faults. ``Given`` repeats the decisions of an earlier run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal, NamedTuple, Protocol, get_args

Kind = Literal[
    "deliver",  # nothing happens to the request
    "delay",  # the request arrives `amount` seconds later
    "drop_request",  # the request never arrives; the client learns `amount` seconds later that no reply comes
    "drop_reply",  # the broker performs the request, and its reply never arrives; `amount` as above
    "duplicate",  # the broker performs the request twice
    "callback",  # the broker makes the client call back: a rebalance, a loss, an advisory
    "freeze",  # the process does not run for `amount` seconds
    "crash",  # the process dies, and another one starts `amount` seconds later
    "cut_off",  # no request or reply of the process passes for `amount` seconds
    "restart",  # the broker is away for `amount` seconds
]
"""A choice at a boundary."""

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)[1:]
"""The faults: all choices but ``deliver``."""

OF_REQUESTS: Final[frozenset[Kind]] = frozenset({"delay", "drop_request", "drop_reply", "duplicate"})
"""The faults of a single request."""

_LASTING: Final[tuple[Kind, ...]] = ("delay", "freeze", "cut_off", "restart")
"""Faults that can last until about a deadline."""

_AT_CALLS: Final[tuple[Kind, ...]] = (
    "delay",
    "drop_request",
    "drop_request",
    "drop_reply",
    "duplicate",
    "freeze",
    "cut_off",
)
"""Faults that the chooser aims at the requests of a call."""

Phase = Literal["open", "steady", "drain", "lease", "commit", "takeover", "close"]
"""The activity of a member."""

PHASES: Final[tuple[Phase, ...]] = get_args(Phase)

AMOUNTS: Final[Mapping[Kind, tuple[float, ...]]] = {
    "delay": (0.01, 0.1, 0.5, 2.0, 6.0, 11.0, 11.0, 14.0),
    "drop_request": (0.0, 0.1, 2.0, 11.0),
    "drop_reply": (0.0, 0.1, 2.0, 11.0),
    "freeze": (0.1, 0.5, 2.0, 5.0, 9.0),
    "crash": (0.0, 0.1, 1.0, 5.0),
    "cut_off": (0.2, 1.0, 3.0, 8.0),
    "restart": (0.1, 0.5, 2.0, 8.0),
}
"""The amounts to draw from, in seconds; a kind without an entry has the amount 0."""

_RATES: Final = (0.01, 0.02, 0.05, 0.1)
"""Probabilities of a fault at a boundary. Each run has one of these probabilities."""

_FOCUS: Final = 0.15
"""Probability of a fault at a boundary of the phase, or at a request of the call, on which a run concentrates."""

_OF_A_REQUEST: Final = 0.6
"""Probability that a fault at a request is a fault of the request, if the run has one."""

_AT_A_DEADLINE: Final = 0.3
"""Probability that a fault lasts until about a deadline."""

_ELSEWHERE: Final = 4.0
"""Divisor of the probability at the boundaries of the other phases, in a run that concentrates on one phase."""

_MOST: Final = 6
"""Maximum number of drawn faults of a run; a run may have further aimed faults."""

_MOST_AIMED: Final = 8

_LATE: Final = (2.0, 11.0)
"""Seconds after which a client detects the loss of a retry."""

_OVERDUE: Final = 10.0
"""Seconds after which a client has repeated a request."""

_REPEATS: Final = (1, 1, 2, 4)
"""Numbers of times that a fault of a request happens again on the next requests of the same call."""

_DELICATE: Final[tuple[Phase, ...]] = ("drain", "drain", "takeover", "lease", "commit", "close")
"""Phases at which the chooser aims a fault."""

_ENDING: Final[frozenset[Kind]] = frozenset({"freeze", "crash", "cut_off", "callback"})
"""Faults after which another member may take the partitions over."""

_DEPENDENT: Final = 0.7
"""Probability that the chooser aims a second fault at a state that the first fault has made vulnerable."""

_AROUND: Final = (0.9, 1.1)
"""Factors of a deadline: a fault ends shortly before the deadline, or shortly after it."""

_TARGETS: Final = 8

_SEEKS: Final = (0.005, 0.02, 0.1, 0.4)
"""Probabilities of the first fault at a boundary, in a run that seeks a pair."""

_SEIZES: Final = 0.5
"""Probability of the second fault at a boundary that completes the pair."""

BETWEEN: Final[frozenset[Kind]] = frozenset({"freeze", "crash", "cut_off", "restart"})
"""Faults that can also happen between two boundaries, while the member waits."""

_LATER: Final[Mapping[int, float]] = {8: 0.02, 9: 0.3, 10: 2.0}
"""Seconds between the boundary and the fault, by target. The targets of other faults are lower."""

_WHILE_WAITING: Final = 0.4
"""Probability that a fault of ``BETWEEN`` happens between two boundaries."""

_INTERRUPTING: Final[frozenset[Kind]] = frozenset({"freeze", "crash", "cut_off", "restart", "callback"})
"""Faults after which a member, or its successor, works off what the fault has left."""

_AT_WORK: Final[tuple[str, Phase]] = "source", "steady"
"""Step and phase of a member at work."""

_NONE: Final[Mapping[Kind, Sequence[str]]] = {}


class Choice(NamedTuple):
    """A choice.

    Attributes:
        kind: Kind of the choice.
        amount: Seconds.
        target: Number by which a broker varies a fault, such as the member of a ``callback``. High numbers delay the
            fault; see ``later``.
    """

    kind: Kind
    amount: float = 0.0
    target: int = 0

    @property
    def later(self) -> float:
        """Seconds between the boundary and the fault; 0 = at the boundary."""
        return _LATER.get(self.target, 0.0) if self.kind in BETWEEN else 0.0


DELIVER: Final = Choice("deliver")


class Decision(NamedTuple):
    """A fault of a run.

    Attributes:
        number: Number of the boundary.
        choice: The fault.
    """

    number: int
    choice: Choice


class Place(NamedTuple):
    """A boundary.

    Attributes:
        member: Name of the member at the boundary.
        call: Name of the request or step, such as ``commit``.
        phase: Activity of the member.
        offers: Faults that can happen at the boundary.
    """

    member: str
    call: str
    phase: Phase
    offers: frozenset[Kind]


class Chooser(Protocol):
    """Decides what happens at each boundary. The answers depend only on the arguments and on the seed."""

    def choose(self, number: int, place: Place) -> Choice:
        """Choose what happens at a boundary.

        Args:
            number: Number of the boundary; numbers rise.
            place: The boundary.

        Returns:
            ``DELIVER``, or a fault of ``place.offers``.
        """

    @property
    def over(self) -> bool:
        """Whether no further fault happens."""


class Given:
    """Repeats decisions, except a decision whose fault cannot happen at its boundary.

    Args:
        decisions: The decisions.
        ends: Whether the faults are over after the last decision.
    """

    def __init__(self, decisions: Sequence[Decision], *, ends: bool = True) -> None:
        self._ends: Final = ends
        self._at: Final = dict(decisions)
        self._last: Final = max(self._at, default=-1)
        self._passed = -1

    def choose(self, number: int, place: Place) -> Choice:
        self._passed = number
        choice = self._at.get(number, DELIVER)
        return choice if choice.kind in place.offers else DELIVER

    @property
    def over(self) -> bool:
        return self._ends and self._passed >= self._last


class Sought:
    """Seeks one pair of faults: strikes with the first fault, and later with the second one at a member in a phase.

    The first fault may strike several times, because only faults of the last minute form a pair.

    Args:
        seed: Seed of the draws.
        first: The earlier fault.
        second: The later fault.
        phase: Activity of the member at the later fault.
    """

    def __init__(self, seed: str, first: Kind, second: Kind, phase: Phase) -> None:
        rng = self._random = Random(seed)
        self._first: Final = first
        self._second: Final = second
        self._phase: Final = phase
        self._rate: Final = rng.choice(_SEEKS)
        self._left = rng.randint(1, _MOST)
        self._struck = False
        self._found = False

    @property
    def over(self) -> bool:
        return self._found

    def choose(self, number: int, place: Place) -> Choice:
        rng = self._random
        if self._found:
            return DELIVER
        if self._struck and place.phase == self._phase and self._second in place.offers and rng.random() < _SEIZES:
            self._found = True
            return self._fault(self._second)
        if self._left and self._first in place.offers and rng.random() < self._rate:
            self._left -= 1
            self._struck = True
            return self._fault(self._first)
        return DELIVER

    def _fault(self, kind: Kind) -> Choice:
        return Choice(kind, self._random.choice(AMOUNTS.get(kind, (0.0,))), self._random.randrange(_TARGETS))


@dataclass(slots=True, eq=False)
class _Aim:
    """A fault aimed at the next boundaries of a member.

    Attributes:
        choice: The fault.
        member: Name of the member.
        call: Call of the client at the boundary; "" = any call.
        phase: Phase of the member at the boundary; None = any phase.
        times: Number of boundaries.
        others: Whether the fault strikes all members except ``member``.
    """

    choice: Choice
    member: str
    call: str = ""
    phase: Phase | None = None
    times: int = 1
    others: bool = False

    def fits(self, place: Place) -> bool:
        return (
            (self.member == place.member) is not self.others
            and self.call in ("", place.call)
            and self.phase in (None, place.phase)
            and self.choice.kind in place.offers
        )


class Drawn:
    """Draws the faults of a run.

    At its start a run draws the possible kinds of faults, the probability of a fault at a boundary, and the maximum
    number of faults. Runs with few kinds find errors that runs with all kinds hide (swarm testing: Groce, Zhang, Eide,
    Chen and Regehr, ISSTA 2012). More than half of the runs concentrate on one phase or on one call, because a drain, a
    takeover and most calls have few boundaries. After a fault, the chooser often aims a second fault. The second fault
    has any kind that the broker supports, and an aimed third fault may follow.

    Args:
        seed: Seed of the draws.
        kinds: Faults that the broker can have.
        deadlines: Durations of the adapter's deadlines, in seconds, such as a session and a drain.
        phases: Phases on which a run may concentrate.
        calls: Names of the requests on which a run may concentrate, or at which the chooser may aim a fault. A run
            draws a repeated name more often.
        reactions: Names of the requests that a member is likely to make after a fault, by the kind of the fault.
        waits: Whether faults also happen between two boundaries, and whether the chooser aims faults at members that
            take partitions over.
        interruptions: Faults that the chooser aims at a member shortly after an interruption.
    """

    def __init__(
        self,
        seed: str,
        kinds: frozenset[Kind],
        deadlines: Sequence[float],
        phases: Sequence[Phase] = PHASES,
        calls: Sequence[str] = (),
        reactions: Mapping[Kind, Sequence[str]] = _NONE,
        waits: bool = False,
        interruptions: Sequence[Kind] = (),
    ) -> None:
        rng = self._random = Random(seed)
        self._deadlines: Final = tuple(deadlines)
        self._kinds: Final = kinds
        self._drawn: Final = frozenset(kind for kind in KINDS if kind in kinds and rng.random() < 0.5)
        self._rate = rng.choice(_RATES)
        self._calls: Final = tuple(calls)
        self._reactions: Final = reactions
        self._phases: Final = tuple(phases)
        self._waits: Final = waits
        self._interruptions: Final = tuple(interruptions)
        self._delicate: Final = [phase for phase in _DELICATE if phase in phases]
        focused = [phases, phases, calls or phases][rng.randrange(3)]
        self._focus: str | None = rng.choice(focused) if rng.random() < 0.6 else None
        if self._focus is not None:
            # Otherwise the faults of the other phases use up the faults of the run.
            self._rate /= _ELSEWHERE
        self._left = rng.randint(1, _MOST) if self._drawn else 0
        self._aims_left = _MOST_AIMED
        self._aims: Final[list[_Aim]] = []

    @property
    def over(self) -> bool:
        return not self._left and not self._aims

    def choose(self, number: int, place: Place) -> Choice:
        for aim in self._aims:
            if aim.fits(place):
                aim.times -= 1
                if not aim.times:
                    self._aims.remove(aim)
                return self._chosen(aim.choice, place)
        if not self._left:
            return DELIVER
        rng = self._random
        if rng.random() >= (_FOCUS if self._focus in (place.phase, place.call) else self._rate):
            return DELIVER
        # In the order of KINDS, because the order of a set of strings differs between processes.
        kinds = [kind for kind in KINDS if kind in place.offers and kind in self._drawn]
        if not kinds:
            return DELIVER
        fates = [kind for kind in kinds if kind in OF_REQUESTS]
        # Without this preference, the faults of a process hide those of a request.
        kind = rng.choice(fates if fates and rng.random() < _OF_A_REQUEST else kinds)
        self._left -= 1
        return self._chosen(self._fault(kind), place)

    def _chosen(self, choice: Choice, place: Place) -> Choice:
        if self._aims_left and self._random.random() < _DEPENDENT:
            self._aims_left -= 1
            self._aims.append(self._aim(choice, place))
        return choice

    def _aim(self, first: Choice, place: Place) -> _Aim:
        """Aim a fault at the steps that follow the fault ``first``."""
        rng, member = self._random, place.member
        ways = ["next", "next", "until", "until", "phase", "phase", "call", "reaction", "reaction", "reaction"]
        if self._waits and first.kind in _ENDING:
            ways += ["successor", "successor"]
        if first.kind in OF_REQUESTS:
            ways += ["again", "lost", "lost", "lost"]
        if self._interruptions and first.kind in _INTERRUPTING:
            ways += ["interrupted"] * 6
        way = rng.choice(ways)
        if way == "interrupted":
            # The member has begun again, and still works off what the first fault has left. A crash has a successor.
            call, phase = _AT_WORK
            kind = rng.choice(self._interruptions)
            choice = Choice(kind, self._amount(kind), rng.choice([0, *_LATER]))
            return _Aim(choice, member, call, phase, others=first.kind == "crash")
        if way == "again":
            # The same fault on the retries.
            return _Aim(first, member, place.call, times=rng.choice(_REPEATS))
        if way == "lost" and "drop_request" in self._kinds:
            # The client learns of the loss after the late answer to the first request. Other requests of the same name
            # may precede the retry of a request that is later than its timeout.
            lost, times = Choice("drop_request", rng.choice(_LATE)), rng.choice(_REPEATS)
            overdue = first.kind == "delay" and first.amount >= _OVERDUE
            return _Aim(lost, member, place.call, times=_REPEATS[-1] if overdue else times)
        if way == "until" and self._deadlines:
            kind = rng.choice(self._of(_LASTING))
            return _Aim(Choice(kind, rng.choice(self._deadlines) * rng.choice(_AROUND)), member)
        if way == "successor":
            # Another member takes the partitions over.
            kind, phase = rng.choice(self._of(KINDS)), rng.choice(self._phases)
            times = rng.choice(_REPEATS) if kind in OF_REQUESTS else 1
            return _Aim(self._fault(kind), member, phase=phase, times=times, others=True)
        if way == "phase" and self._delicate:
            return _Aim(self._fault(rng.choice(self._of(KINDS))), member, phase=rng.choice(self._delicate))
        calls = self._reactions.get(first.kind, self._calls) if way == "reaction" else self._calls
        if way in ("call", "reaction") and calls:
            kind = rng.choice(self._of(_AT_CALLS))
            return _Aim(self._fault(kind), member, rng.choice(calls), times=rng.choice(_REPEATS))
        return _Aim(self._fault(rng.choice(self._of(KINDS))), member)

    def _of(self, kinds: Sequence[Kind]) -> list[Kind]:
        """Return the members of ``kinds`` that the broker has, or all kinds of the broker if it has none of them."""
        return [kind for kind in kinds if kind in self._kinds] or [kind for kind in KINDS if kind in self._kinds]

    def _fault(self, kind: Kind) -> Choice:
        amount, target = self._amount(kind), self._random.randrange(_TARGETS)
        if self._waits and kind in BETWEEN and self._random.random() < _WHILE_WAITING:
            target = self._random.choice([*_LATER])
        return Choice(kind, amount, target)

    def _amount(self, kind: Kind) -> float:
        rng, amounts = self._random, AMOUNTS.get(kind)
        if amounts is None:
            return 0.0
        if kind != "crash" and self._deadlines and rng.random() < _AT_A_DEADLINE:
            return rng.choice(self._deadlines) * rng.choice(_AROUND)
        return rng.choice(amounts)
