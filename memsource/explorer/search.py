"""Breadth-first search through every order of events, with the shortest path to a violation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class Broken(Exception):
    """The error for a broken invariant.

    ``step`` is the event that broke the invariant; None = the last event of the path.
    """

    def __init__(self, invariant: str, text: str, step: str | None = None) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
        self.text = text
        self.step = step


class World(Protocol[S]):
    """A model to explore: its first state, and the possible events of each state. A state is immutable and hashable."""

    def start(self) -> S:
        """Return the first state."""

    def steps(self, state: S) -> Iterator[tuple[Callable[[], str], S]]:
        """Yield one function for each possible event. The function returns the event's text and the next state. Pure.

        Raises ``Broken`` for an event or a state that breaks an invariant.
        """

    @property
    def reached(self) -> Counter[str]:
        """Counts of each kind of event and of each rare branch in the search."""


class Violation(NamedTuple):
    """A broken invariant.

    Attributes:
        invariant: Name of the invariant.
        text: The fault.
        path: The shortest sequence of events that leads to the violation.
    """

    invariant: str
    text: str
    path: tuple[str, ...]

    def __str__(self) -> str:
        steps = "\n".join(f"{number:3}. {step}" for number, step in enumerate(self.path, 1))
        return f"{self.invariant}: {self.text}\n{steps}"


class Exploration(NamedTuple):
    """The result of a search.

    Attributes:
        states: Number of distinct states that the search found.
        steps: Number of events that the search tried.
        depth: Number of events on the shortest path from the first state to the farthest state.
        reached: Counts of each kind of event and of each rare branch in the search.
        violation: The first violation; None = no violation.
        complete: Whether the search visited all states.
    """

    states: int
    steps: int
    depth: int
    reached: Counter[str]
    violation: Violation | None
    complete: bool

    def __str__(self) -> str:
        found = "complete" if self.complete else "cut short"
        return f"{self.states:,} states, {self.steps:,} steps, depth {self.depth}, {found}"


def search(world: World[S], *, max_states: int | None = None) -> Exploration:
    """Visit every state of a world once, nearest first, until the first violation. Blocks.

    The search needs a few hundred bytes of memory for each state.

    Args:
        world: The world to explore.
        max_states: Number of found states above which the search stops; None = no maximum.

    Returns:
        The counts of the search, and its first violation.
    """
    first = world.start()
    known = {first: 0}
    states = [first]
    parents: list[tuple[int, Callable[[], str]]] = [(-1, str)]
    depths = [0]
    steps = at = 0
    violation = None
    while at < len(states) and violation is None and (max_states is None or len(states) <= max_states):
        try:
            for text, following in world.steps(states[at]):
                steps += 1
                if following not in known:
                    known[following] = len(states)
                    states.append(following)
                    parents.append((at, text))
                    depths.append(depths[at] + 1)
        except Broken as broken:
            path = [] if broken.step is None else [broken.step]
            while parents[at][0] >= 0:
                at, text = parents[at]
                path.append(text())
            violation = Violation(broken.invariant, broken.text, tuple(reversed(path)))
        at += 1
    complete = violation is None and at == len(states)
    return Exploration(len(states), steps, depths[-1], world.reached, violation, complete)
